"""The benchmark of synthetic acceptance: its figures by hand, and all of it on a tiny shape."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import acceptance, decode, plot
from benchmarks.harness.decoders import Decoded, Decoder
from benchmarks.peers import decoders

COUNTS: dict[str, Any] = dict(samples=2, discarded=0, disturbed=False, taken=())


def row(spec_tokens: int, probability: float | None, tokens: float, ms: float) -> acceptance.Row:
    return acceptance.Row("mtpc", spec_tokens, 2, probability, tokens, ms, None, **COUNTS)


def test_figures() -> None:
    """K=1 costs half a step more, so it pays once half of its drafts are accepted."""
    rows = [row(0, None, 1, 10), row(1, 0.0, 1, 15), row(1, 1.0, 2, 15), row(2, 0.0, 1, 40)]
    assert rows[0].tokens_per_s == pytest.approx(200)
    assert acceptance.over_plain(rows, rows[2]) == pytest.approx(2 / 1.5)
    assert acceptance.pays_from(rows, rows[1]) == pytest.approx(0.5)
    assert acceptance.pays_from(rows, rows[3]) is None
    assert acceptance.pays_from([rows[0], row(1, 0.0, 1, 10)], rows[1]) == 0
    body = acceptance.table({"rows": [*map(asdict, rows)]}).cells
    assert [line[8] for line in body] == ["-", "50%", "50%", "never"]
    assert [line[3] for line in body] == ["-", "0%", "100%", "0%"]
    assert "SYNTHETIC" in acceptance.NOTES[0]


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

    def peers(python: Path, directory: Path, numbers: Any, *sizes: Any, **more: Any) -> Any:
        return map(Peer, numbers)

    monkeypatch.setattr(decoders, "vllm_decoders", peers)
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


@pytest.mark.slow
def test_decode_marks_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--backend", "eager", "--batches", "1", "--spec-tokens", "0"]
    few = ["1", "--repeats", "1", "--max-foreign", "1", "--new-tokens", "17", "--probe-mib", "1"]
    only = ["--workloads", "mimo-random", "--no-peers", "--no-int8", "--out", str(out)]
    length = ["--synthetic-acceptance-length", "2"]
    assert decode.main([*arguments, *few, *only, *length]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["weights"] for r in rows} == {"random, synthetic 2.0"}
    assert [r["acceptance_rate"] for r in rows] == [None, 1.0]
    with pytest.raises(SystemExit):
        decode.main([*arguments, *few, *length, "--vllm-python", "python"])
