"""The benchmark of second turns with a short prompt: what is reused, and its table. No times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import second_turn

ARGUMENTS = (
    *("--families", "step3p5", "--backend", "eager", "--spec-tokens", "1"),
    *("--prompt-tokens", "128", "--repeats", "1"),
)


@pytest.mark.slow
def test_both_turns_reuse_the_prompt(tmp_path: Path) -> None:
    out = tmp_path / "second.json"
    assert second_turn.main([*ARGUMENTS, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["turn"] for row in record["rows"]] == ["second", "stripped"]
    second, stripped = (row["reused"] for row in record["rows"])
    assert 128 - 32 <= stripped <= 128 <= second < 128 + second_turn.ANSWER


def test_cells() -> None:
    rows = [
        dict(model="m", spec_tokens=1, prompt_tokens=64, turn="second", cold_s=2.0, turn_s=t,
             reused=r)
        for t, r in ((0.1, 60), (0.2, 50), (0.9, 70))
    ]  # fmt: skip
    (cells,) = second_turn.table({"rows": rows}).cells
    assert cells == ["m", "mtpc", "1", "64", "second", "2.00", "200", "10.0%", "50", "3"]
