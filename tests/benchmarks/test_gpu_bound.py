"""docs/gpu.md's tables of what AMD's GPUs run are those of the script, which needs no GPU."""

from __future__ import annotations

import pytest
from helpers.triton_here import INTERPRETS

from benchmarks.gpu_bound import COLUMNS, PAGE, heads_table, put, rows
from benchmarks.harness.released_shapes import RELEASED

SLOW = pytest.mark.slow


def test_the_page_has_what_the_data_say() -> None:
    made = put(PAGE.read_text(), "heads", heads_table())
    assert made == PAGE.read_text(), "benchmarks.gpu_bound --write"


def test_a_part_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 parts 'counts'; expected one"):
        put("a page", "counts", "| a |\n")


def _lines(name: str) -> list[str]:
    """A model's rows in the page."""
    return [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} | ")]


def test_the_page_has_a_row_for_each_model() -> None:
    assert all(len(_lines(name)) in (1, 2) for name in RELEASED)
    assert f"| {' | '.join(COLUMNS)} |" in PAGE.read_text()


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETS, reason="binds Triton's kernels: tests/run_triton.sh")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "GLM-4.5" else SLOW) for n in RELEASED]
)
def test_the_page_has_what_the_script_counts(name: str) -> None:
    """On both devices, in seconds a model."""
    assert [f"| {' | '.join(row)} |" for row in rows([name])] == _lines(name)
