"""`sluice drop` and `sluice restore`: pipeline groups by hand."""
