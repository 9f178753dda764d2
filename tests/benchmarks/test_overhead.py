"""The overhead benchmark: the same work by every path, and the figures. Never a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import overhead
from benchmarks.overhead import GOALS, Work, summary


def test_figures() -> None:
    """By hand: ratios are of the same round."""
    taken = [(1.0, 2.0), (2.0, 2.5)]
    samples = [
        {path: dict(seconds=first if path == "replay" else then, steps=5) for path in GOALS}
        for first, then in taken
    ]
    first, *_, last = summary(Work([[1], [2]], 5), samples)["paths"]
    assert (first["path"], first["of_replay"]) == ("replay", 1.0)
    assert last["of_replay"] == pytest.approx((1 / 2 + 2 / 2.5) / 2)
    assert last["tokens_per_s"] == pytest.approx((10 / 2 + 10 / 2.5) / 2)
    assert last["ms_per_step"] == pytest.approx((400 + 500) / 2)


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every path does as many steps; bare replay checks its own result."""
    out = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--backend", "eager", "--batches", "2", "--new-tokens", "8"]
    few = ["--repeats", "1", "--max-foreign", "1", "--spec-tokens", "1", "--prompt-tokens", "4"]
    assert overhead.main([*arguments, *few, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["path"] for row in rows] == ["replay", "Engine", "AsyncEngine", "mtpc serve"]
    assert rows[0]["steps"] == rows[1]["steps"] >= 2 + 4
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert "of replay" in capsys.readouterr().out
