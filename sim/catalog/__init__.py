"""The catalogue: models and GPUs that can be simulated, as data with their sources."""
