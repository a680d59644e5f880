"""`sluice replay`: a trace on a live server, reported as `sluice compare` reports a simulated one."""
