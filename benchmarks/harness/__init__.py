"""Parts that the benchmarks share: samples in turns, checkpoints, command lines."""
