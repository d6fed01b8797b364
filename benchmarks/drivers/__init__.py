"""One module per system, run by its own interpreter: `python -m benchmarks.drivers.<system> <database url>`."""
