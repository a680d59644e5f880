"""One file per figure; each prints its table and runs by `python -m benchmarks.<name>`."""
