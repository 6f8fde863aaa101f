"""What a training step costs with and without the wrapper: ``python -m benchmarks --help``."""
