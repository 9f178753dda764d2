"""Directories of this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Holds mtpc, docs, examples and benchmarks."""
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
"""This folder; some of its modules are also programs for child processes."""
