"""The benchmark of K by load: its figures by hand, and all of it on a tiny shape. Never a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tier_grid, tiers
from benchmarks.harness.arrivals import Arrival
from benchmarks.harness.tables import Row
from benchmarks.serving import MtpcServer


def row(k: int | str, tokens_per_s: float, load: str = "low") -> Row:
    figures = dict(tokens_per_s=tokens_per_s, ms_per_token_p50=5.0)
    counts = dict(samples=2, discarded=1, disturbed=False)
    by_k = {0: 30, 3: 10} if k == "auto" else {}
    case = dict(weights="random", load=load, spec_tokens=k)
    return {**case, **figures, "tokens_by_k": by_k, **counts}


def cells(rows: list[Row]) -> Any:
    return tiers.table({"rows": rows}).cells


def test_figures() -> None:
    """Waiting for requests does not count; auto is compared with the better fixed K of its load."""
    found = {"traces": [[(1.0, 1), (1.2, 3)], [(0.5, 2)]], "work_s": 1.5}
    assert tiers.figures([0.0, 9.0], found)["tokens_per_s"] == pytest.approx(6 / 1.5)
    rows = [row(0, 20.0), row(3, 10.0), row("auto", 15.0), row(0, 99.0, "high")]
    assert tiers.fixed(rows[2], rows) == {0: 20.0, 3: 10.0}
    table = cells(rows)
    assert [line[4] for line in table] == ["1.00", "0.50", "0.75", "1.00"]
    assert [line[5] for line in cells([row(0, 5.0), row(3, 10.0)])] == ["1.00", "2.00"]
    assert [line[7] for line in table] == ["-", "-", "0: 75%, 3: 25%", "-"]
    assert {line[8] for line in table} == {"2+1"}


@pytest.mark.slow
def test_tokens_are_counted_by_the_k_of_their_step(compiled: Callable[..., Any]) -> None:
    """All but a request's first token, which is its prefill's."""
    spec = compiled("mimo", "auto", spec_tiers=(0, 1), batch_buckets=(1,))
    server = MtpcServer(spec)
    arrivals = [Arrival(0.0, [5, 6, 7], 9), Arrival(0.0, [8, 9], 12)]
    for _ in range(2):  # A run does not count another's.
        run = server.run(arrivals)
        assert sum(run["tokens_by_k"].values()) == 9 + 12 - 2
        assert run["work_s"]
    assert set(spec.stats.replays) >= {k for k in spec.program.steps if k.phase == "decode"}


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--backend", "eager", "--requests", "2", "--rate", "50"]
    few = ["--repeats", "1", "--max-foreign", "1", "--spec-tokens", "1", "--tiers", "0", "1"]
    assert tiers.main([*arguments, *few, "--batch-buckets", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["weights"], r["load"], r["spec_tokens"]) for r in rows] == [
        (weights, load, k)
        for weights in ("accepting", "random")
        for load in ("50 requests/s", "burst of 2")
        for k in (0, 1, "auto")
    ]
    assert all(r["tokens_per_s"] > 0 for r in rows)
    for r in rows:
        assert set(r["tokens_by_k"]) <= {"0", "1"}
        assert r["spec_tokens"] == "auto" or set(r["tokens_by_k"]) == {str(r["spec_tokens"])}
    assert "of best fixed" in capsys.readouterr().out


@pytest.mark.slow
def test_every_fixed_k_at_synthetic_acceptance(tmp_path: Path) -> None:
    """K = 0 is a program of its own, the others share that of "auto"; all accept as asked.

    Those of "auto" come without an earlier run's costs and with them.
    """
    out = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--backend", "eager", "--requests", "2", "--rate", "50"]
    few = ["--repeats", "1", "--max-foreign", "1", "--tiers", "0", "1", "--acceptance", "0", "1"]
    assert tiers.main([*arguments, *few, "--batch-buckets", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["weights"], r["load"], r["spec_tokens"]) for r in rows] == [
        (f"synthetic {acceptance}", load, k)
        for acceptance in (0, 1)
        for load in ("50 requests/s", "burst of 2")
        for k in (0, 1, tiers.AUTO, tiers.AGAIN)
    ]
    assert all(r["tokens_per_s"] > 0 for r in rows)


def test_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a load, and a line of the table for each value that loads have in common."""
    out = tmp_path / "grid.json"
    assert tier_grid.main(["--every", "1537", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["batch"] for row in record["rows"]] == [1, 1]
    lines = tier_grid.table(record).cells
    assert lines[0][:2] == ["all", "2"]
    assert sum(line[0].startswith("drift") for line in lines) == 2
    assert float(lines[0][2]) == pytest.approx(min(r["best"] for r in record["rows"]), abs=1e-3)
    assert "least of K=0" in capsys.readouterr().out


def test_short_bursts(tmp_path: Path) -> None:
    """A policy that knows costs is nearer to the best K than one that has to measure them."""
    out = tmp_path / "short.json"
    assert tier_grid.main(["--short", "--every", "24", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["batch"] for row in record["rows"]] == [1] * 4
    (name, count, *shares), *_ = tier_grid.table(record).cells
    assert (name, count) == ("all", "4")
    nothing, _, known, _ = map(float, shares)
    assert 0.9 < nothing < known < 1.01
