"""mtpc on a GPU: run as `python -m benchmarks.gpu`."""
