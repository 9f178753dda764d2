"""`mtpc models`: what it lists is in the tables, and what it says of a class is true."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest

from mtpc.cli.main import main
from mtpc.models import FAMILIES, ModelFamily, families
from mtpc.models.families import MODULES, serving
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


def test_an_architecture_opens_the_module_of_its_family() -> None:
    """The table has every module, every family in it, and the architectures of each."""
    modules = {name: import_module(f"mtpc.models.families.{name}") for name in MODULES}
    assert {module.name for module in iter_modules(families.__path__)} == {*modules}
    defined = (each for module in modules.values() for each in vars(module).values())
    assert all(each in FAMILIES for each in defined if isinstance(each, ModelFamily))
    listed = [name for names in MODULES.values() for name in names]
    assert [name for family in FAMILIES for name in family.architectures] == listed
    for name in listed:
        family = serving([name])
        assert family is not None
        assert name in family.architectures
