"""docs/gpu.md's tables of what AMD's GPUs run are those of the script, which needs no GPU."""

from __future__ import annotations

import pytest
from helpers.triton_here import INTERPRETS

from benchmarks.gpu_bound import COLUMNS, LAYERS, PAGE, heads_table, layers_table, put, rows
from benchmarks.gpu_model import BEFORE, Case, one_layer
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
    begins = (f"| {name} | ", f"| {name}, a rank of ")
    return [line for line in PAGE.read_text().splitlines() if line.startswith(begins)]


def test_the_page_has_a_row_for_each_model() -> None:
    assert all(len(_lines(name)) in (1, 2) for name in (*RELEASED, *LAYERS))
    assert f"| {' | '.join(COLUMNS)} |" in PAGE.read_text()


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETS, reason="binds Triton's kernels: tests/run_triton.sh")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "GLM-4.5" else SLOW) for n in RELEASED]
)
def test_the_page_has_what_the_script_counts(name: str) -> None:
    """On both devices, in seconds a model."""
    assert [f"| {' | '.join(row)} |" for row in rows([name])] == _lines(name)


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETS, reason="plans Triton's kernels: tests/run_triton.sh")
def test_passes_leave_fewer_launches_of_a_layer_and_no_more_bytes() -> None:
    """Of a tiny one: norms, projections and writes are joined."""
    case = Case("tiny-glm4", 2, 1, False)
    before, after = one_layer(case, 64, BEFORE), one_layer(case, 64)
    assert 5 < after[0] <= before[0] - 3
    assert 0 < after[1] <= before[1]


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETS, reason="plans Triton's kernels: tests/run_triton.sh")
@pytest.mark.parametrize("shape", LAYERS)
def test_the_page_has_a_layers_launches_and_bytes(shape: str) -> None:
    """In half a minute a shape."""
    assert layers_table([shape]).splitlines()[2:] == _lines(shape)
