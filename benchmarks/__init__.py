"""Measurements of mtpc beside its peers; run as `python -m benchmarks.decode`."""
