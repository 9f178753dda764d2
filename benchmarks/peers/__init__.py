"""The engines that benchmarks compare with mtpc, each in its own process."""
