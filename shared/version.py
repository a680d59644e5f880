"""The version of this release, as the services and the command line report it."""

from __future__ import annotations

VERSION = "0.1.0"
"""Semantic version; equal to the distribution's (a test compares them)."""
