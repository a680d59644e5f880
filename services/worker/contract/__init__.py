"""What engine and executor say to each other; knows neither, and nothing else of the worker."""
