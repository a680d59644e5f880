"""What the monitor decides, as pure functions."""
