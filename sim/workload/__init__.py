"""Workloads: who asks for how much, and when; from traces or drawn by seed."""
