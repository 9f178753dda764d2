"""The benchmark of torch.compile: its arithmetic, and a run at a tiny size. Never a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dynamo
from benchmarks.harness.rounds import Case
from benchmarks.harness.tables import Row


def _row(engine: str, *ms: float) -> Row:
    case = Case(dict(forward="decode", batch=4, engine=engine), dict)
    case.samples = [dict(ms=each, first_s=1.5, foreign_share=0.5 * (each > 100)) for each in ms]
    return case.result(max_foreign=0.1)


def test_cells() -> None:
    """Medians of undisturbed samples; Inductor's time over the engine's."""
    rows = [_row("Inductor", 30.0, 20.0, 25.0), _row("mtpc", 20.0, 500.0)]
    record = {"arguments": {"prompt_tokens": 1, "shape": "tiny"}, "rows": rows}
    assert dynamo.table(record).cells == [
        ["decode", "4", "Inductor", "25.00", "1.00x", "1.5", "3+0"],
        ["decode", "4", "mtpc", "20.00", "1.25x", "1.5", "1+1"],
    ]


@pytest.mark.slow
def test_every_engine_has_its_rows(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--prompt-tokens", "24", "--batches", "1", "--calls", "2"]
    files = ["--repeats", "1", "--max-foreign", "1", "--out", str(tmp_path / "d.json")]
    assert dynamo.main([*arguments, *files]) == 0
    record = json.loads((tmp_path / "d.json").read_text())
    assert [(row["forward"], row["engine"]) for row in record["rows"]] == [
        (forward, engine) for engine in dynamo.ENGINES for forward in ("prefill", "decode")
    ]
    assert len(record["reports"]) == 2, "a graph for each forward"
    assert all("mtpc's kernels take" in report for report in record["reports"])
