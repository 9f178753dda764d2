"""`mtpc check`: what each wiring accepts, and what is advised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpc.cli.main import main

PROMPTS = ["--ids", "3 4 5 6", "--ids", "40 41 42"]
SMALL = ["--spec-tokens", "2", "--max-len", "64", "--dtype", "float64", "-n", "20"]


@pytest.mark.slow
def test_the_wiring_of_training_is_found(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Given wrong wiring, the right one is advised; the text is the same by all.

    How much a model of seconds of training accepts depends on the processor, so the floor is low.
    """
    wrong = ["--wiring", "hidden_first=false", "--floor", "0.02"]
    code = main(["check", str(checkpoint("mimo")), *PROMPTS, *SMALL, *wrong])
    out = capsys.readouterr().out
    counted = [line.split() for line in out.splitlines() if re.search(r"\d of \d", line)]
    rows = {name: cells for name, *cells in counted}
    assert code == 1
    assert "--wiring hidden_first=true accepts more than hidden_first=false" in out
    assert {row[-1] for row in rows.values()} == {"yes"}
    assert {
        "hidden_first=false",
        "hidden_first=true",
        "hidden_first=false,next_features=before",
        "first_features=after,hidden_first=false",
        "hidden_first=false,zero_first_embedding=false",
    } == set(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wiring", "head=mine"], "wiring has head='mine'; expected one of 'own', 'target'"),
        (["--spec-tokens", "0"], "expected at least one draft to check"),
    ],
)
def test_what_cannot_be_checked(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
