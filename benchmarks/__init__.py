"""Benchmarks of mtpc and of other engines; run as `python -m benchmarks.decode`."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository, from which child processes import the package `benchmarks`."""
