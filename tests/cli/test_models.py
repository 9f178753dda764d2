"""`mtpc models`: what it lists is in the tables, and what it says of a class is true."""

from __future__ import annotations

import pytest

from mtpc.cli.main import main
from mtpc.models import FAMILIES
from mtpc.weights.gguf.families import FAMILIES as FILES


def test_it_lists_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for family in FAMILIES for name in family.architectures)
    assert all(f" {name}" in out for name in FILES)


def test_it_asks_classes(capsys: pytest.CaptureFixture[str]) -> None:
    """One that runs, one that keeps a state, one that is unknown."""
    names = ["Gemma2ForCausalLM", "MambaForCausalLM", "BertLMHeadModel", "NoSuchForCausalLM"]
    assert main(["models", *names]) == 1
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["Gemma2ForCausalLM"] == "runs"
    assert "asks its cache for 'get_conv_state'" in found["MambaForCausalLM"]
    assert "has an encoder's layers" in found["BertLMHeadModel"]
    assert found["NoSuchForCausalLM"] == "refused: transformers has no such causal LM"
    assert main(["models", "Gemma2ForCausalLM"]) == 0
