"""The benchmark of long contexts at a tiny size: what it decodes, and its arithmetic. No times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import context
from benchmarks.harness.decoders import Decoded
from benchmarks.harness.models import SHAPES
from benchmarks.harness.tables import Row

ARGUMENTS = (
    *("--shape", "tiny", "--backend", "eager", "--spec-tokens", "1", "--batches", "1", "2"),
    *("--contexts", "64", "128", "--new-tokens", "8", "--repeats", "1", "--max-foreign", "1"),
    *("--probe-mib", "1"),
)


def test_every_context_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reused = list[int]()
    decode = context.ContextDecoder.decode

    def watched(self: Any, prompts: Any, new_tokens: int) -> Decoded:
        before = self.model.stats.reused_tokens
        done = decode(self, prompts, new_tokens)
        reused.append((self.model.stats.reused_tokens - before) // len(prompts))
        return done

    monkeypatch.setattr(context.ContextDecoder, "decode", watched)
    out = tmp_path / "context.json"
    assert context.main([*ARGUMENTS, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    made = [(row["context"], row["batch"]) for row in rows]
    assert made == [(64, 1), (64, 2), (128, 1), (128, 2)]
    # No more than the last page of a prompt was computed, in warm-ups and samples.
    lengths = [64] * 4 + [128] * 4
    assert all(0 < length - have <= 17 for length, have in zip(lengths, reused, strict=True))
    assert rows[2]["step_bytes"] - rows[0]["step_bytes"] == 64 * 2 * 2 * 2 * 16 * 3


def _row(context: int, bytes_read: int, ms: float) -> Row:
    case = dict(engine="mtpc", spec_tokens=0, batch=1, context=context)
    figures = dict(step_bytes=bytes_read, ms_per_step=ms, bandwidth_gb_s=1.0)
    limit = 1e-6 * bytes_read
    figures |= dict(roofline_ms=limit, efficiency=limit / ms)
    return {**case, **figures, "samples": 1, "discarded": 0, "disturbed": False}


def test_cells() -> None:
    """A megabyte more takes 1 ms at 1 GB/s; 4 ms more were needed: a quarter of the limit."""
    rows = [_row(64, 10**6, 2.0), _row(128, 2 * 10**6, 6.0)]
    first, second = context.table({"arguments": {"shape": "tiny"}, "rows": rows}).cells
    assert first[4:] == ["2.00", "-", "1.0", "0", "1.00", "50%", "-", "1+0"]
    assert second[4:] == ["6.00", "-", "1.0", "0", "2.00", "33%", "25%", "1+0"]


def test_codes_take_a_byte_and_a_scale() -> None:
    """Of K and V: 32 tokens of 2 heads of 16, in each target layer and twice in the MTP layer."""
    plain, coded = (
        context.kv_bytes(SHAPES["tiny"], 2, 32, context.ENGINES[kind]) for kind in ("auto", "fp8")
    )
    layers = SHAPES["tiny"].num_hidden_layers + 2
    assert plain == 2 * 32 * 2 * layers * 16 * 2
    assert coded == 2 * 32 * 2 * layers * (16 + 4)


@pytest.mark.slow
def test_rows_of_pages_of_codes(tmp_path: Path) -> None:
    out = tmp_path / "context.json"
    few = (
        "--batches",
        "1",
        "--contexts",
        "64",
        "--spec-tokens",
        "0",
        "--kv-cache-dtypes",
        "int8",
        "fp8",
    )
    assert context.main([*ARGUMENTS, *few, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["engine"] for row in rows] == ["mtpc, int8 KV", "mtpc, fp8 KV"]
