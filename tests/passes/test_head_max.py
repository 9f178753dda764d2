"""fuse-head-max: its kernels, their references, and what it does to whole steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.compiled import run_on
from helpers.families import EACH_FAMILY_OF_FEW
from helpers.grouped import random_weight
from helpers.small_graphs import run, small_graph
from helpers.whole_steps import check_no_token_changes, on_references
from torch import Tensor, fx

from mtpc.backends.cpu.passes.fuse_head_max import FuseHeadMax
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.capture.graph import StepGraph
from mtpc.weights.packing import pack

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
aten = torch.ops.aten


def packed(features: int, inputs: int, bias: Tensor | None = None) -> tuple[str, Sequence[Any]]:
    return "packed_linear", (pack(bf16(features, inputs)), features, bias)


def by_row(features: int, inputs: int, bias: Tensor | None = None) -> tuple[str, Sequence[Any]]:
    return "grouped_linear", (*random_weight("int8", (features, inputs), inputs).operands, bias)


def grouped(features: int, inputs: int, bias: Tensor | None = None) -> tuple[str, Sequence[Any]]:
    made = random_weight("int4", (features, inputs), 32, zeros="zeros")
    return "grouped_linear", (*made.operands, bias)


SIZES = [(1, 32), (31, 64), (64, 64), (97, 96), (4000, 128)]


@pytest.mark.parametrize("form", [packed, by_row, grouped])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("features", "inputs"), [(1, 32), (31, 64), (64, 64), (97, 96), (4000, 128)]
)
@pytest.mark.parametrize("rows", [1, 3, 17, 40, 200])
def test_is_the_maximum_of_the_layer(
    form: Callable[..., Any], with_bias: bool, features: int, inputs: int, rows: int
) -> None:
    """Bit for bit what torch finds in the logits that the same kernels give without it."""
    name, operands = form(features, inputs, bf16(features, seed=2) if with_bias else None)
    x = bf16(rows, inputs, seed=1)
    for namespace in (OURS, REFERENCE):
        values, indices = getattr(namespace, f"{name}_max")(x, *operands)
        expected = getattr(namespace, name)(x, *operands).max(-1)
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)
        assert indices.dtype == torch.int64


def diagonal(size: int) -> Tensor:
    """A layer that gives back its inputs."""
    return pack(torch.eye(size, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "numbers",
    [
        [0.5, 2.0, 1.0, 2.0],
        [-3.0, -1.0, -2.0, -1.0],
        [-0.0, 0.0, -1.0, 0.0],
        [-float("inf")] * 4,
        [1.0, float("inf"), 2.0, float("inf")],
    ],
)
@pytest.mark.parametrize("tiles", [(0,), (2,), (0, 2)])
def test_the_first_of_equals_wins(numbers: list[float], tiles: tuple[int, ...]) -> None:
    """In a tile, and of the first of tiles that have them; all others have less."""
    bias = torch.full((96,), -float("inf"), dtype=torch.bfloat16)
    for tile in tiles:
        bias[32 * tile : 32 * tile + 4] = torch.tensor(numbers)
    x = torch.zeros(1, 96, dtype=torch.bfloat16)
    value, index = OURS.packed_linear_max(x, diagonal(96), 96, bias)
    assert index.item() == bias.tolist().index(max(numbers))
    assert value.item() == max(numbers)


def test_not_a_number_is_the_largest_and_the_first_of_them() -> None:
    bias = torch.zeros(96, dtype=torch.bfloat16)
    bias[40] = float("inf")
    bias[70], bias[90] = float("nan"), -float("nan")
    x = torch.zeros(2, 96, dtype=torch.bfloat16)
    values, indices = OURS.packed_linear_max(x, diagonal(96), 96, bias)
    assert indices.tolist() == [70, 70]
    assert bool(values.isnan().all())


def test_leading_dimensions_and_rows_that_are_not_used() -> None:
    x = bf16(2, 5, 64)
    name, operands = packed(70, 64)
    whole = OURS.packed_linear_max(x, *operands)
    assert whole[0].shape == whole[1].shape == (2, 5)
    dirty = x.clone().view(10, 64)
    dirty[7:] = float("nan")
    for namespace in (OURS, REFERENCE):
        found = getattr(namespace, f"{name}_max")(
            dirty.view(2, 5, 64), *operands, torch.tensor([7])
        )
        for part, expected in zip(found, whole, strict=True):
            assert torch.equal(part.view(-1)[:7], expected.view(-1)[:7])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    _, operands = packed(4000, 256)
    x = bf16(8, 256, seed=1)
    with run_on(threads):
        found = OURS.packed_linear_max(x, *operands)
    expected = OURS.packed_linear(x, *operands).max(-1)
    assert torch.equal(found[0], expected.values)
    assert torch.equal(found[1], expected.indices)


@pytest.mark.parametrize("form", [packed, grouped])
def test_schemas_and_fakes(form: Callable[..., Any]) -> None:
    name, operands = form(70, 64)
    for namespace in (OURS, REFERENCE):
        torch.library.opcheck(
            getattr(namespace, f"{name}_max").default, (bf16(3, 64), *operands),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected bfloat16 x"):
        OURS.grouped_linear_max(torch.ones(1, 64), *by_row(70, 64)[1])
    with pytest.raises(RuntimeError, match="expected x \\[\\.\\.\\., K\\]"):
        OURS.packed_linear_max(bf16(1, 66), pack(bf16(70, 64)), 70)


# ---- The pass --------------------------------------------------------------------------------


def graph_of(directory: Path, *passes: str) -> StepGraph:
    """What the pass is given, on the reference operators."""
    return on_references(directory, "pack-weights", "fuse-elementwise", *passes)


def targets(graph: StepGraph) -> list[Any]:
    return [node.target for node in graph.graph.nodes]


@pytest.mark.parametrize("passes", [(), ("quantise-draft",)])
def test_the_targets_head_and_the_drafts(
    passes: tuple[str, ...], checkpoint: Callable[..., Path]
) -> None:
    graph = graph_of(checkpoint("mimo", "random"), *passes)
    assert FuseHeadMax().apply(graph) == 2
    found = targets(graph)
    in_int8 = len(passes)
    assert found.count(REFERENCE.packed_linear_max.default) == 2 - in_int8
    assert found.count(REFERENCE.grouped_linear_max.default) == in_int8
    assert aten.argmax.default not in found
    assert aten.max.dim not in found
    graph.graph.lint()
    assert FuseHeadMax().apply(graph) == 0


def test_a_grouped_head() -> None:
    codes, scales, zeros, features = random_weight("int4", (70, 64), 32, zeros="zeros").operands

    def head(out: Tensor, x: Tensor, *parts: Tensor) -> None:
        out.copy_(REFERENCE.grouped_linear(x, *parts, features).argmax(-1))

    tensors = dict(x=bf16(3, 64), codes=codes, scales=scales, zeros=zeros)
    graph = small_graph(head, batch_out=torch.zeros(3, dtype=torch.int64), **tensors)
    before = run(graph)
    assert FuseHeadMax().apply(graph) == 1
    assert REFERENCE.grouped_linear_max.default in targets(graph)
    assert torch.equal(run(graph), before)


def largest(graph: StepGraph, target: Any) -> fx.Node:
    (node,) = [node for node in graph.graph.nodes if node.target is target]
    return node


def test_logits_that_somebody_reads_stay(checkpoint: Callable[..., Path]) -> None:
    graph = graph_of(checkpoint("mimo", "random"))
    node = largest(graph, aten.argmax.default)
    with graph.graph.inserting_after(node):
        graph.graph.call_function(aten.amax.default, (node.args[0], [-1]))
    assert FuseHeadMax().apply(graph) == 1
    assert aten.argmax.default in targets(graph)


@pytest.mark.parametrize("dims", [(), (0,), (-1, True)])
def test_maxima_over_something_else_stay(
    dims: tuple[Any, ...], checkpoint: Callable[..., Path]
) -> None:
    graph = graph_of(checkpoint("mimo", "random"))
    node = largest(graph, aten.argmax.default)
    node.args = (node.args[0], *dims)
    assert FuseHeadMax().apply(graph) == 1
    assert aten.argmax.default in targets(graph)


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_no_token_changes(family: str, checkpoint: Callable[..., Path]) -> None:
    before = ("pack-weights", "fuse-elementwise", "skip-idle-rows")
    check_no_token_changes(checkpoint(family), before, (*before, "fuse-head-max"))
