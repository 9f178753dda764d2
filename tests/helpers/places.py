"""Directories of this repository, wherever a test's file is."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Holds mtpc, docs, examples and benchmarks."""
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
"""Some of these modules are programs, too, for tests that start a process."""
