"""Shared parts of the benchmarks: sampling, checkpoints, command lines."""
