"""Scheduling policies: pure decisions about the next step."""
