"""`mtpc bench`: rows, order, honesty about texts. Never a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_cli import SMALL_MODEL, word_model  # noqa: F401  (a fixture)

from mtpc.cli.main import main


def table(out: str) -> list[list[str]]:
    """The body's cells."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    return [cells for cells in lines if cells[0].isdigit()]


def test_every_variant_has_a_row(word_model: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """In the order asked for; a pass to compare has its own, beside each K that drafts."""
    arguments = ["--spec-tokens", "0,2", "--compare", "quantise-draft", "--repeats", "1"]
    prompts = ["-p", "w5 w6 w7", "--ids", "8 9", "-n", "6", "--dtype", "float32"]
    assert main(["bench", str(word_model), *SMALL_MODEL, *arguments, *prompts]) == 0
    rows = table(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["0", "-"], ["2", "-"], ["2", "quantise-draft"]]
    assert rows[0][4:] == ["1.00", "-", "1.00x", "yes"]
    for row in rows[1:]:
        assert row[5].endswith("%")
        assert row[7] == "yes"  # float32: drafts decide nothing.
        assert 1 <= float(row[4]) <= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give prompts"),
        (["-p", "w5", "--compare", "quantize-draft"], "unknown pass 'quantize-draft'"),
        (["-p", "w5", "--spec-tokens", "-1"], "spec_tokens"),
        (["-p", "w5", "--spec-tokens", ""], "--spec-tokens is empty"),
        (["-p", "w5", "-n", "1"], "expected 2 or more"),
    ],
)
def test_what_it_refuses(
    word_model: Path,  # noqa: F811
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", str(word_model), *SMALL_MODEL, "-n", "6", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
