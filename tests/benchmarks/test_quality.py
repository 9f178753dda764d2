"""The benchmark of what fewer bits cost: rows are written one by one, and a run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.char_model import char_checkpoint

from benchmarks import quality


def test_a_ratio_and_its_error() -> None:
    """Of two windows whose mean losses grew by 0.1 and 0.3."""
    plain = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    ratio, error = quality.over_plain(plain + torch.tensor([[0.1], [0.3]]), plain)
    assert ratio == pytest.approx(math.exp(0.2))
    assert error == pytest.approx(ratio * 0.1)


def test_a_run_goes_on_with_other_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """int8 costs next to nothing; plain weights in a file of their own cost nothing at all."""
    model = char_checkpoint(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("Bees see more than we do. " * 40)
    out = tmp_path / "out" / "quality.json"
    given = [str(model), "--no-run", "--texts", str(text), "--windows", "2", "--out", str(out)]

    def rows(*ways: str) -> list[dict[str, Any]]:
        assert quality.main([*given, *ways]) == 0
        found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return found

    first = rows("--schemes", "int8")
    assert [row["name"] for row in first] == ["int8"]
    assert 1 < first[0]["ratio"] < 1.01
    capsys.readouterr()
    both = rows("--schemes", "int8", "--files", str(model))
    assert both[:1] == first
    assert (both[1]["name"], both[1]["ratio"]) == ("model", 1)
    assert "s] int8" not in capsys.readouterr().err
    assert str(tmp_path) not in out.read_text()
    with pytest.raises(SystemExit, match="results of other arguments"):
        quality.main([*given, "--windows", "1"])
