"""Layers that repeat are traced once: the tape is that of the model traced whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.plans import changed, plan_of
from torch import fx

from mtpc.api import SpecModel
from mtpc.backends.base import Backend
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.null import NullGraphs
from mtpc.backends.tape import write_tape
from mtpc.capture.fake_calls import form_of
from mtpc.layout import Layout, StepKey
from mtpc.models.layer_pattern import find_pattern
from mtpc.models.load import LoadedModel, load
from mtpc.passes.copy_layers import CopyLayers
from mtpc.program.compiler import StepCompiler
from mtpc.weights.write_quantised import quantise_checkpoint

GATED = {"layer_types": ["linear_attention", "full_attention"] * 5}
DEEP: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "mimo": ({"num_hidden_layers": 6}, (0, 1, 4)),
    "deepseek_v3": ({"num_hidden_layers": 7, "first_k_dense_replace": 2}, (2, 1, 6)),
    "qwen3_next": ({"num_hidden_layers": 10, **GATED}, (0, 2, 8)),
    "longcat_flash": ({"num_layers": 6}, (0, 1, 4)),
}
"""Family -> its changes, and first layer, period and number of layers that are traced."""

OPTIONS = plan_of(
    spec_tokens=1, batch_buckets=(2,), max_len=64, page_size=4, prefill_chunk=8, sampling=False
)


def cuda() -> CudaBackend:
    """The cuda backend on recorded graphs, with the references of all operators."""
    return CudaBackend(NullGraphs(), EagerBackend().lower, (), device="cpu")


@pytest.fixture
def deep(tmp_path: Path) -> Callable[[str], LoadedModel]:
    """deep(family): a model of many layers, by its headers."""

    def get(family: str) -> LoadedModel:
        tiny.make_checkpoint(family, tmp_path, **DEEP[family][0])
        return load(tmp_path, "bfloat16", True, headers_only=True)

    return get


def plain(name: str) -> None:
    """No weight is stored in groups."""


DECODE, PREFILL = StepKey.decode(2, 1), StepKey.prefill(2, 4, 1)
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
    compiler = StepCompiler(loaded, OPTIONS, CpuBackend(), new_buffer=Layout.reserve)
    compiler.weights.defers = True
    if not copies:
        compiler.pattern = None
    whole = compiler.rewrite(compiler.trace(key))
    added = [e.nodes_after > e.nodes_before for e in whole.history if e.name == CopyLayers.name]
    assert added == [True] * copies
    return write_tape(*lower_to_tape(whole)), compiler.weights


@pytest.mark.slow
@pytest.mark.parametrize(("family", "key"), CASES)
def test_copies_are_the_layers_of_a_gpus_step(
    family: str, key: StepKey, deep: Callable[[str], LoadedModel]
) -> None:
    """Call by call, after the passes of that backend."""
    loaded = deep(family)
    copied, whole = (_calls(loaded, key, copies) for copies in (True, False))
    assert copied == whole


@torch.no_grad()
def _calls(loaded: LoadedModel, key: StepKey, copies: bool) -> list[str]:
    """Each call with the names of what it takes, and the form of what it gives."""
    compiler = StepCompiler(loaded, OPTIONS, cuda(), new_buffer=Layout.reserve)
    compiler.weights.defers = True
    assert compiler.pattern is not None
    if not copies:
        compiler.pattern = None
    names, calls = dict[fx.Node, str](), list[str]()
    for node in compiler.rewritten(key).graph.nodes:
        if node.op == "get_attr":
            names[node] = str(node.target)
        elif node.op == "call_function":
            names[node] = f"value {len(calls)}"
            given = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            calls.append(f"{node.target} {given} {form_of(node.meta.get('val'))}")
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("backend", [EagerBackend, cuda])
def test_a_model_with_copied_layers_runs(backend: Callable[[], Backend], tmp_path: Path) -> None:
    """The text of the model traced whole, with weights that passes join."""
    texts, options = [], changed(OPTIONS, spec_tokens=0)
    for copies in (True, False):
        tiny.make_checkpoint("mimo", tmp_path / str(copies), **DEEP["mimo"][0])
        loaded = load(tmp_path / str(copies), "float32", False)
        compiler = StepCompiler(loaded, options, backend())
        if not copies:
            compiler.pattern = None
        program = compiler.compile()
        model = SpecModel(loaded.served(), compiler.plan, program, loaded)
        history = [record.name for record in next(iter(program.steps.values())).graph.history]
        assert (CopyLayers.name in history) == copies
        texts.append([each.token_ids for each in model.generate([[1, 2, 3], [4] * 9], 12)])
    assert texts[0] == texts[1]


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


def test_layers_that_differ_in_how_they_are_stored(
    deep: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    """One projection of one layer has no codes, as exporters leave out layers by name: layers are
    copied before weights are packed."""
    quantise_checkpoint(
        deep("mimo").served().directory,
        tmp_path / "codes",
        "int8",
        keep=("model.layers.4.mlp.up_proj",),
    )
    loaded = load(tmp_path / "codes", "bfloat16", True, headers_only=True)
    pattern = StepCompiler(loaded, OPTIONS, CpuBackend(), new_buffer=Layout.reserve).pattern
    assert pattern is not None
    assert (pattern.traced, pattern.stored_alike) == (4, False)
    (copied, copies), (whole, weights) = (_tape(loaded, DECODE, each) for each in (True, False))
    assert copied == whole
    assert copies.recipes == weights.recipes
