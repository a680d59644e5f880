"""Experiments: a workload on a system, what every request saw, and what it adds up to; simulated or live."""
