"""What the planner decides, as pure functions."""
