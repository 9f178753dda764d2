"""Measurements of mtpc beside its peers; run as `python -m benchmarks.decode`."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository: where processes that benchmarks start find the package `benchmarks`."""
