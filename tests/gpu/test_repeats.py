"""A step cut into segments: what repeats is one module, and the step computes what it did."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.plans import plan_of
from helpers.whole_steps import values_after
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.machine import Machine
from mtpc.backends import cuda
from mtpc.backends.cuda import cut_step
from mtpc.backends.repeats import cut_repeats
from mtpc.capture.graph import StepGraph
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

OPTIONS = plan_of(
    spec_tokens=3, batch_buckets=(2,), max_len=64, page_size=4, prefill_chunk=8, sampling=False
)
DECODE, PREFILL = StepKey.decode(2, 3), StepKey.prefill(2, 8, 3)
DEEP: dict[str, Any] = {
    "mimo": lambda layers: dict(num_hidden_layers=layers),
    "glm4_moe": lambda layers: dict(num_hidden_layers=layers, first_k_dense_replace=1),
    "deepseek_v3": lambda layers: dict(num_hidden_layers=layers, first_k_dense_replace=1),
    "qwen3_next": lambda layers: dict(
        num_hidden_layers=layers, layer_types=["linear_attention", "full_attention"] * (layers // 2)
    ),
}


@torch.no_grad()
def deep_step(
    family: str, layers: int, directory: Path, key: StepKey = DECODE, dtype: str = "bfloat16"
) -> StepGraph:
    """A step for GPUs of a tiny model of many layers, on the reference operators."""
    tiny.make_checkpoint(family, directory, **DEEP[family](layers))
    loaded = load(directory, dtype, True)
    return StepCompiler(loaded, OPTIONS, Machine().backend()).rewritten(key)


def same_after(graph: StepGraph, run: Any, within: float = 0) -> None:
    """The run leaves in every buffer what the graph does."""
    expected, found = values_after(graph), values_after(graph, run)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=within, atol=within, equal_nan=True,
            msg=partial("{}: {}".format, name),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("mimo", DECODE),
        *(
            pytest.param(family, key, marks=pytest.mark.slow)
            for family in DEEP
            for key in (DECODE, PREFILL)
            if (family, key) != ("mimo", DECODE)
        ),
    ],
)
def test_layers_share_a_module(family: str, key: StepKey, tmp_path: Path) -> None:
    """However many there are: a deeper model has as many modules, and of one more segments."""
    few, many = (deep_step(family, n, tmp_path / str(n), key) for n in (6, 10))
    cut, deeper = cut_step(few), cut_step(many)
    assert len(deeper.modules()) == len(cut.modules())
    period = 2 if family == "qwen3_next" else 1
    assert max(deeper.counts().values()) == max(cut.counts().values()) + 4 // period
    whole = cut.segments[0].calls[0].graph.nodes
    assert {call for segment in cut.segments for call in segment.calls} == {
        node for node in whole if node.op == "call_function"
    }
    same_after(few, cut.run_of([module for module, _ in cut.modules()]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
def test_inductor_compiles_a_layer_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, compiled = deep_step(family, 6, tmp_path, dtype="float64"), []

    def compile_flat(module: fx.GraphModule, examples: Any, options: Any) -> Any:
        compiled.append(module)
        return original(module, examples, options)

    original = cuda.compile_flat
    monkeypatch.setattr(cuda, "compile_flat", compile_flat)
    run = cuda.lower_by_inductor(graph)
    cut = cut_step(graph)
    assert len(compiled) == len(cut.modules()) < len(cut.segments) - 2
    same_after(graph, run, within=1e-6)


def test_a_layer_with_another_number_is_no_copy(tmp_path: Path) -> None:
    graph = deep_step("mimo", 6, tmp_path)
    before = max(cut_step(graph).counts().values())
    attentions = [n for n in graph.graph.nodes if "paged_attention" in str(n.target)]
    schema = torch.ops.mtpc.paged_attention.default._schema
    attentions[2].update_arg([a.name for a in schema.arguments].index("scale"), 0.5)
    graph.module.recompile()
    cut = cut_step(graph)
    assert 1 < max(cut.counts().values()) < before - 1
    same_after(graph, cut.run_of([module for module, _ in cut.modules()]))


def _flat(function: Any, *shapes: tuple[int, ...]) -> tuple[fx.Graph, list[torch.Tensor]]:
    """A flat graph of a function that returns nothing."""
    graph, mode = fx.Graph(), FakeTensorMode()
    given = [graph.placeholder(f"given_{i}") for i in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        with mode:
            node.meta = {"val": torch.empty(shape)}

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta = {"val": target(*fx.node.map_arg(args, lambda n: n.meta["val"]))}
        return node

    function(call, *given)
    graph.output(())
    return graph, [torch.rand(shape) for shape in shapes]


def _runs_alike(function: Any, *shapes: tuple[int, ...]) -> int:
    """The number of modules, once the segments have done what the graph does."""
    graph, tensors = _flat(function, *shapes)
    expected = [tensor.clone() for tensor in tensors]
    fx.GraphModule(nn.Module(), graph)(*expected)
    cut = cut_repeats(graph, tensors)
    cut.run_of([module for module, _ in cut.modules()])()
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, other)
    return len(cut.modules())


aten = torch.ops.aten


def test_values_of_earlier_layers_are_taken_along() -> None:
    """Each layer takes the one before, one value for all, and a weight of its own."""

    def layers(call: Any, out: fx.Node, *weights: fx.Node) -> None:
        shared = call(aten.exp.default, out)
        x = call(aten.neg.default, shared)
        for weight in weights:
            x = call(aten.mul.Tensor, call(aten.add.Tensor, x, weight), shared)
            call(aten.copy_.default, weight, x)
        call(aten.copy_.default, out, call(aten.sigmoid.default, x))

    assert 1 < _runs_alike(layers, *[(2, 3)] * 9) <= 3


def test_layers_that_are_wired_in_another_way_are_no_copies() -> None:
    """The same calls on values of the same form, but not on the same ones."""

    def layers(call: Any, out: fx.Node, *weights: fx.Node) -> None:
        x = call(aten.neg.default, out)
        for index, weight in enumerate(weights):
            last = weight if index % 4 else x
            x = call(aten.neg.default, call(aten.addcmul.default, x, weight, last))
            x = call(aten.sin.default, x)
        call(aten.copy_.default, out, x)

    assert _runs_alike(layers, *[(2, 3)] * 9) == 1


def test_what_is_written_is_not_parted_from_its_writers() -> None:
    """A value that every layer writes: it is no tensor of the step, so nothing is cut."""

    def layers(call: Any, out: fx.Node, *weights: fx.Node) -> None:
        total = call(aten.clone.default, out)
        for weight in weights:
            call(aten.add_.Tensor, total, call(aten.exp.default, weight))
        call(aten.copy_.default, out, total)

    assert _runs_alike(layers, *[(2, 3)] * 9) == 1


def test_layers_make_views_of_what_they_write_anew() -> None:
    """Of a view from before, a module could not know whose memory it is."""

    def layers(call: Any, pool: fx.Node, *weights: fx.Node) -> None:
        view = call(aten.view.default, pool, [6])
        for weight in weights:
            call(aten.copy_.default, pool, call(aten.add.Tensor, weight, pool))
            call(aten.mul_.Tensor, view, 0.5)

    assert _runs_alike(layers, *[(2, 3)] * 9) == 2


def test_memory_is_given_back_after_its_last_use() -> None:
    """As a graph's pool reuses it: at most one layer's value is alive beside the next one's."""

    def layers(call: Any, out: fx.Node, *weights: fx.Node) -> None:
        x = call(aten.neg.default, out)
        for weight in weights:
            x = call(aten.exp.default, call(aten.add.Tensor, x, weight))
        call(aten.copy_.default, out, x)

    graph, tensors = _flat(layers, *[(2, 3)] * 12)
    cut = cut_repeats(graph, tensors)
    alive: list[Any] = []

    def watched(module: fx.GraphModule) -> Any:
        def run(*args: torch.Tensor) -> Any:
            assert sum(ref() is not None for ref in alive) <= 1
            results = module(*args)
            alive.extend(map(weakref.ref, results))
            return results

        return run

    cut.run_of([watched(module) for module, _ in cut.modules()])()
    assert len(alive) > 3
    assert not any(ref() is not None for ref in alive)
