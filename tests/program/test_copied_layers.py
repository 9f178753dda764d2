"""Layers that repeat are traced once: the tape is that of the model traced whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny

from mtpc.backends.cpu import CpuBackend
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.tape import write_tape
from mtpc.config import CompileOptions
from mtpc.layout import Layout, StepKey
from mtpc.models.layer_pattern import find_pattern
from mtpc.models.load import LoadedModel, load
from mtpc.program.compiler import StepCompiler
from mtpc.weights.grouped import GroupForm
from mtpc.weights.grouped_recipes import GroupSpec

GATED = {"layer_types": ["linear_attention", "full_attention"] * 5}
DEEP: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "mimo": ({"num_hidden_layers": 6}, (0, 1, 4)),
    "deepseek_v3": ({"num_hidden_layers": 7, "first_k_dense_replace": 2}, (2, 1, 6)),
    "qwen3_next": ({"num_hidden_layers": 10, **GATED}, (0, 2, 8)),
    "longcat_flash": ({"num_layers": 6}, (0, 1, 4)),
}
"""Family -> its changes, and first layer, period and number of layers that are traced."""


@pytest.fixture
def deep(tmp_path: Path) -> Callable[[str], LoadedModel]:
    """deep(family): a model of many layers, by its headers."""

    def get(family: str) -> LoadedModel:
        tiny.make_checkpoint(family, tmp_path, **DEEP[family][0])
        return load(tmp_path, "bfloat16", True, headers_only=True)

    return get


def plain(name: str) -> None:
    """No weight is stored in groups."""


DECODE, PREFILL = StepKey.decode(2, 2), StepKey.prefill(2, 4, 2)
CASES = [
    pytest.param(family, key, marks=() if (family, key) == ("mimo", DECODE) else pytest.mark.slow)
    for family in DEEP
    for key in (DECODE, PREFILL)
]


@pytest.mark.parametrize(("family", "key"), CASES)
def test_copies_are_the_layers(
    family: str, key: StepKey, deep: Callable[[str], LoadedModel]
) -> None:
    """Byte by byte; and weights by the same names and recipes."""
    loaded, (first, period, traced) = deep(family), DEEP[family][1]
    pattern = find_pattern(loaded, plain)
    assert pattern is not None
    assert (pattern.first, pattern.period, pattern.traced) == (first, period, traced)
    (copied, copies), (whole, weights) = _tape(loaded, key, True), _tape(loaded, key, False)
    assert copied == whole
    assert copies.recipes == weights.recipes


@torch.no_grad()
def _tape(loaded: LoadedModel, key: StepKey, copies: bool) -> tuple[str, Any]:
    options = CompileOptions(
        spec_tokens=2, batch_buckets=(2,), max_len=64, page_size=4, prefill_chunk=8, backend="cpu"
    )
    compiler = StepCompiler(loaded, options, CpuBackend(), new_buffer=Layout.reserve)
    compiler.weights.defers = True
    if copies:
        compiler.copy_layers()
    graph = compiler.rewrite(compiler.trace(key))
    nodes = graph.num_nodes
    whole = compiler.all_layers(graph)
    assert whole is not None
    assert (whole.num_nodes > nodes) == copies
    return write_tape(*lower_to_tape(whole)), compiler.weights


def test_layers_that_differ_in_a_number_are_no_copies(deep: Callable[[str], LoadedModel]) -> None:
    """A model whose layers look alike, but for one value that tracing reads."""
    loaded = deep("mimo")
    loaded.target.get_decoder().layers[4].self_attn.scaling = 0.5
    assert find_pattern(loaded, plain) is None
    loaded.target.get_decoder().layers[4].self_attn.scaling = 0.25
    loaded.target.get_decoder().layers[0].self_attn.scaling = 0.5
    pattern = find_pattern(loaded, plain)
    assert pattern is not None
    assert pattern.first == 1


def test_layers_that_differ_in_how_they_are_stored_are_no_copies(
    deep: Callable[[str], LoadedModel],
) -> None:
    """One projection of one layer has codes, as exporters leave out layers by name."""
    spec = GroupSpec(GroupForm("int4", 32), "bfloat16")
    stored = {"model.layers.4.mlp.up_proj.weight": spec}
    assert find_pattern(deep("mimo"), stored.get) is None
