"""The benchmark of synthetic acceptance: its figures by hand, and all of it on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import acceptance, plot
from benchmarks.harness.decoders import Decoded, Decoder
from benchmarks.harness.tables import Row
from benchmarks.peers import decoders


def row(spec_tokens: int, probability: float | None, tokens: float, ms: float) -> Row:
    figures = dict(synthetic_acceptance=probability, tokens_per_step=tokens, ms_per_step=ms)
    counts = dict(samples=2, discarded=0, disturbed=False)
    return {"engine": "mtpc", "spec_tokens": spec_tokens, "batch": 2, **figures, **counts}


def test_figures() -> None:
    """K=1 costs half a step more, so it pays once half of its drafts are accepted."""
    record = {
        "rows": [row(0, None, 1, 10), row(1, 0.0, 1, 15), row(1, 1.0, 2, 15), row(2, 0.0, 1, 40)]
    }
    rows = acceptance.rows_of(record)
    assert rows[0]["tokens_per_s"] == pytest.approx(200)
    assert acceptance.over_plain(rows[2], rows) == pytest.approx(2 / 1.5)
    assert acceptance.pays_from(rows, rows[1]) == pytest.approx(0.5)
    assert acceptance.pays_from(rows, rows[3]) is None
    free = acceptance.rows_of({"rows": [row(0, None, 1, 10), row(1, 0.0, 1, 10)]})
    assert acceptance.pays_from(free, free[1]) == 0
    table = acceptance.table(record)
    assert [line[8] for line in table.cells] == ["-", "50%", "50%", "never"]
    assert [line[3] for line in table.cells] == ["-", "0%", "100%", "0%"]
    assert "SYNTHETIC" in table.notes[0]


class Peer(Decoder):
    """Takes a second for ten steps; knows how many like it live."""

    engine, build_s, living = "vLLM", 0.0, 0

    def __init__(self, spec_tokens: int):
        self.spec_tokens = spec_tokens
        Peer.living += 1
        assert Peer.living == 1, "each may take a quarter of the memory"

    def decode(self, prompts: Any, new_tokens: int) -> Decoded:
        return Decoded(10, 10 * len(prompts), 1.0, 0.0 if self.spec_tokens else None)

    def close(self) -> None:
        Peer.living -= 1


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is accepted with certainty is: the samples' own counts say so.

    One process of a peer lives at a time.
    """

    def peer(python: Path, directory: Path, k: int, *sizes: Any, **more: Any) -> Peer:
        return Peer(k)

    monkeypatch.setattr(decoders, "VllmDecoder", peer)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--shape", "tiny", "--backend", "eager", "--batches", "2", "--spec-tokens", "1"]
    few = ["--repeats", "1", "--max-foreign", "1", "--new-tokens", "17", "--probe-mib", "1"]
    wanted = ["--acceptance", "0", "1", "--vllm-python", "python", "--out", str(out)]
    assert acceptance.main([*arguments, *few, *wanted]) == 0
    assert Peer.living == 0
    rows = json.loads(out.read_text())["rows"]
    found = [(r["spec_tokens"], r["synthetic_acceptance"], r["accepted"]) for r in rows]
    ours, theirs = [(0, None, None), (1, 0.0, 0.0), (1, 1.0, 1.0)], [(0, None, None), (1, None, 0)]
    assert found == [*ours, *theirs]
    assert [r["tokens_per_step"] for r in rows] == [1, 1, 2, 1, 1]
    assert [r["ms_per_step"] for r in rows[3:]] == [100, 100]
    assert plot.main([str(out), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
