"""`mtpc bench`: rows, order, honesty about texts. Never a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.word_model import SMALL_MODEL

from mtpc.cli import bench
from mtpc.cli.main import main
from mtpc.layout import StepKey


def table(out: str) -> list[list[str]]:
    """The body's cells."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    return [cells for cells in lines if cells[0].isdigit()]


def test_every_variant_has_a_row(
    word_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the order asked for; a pass to compare has its own, beside each K that drafts."""
    picture = tmp_path / "bench.svg"
    arguments = ["--spec-tokens", "0,1", "--compare", "quantise-draft", "--repeats", "1"]
    prompts = ["-p", "w5 w6 w7", "--ids", "8 9", "-n", "6", "--dtype", "float32"]
    prompts += ["--plot", str(picture)]
    assert main(["bench", str(word_model), *SMALL_MODEL, *arguments, *prompts]) == 0
    out = capsys.readouterr().out
    rows = table(out)
    fastest = max(rows, key=lambda row: float(row[3]))
    name = f"K={fastest[0]}{' quantise-draft' * (fastest[1] != '-')}"
    assert f"fastest: {name}, {fastest[3]} tokens/s, {fastest[6]} the first row" in out
    assert [row[:2] for row in rows] == [["0", "-"], ["1", "-"], ["1", "quantise-draft"]]
    drawn = picture.read_text()
    for text in ("K=0", "K=1", "K=1 quantise-draft", "1.00x", rows[1][6], "2 prompt(s)"):
        assert text in drawn  # matplotlib writes each text as a comment beside its curves.
    assert rows[0][4:8] == ["1.00", "-", "1.00x", "yes"]
    for row in rows[1:]:
        assert row[5].endswith("%")
        assert row[7] == "yes"  # float32: drafts decide nothing.
        assert 1 <= float(row[4]) <= 2
    for row in rows:
        assert row[8] == "1.00", "one replay a step"
        assert int(row[9]) >= 0
        assert row[10] == "-", "kernels are counted on GPUs"


@pytest.mark.slow
def test_drafters_are_compared(word_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each K that drafts has a row for each drafter."""
    arguments = ["--spec-tokens", "1", "--draft", "copy,own", "--repeats", "1"]
    prompts = ["-p", "w5 w6 w7 w5 w6 w7", "-n", "6", "--dtype", "float32"]
    assert main(["bench", str(word_model), *SMALL_MODEL, *arguments, *prompts]) == 0
    rows = table(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["1", "copy"], ["1", "-"]]
    assert [row[7] for row in rows] == ["yes"] * 2


def test_each_k_that_drafts_has_a_row_for_each_drafter() -> None:
    rows = [(v.spec_tokens, v.draft) for v in bench._variants([0, 2], ["copy", "own"], ())]
    assert rows == [(0, "own"), (2, "copy"), (2, "own")]


def test_synthetic_acceptance_is_said(word_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A K takes its first rates."""
    arguments = ["--spec-tokens", "1", "--repeats", "1", "--dtype", "float32"]
    rates = ["--synthetic-acceptance-rates", "1,0"]
    prompts = ["-p", "w5 w6 w7", "-n", "13"]
    assert main(["bench", str(word_model), *SMALL_MODEL, *arguments, *rates, *prompts]) == 0
    out = capsys.readouterr().out
    found = [row[4:6] for row in table(out)]
    assert found == [["2.00", "100.0%"]]
    assert "Decoding, SYNTHETIC acceptance" in out
    assert "the text is not the model's" in " ".join(out.split())


def test_a_pass_that_a_backend_chooses_is_left_out_where_it_is_compared() -> None:
    """Else both variants would run it. One that is off anyway is not named."""
    compared = ["pack-weights", "quantise-draft"]
    asked = {"enabled_passes": ("quantise-draft",), "disabled_passes": ("pack-weights",)}
    for options in ({}, asked):
        rows = [
            bench._options_of(variant, options)
            for variant in bench._variants([2], ["own"], compared)
        ]
        assert [set(row["enabled_passes"]) for row in rows] == [set(), {compared[0]}, {compared[1]}]
        left_out = [set(row["disabled_passes"]) for row in rows]
        assert left_out == [{"pack-weights"}, set(), {"pack-weights"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give prompts"),
        (["-p", "w5", "--compare", "quantize-draft"], "unknown pass 'quantize-draft'"),
        (["-p", "w5", "--spec-tokens", "-1"], "spec_tokens"),
        (["-p", "w5", "--spec-tokens", ""], "--spec-tokens is empty"),
        (["-p", "w5", "-n", "1"], "expected 2 or more"),
        (["-p", "w5", "--synthetic-acceptance-length", "9"], "expected 1..2 tokens"),
    ],
)
def test_what_it_refuses(
    word_model: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", str(word_model), *SMALL_MODEL, "-n", "6", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out


def test_kernels_are_counted_of_the_largest_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed for nobody; where there is no GPU, nothing is."""
    keys = [StepKey.decode(1, 2), StepKey.decode(4, 0), StepKey.decode(4, 2)]
    replayed: list[StepKey] = []
    emptied: list[tuple[StepKey, list[int]]] = []

    def program(is_cuda: bool) -> Any:
        buffers = {"batch.state_indices": SimpleNamespace(is_cuda=is_cuda)}
        steps = {
            key: SimpleNamespace(buffers=buffers, replay=partial(replayed.append, key))
            for key in keys
        }
        return SimpleNamespace(steps=steps, set_batch=lambda *args: emptied.append(args))

    def kernels_of(run: Callable[[], None]) -> Counter[str]:
        run()
        return Counter(a=3, b=1)

    monkeypatch.setattr("mtpc.backends.graphs.kernels_of", kernels_of)
    assert bench.count_kernels(SimpleNamespace(program=program(False))) is None  # type: ignore[arg-type]
    assert bench.count_kernels(SimpleNamespace(program=program(True))) == 4  # type: ignore[arg-type]
    assert replayed == [keys[2]]
    assert emptied == [(keys[2], [])]


def test_a_picture_that_cannot_be_drawn(
    word_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is measured."""
    command = ["bench", str(word_model), *SMALL_MODEL, "-p", "w5", "--plot"]
    assert main([*command, "bench.pdf"]) == 2
    assert "expected a file that ends in .png or .svg" in capsys.readouterr().err
    monkeypatch.setattr("mtpc.cli.plot.find_spec", lambda name: None)
    assert main([*command, "bench.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
