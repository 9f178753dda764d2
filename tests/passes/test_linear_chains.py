"""fuse-linear-chains: its kernel, its reference, and what it does to whole steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.compiled import run_on
from helpers.families import EACH_FAMILY_OF_FEW
from helpers.grouped import Zeros, random_weight
from helpers.small_graphs import run, small_graph
from helpers.whole_steps import by_cpu_passes, check_no_token_changes, on_references
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.nn import functional as F

from mtpc.backends.cpu.passes.fuse_linear_chains import FuseLinearChains
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.capture.graph import StepGraph
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.weights.grouped import Kind
from mtpc.weights.packing import TILE, pack

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
EPSILON = 1e-6
HIDDEN, FEATURES, MIDDLE = 64, 96, 160
CHAINS = ["LN", "NL", "LNGLNB", "LPGL", "NGL", "LNBN", "GLNL"]
"""A linear layer behind a norm takes HIDDEN rows, one before it gives them."""
GROUPED = ["lNglNb", "lzN", "gzlNL", "LPglzNbz"]
"""The same with int4, int8 and float8 weights in turns, where their inputs are groups of 32."""


def stages_of(kinds: str) -> list[str]:
    return re.findall("[A-Z]|[lbg]z?", kinds)


def operands_of(kinds: str, width: int) -> list[Tensor]:
    """Weights for a chain that begins with rows of `width`."""
    operands = []
    stages = stages_of(kinds)
    for at, kind in enumerate(stages):
        feeds_norm = stages[at + 1 : at + 2] in (["N"], ["P"])
        if kind in "NP":
            operands.append(bf16(width, seed=at) + 1)
            continue
        is_gated = kind[0] in "Gg"
        width, inputs = HIDDEN if feeds_norm else MIDDLE if is_gated else FEATURES, width
        features = 2 * width if is_gated else width
        if kind.isupper():
            operands.append(pack(bf16(features, inputs, seed=at) / 8))
        else:
            code: Kind = "int4" if "z" in kind else ("int4", "int8", "float8")[at % 3]
            zeros: Zeros = "" if "z" not in kind else "mins" if at % 2 else "zeros"
            made = random_weight(code, (features, inputs), 32, zeros=zeros, seed=at)
            operands += [part for part in made.parts if part is not None]
        if kind[0] in "Bb":
            operands.append(bf16(features, seed=at + 10))
    return operands


def one_by_one(
    x: Tensor, total: Tensor, kinds: str, operands: list[Tensor], rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same by the kernels of each stage."""
    following = iter(operands)
    for kind in stages_of(kinds):
        weight = next(following)
        if kind in "NP":
            total, x = OURS.add_rms_norm(total, x, weight, EPSILON, kind == "P", rows)
            continue
        form, of = "packed", [weight]
        if kind.islower():
            form, of = "grouped", [weight, next(following)]
            of.append(next(following) if "z" in kind else None)
        bias = [next(following)] if kind[0] in "Bb" else [] if kind[0] in "Gg" else [None]
        gated = "_gated" if kind[0] in "Gg" else ""
        stage = getattr(OURS, f"{form}{gated}_linear")
        x = stage(x, *of, weight.shape[0] * TILE, *bias, rows)
    return total, x


def check_stages(rows: int, kinds: str, used: int | None, width: int = 128) -> None:
    """A chain gives the bits of its stages; idle rows, which are NaN, stay away from others."""
    width = HIDDEN if kinds[0] == "N" else width
    x, residual = bf16(rows, width, seed=1), bf16(rows, HIDDEN, seed=2)
    count = None if used is None else torch.tensor([used], dtype=torch.int32)
    if used is not None:
        x[used:], residual[used:] = torch.nan, torch.nan
    operands = operands_of(kinds, width)
    found = OURS.linear_chain(x, residual, kinds, operands, EPSILON, count)
    expected = one_by_one(x, residual, kinds, operands, count)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one[:used], other[:used])
        assert bool(one[:used].isfinite().all())


@pytest.mark.parametrize("kinds", [*CHAINS, *GROUPED])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 32, 33, 63, 64, 65, 130])
def test_a_chain_is_its_stages(rows: int, kinds: str) -> None:
    """Bit for bit, on both sides of the number of rows from which stages are run one by one."""
    check_stages(rows, kinds, None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kinds=st.sampled_from([*CHAINS, *GROUPED]),
    rows=st.integers(1, 80),
    idle=st.integers(0, 80),
    width=st.sampled_from([32, 70, 128, 1024]),
    threads=st.integers(1, 5),
)
def test_whatever_threads_and_idle_rows(
    kinds: str, rows: int, idle: int, width: int, threads: int
) -> None:
    """More threads than processors, too: whoever comes late finds the work done."""
    width = 64 if kinds in GROUPED and width % 32 else width
    with run_on(threads):
        check_stages(rows, kinds, rows - min(idle, rows), width)


def test_inputs_that_do_not_go_by_tiles() -> None:
    """64 rows of 32 KB are gone through in parts of all tiles: that is not a chain's way."""
    check_stages(64, "LN", None, width=16384)


@pytest.mark.parametrize("kinds", [*CHAINS, *GROUPED])
def test_the_reference_means_the_same(kinds: str) -> None:
    width = HIDDEN if kinds[0] == "N" else 128
    x, residual = bf16(7, width, seed=1), bf16(7, HIDDEN, seed=2)
    arguments = (x, residual, kinds, operands_of(kinds, width), EPSILON)
    for found, expected in zip(
        OURS.linear_chain(*arguments), REFERENCE.linear_chain(*arguments), strict=True
    ):
        assert found.shape == expected.shape
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error < 2**-7


def test_strides_and_leading_dimensions() -> None:
    x, residual = bf16(128, 6, seed=1).t(), bf16(6, 2 * HIDDEN, seed=2)[:, :HIDDEN]
    operands = operands_of("LNG", 128)
    plain = OURS.linear_chain(x.contiguous(), residual.contiguous(), "LNG", operands, EPSILON)
    for shape in ((6,), (1, 6), (2, 3)):
        lead = x.unflatten(0, shape), residual.unflatten(0, shape)
        found = OURS.linear_chain(*lead, "LNG", operands, EPSILON)
        for one, other in zip(found, plain, strict=True):
            assert one.shape[:-1] == shape
            assert torch.equal(one.flatten(0, -2), other)


def test_schemas_and_fakes() -> None:
    for kinds in ("LNGLNB", "lPgzNbz"):
        operands = operands_of(kinds, 128)
        arguments = (bf16(3, 128), bf16(3, HIDDEN), kinds, operands, EPSILON, torch.tensor([2]))
        for namespace in (OURS, REFERENCE):
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(namespace.linear_chain.default, arguments, test_utils=tests)


def test_misfits_are_refused() -> None:
    x, residual, operands = bf16(3, 128), bf16(3, HIDDEN), operands_of("LN", 128)
    for arguments, message in (
        ((x.float(), residual, "LN", operands), "in bfloat16, of the same leading sizes"),
        ((x, residual[:2], "LN", operands), "the same leading sizes"),
        ((x, residual[None], "LN", operands), "the same leading sizes"),
        ((x[:, :0], residual, "LN", operands), "expected x"),
        ((x, residual, "LN", operands[:1]), "operand for each stage of LN, two for B; found 1"),
        ((x, residual, "L", operands), "L has 1 operands, found 2"),
        ((x, residual, "", []), "expected a norm among the stages"),
        ((x, residual, "L", operands[:1]), "expected a norm among the stages, found L"),
        ((x, residual, "BN", [operands[0], bf16(1, 32).expand(2, 32), operands[1]]), "stage B"),
        ((x, residual, "LX", operands), "does not fit stage X"),
        ((x[:, :64], residual, "LN", operands), "operand 0 does not fit stage L of LN"),
        ((x, residual, "LN", [operands[0], bf16(63)]), "operand 1 does not fit stage N of LN"),
        ((x, residual, "LN", [operands[0].float(), operands[1]]), "expected a bfloat16 operand"),
        ((x, bf16(3, 32), "LN", operands), "operand 1 does not fit stage N"),
        ((x, residual, "lN", operands), "codes and scales of .* do not fit 128 inputs"),
        ((x, residual, "LzN", operands), "unknown|does not fit stage z"),
        ((x, residual, "lzN", operands), "operand for each stage of lzN"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OURS.linear_chain(*arguments, EPSILON)
    for kinds, some in (
        ("LX", operands),
        ("L", operands[:1]),
        ("LN", operands[:1]),
        ("N", operands),
        ("LzN", operands),
        ("zLN", operands),
        ("lN", operands),
    ):
        with pytest.raises(ValueError, match="an N or P among them"):
            REFERENCE.linear_chain(x, residual, kinds, some, EPSILON)


@pytest.mark.parametrize("rows", [0, 3])
def test_norms_of_odd_width_and_no_rows(rows: int) -> None:
    x, residual, weight = bf16(rows, 71, seed=1), bf16(rows, 71, seed=2), bf16(71)
    found = OURS.linear_chain(x, residual, "N", [weight], EPSILON)
    for one, other in zip(found, OURS.add_rms_norm(residual, x, weight, EPSILON), strict=True):
        assert torch.equal(one, other)
    assert OURS.linear_chain(x[:0, :64], residual[:0, :64], "NL", operands_of("NL", 64), 0.0)[
        1
    ].shape == (0, FEATURES)


# ---- The pass --------------------------------------------------------------------------------

FOUND = {
    "mimo": ["LNGLNB", "LNGL", "LNGL"],
    "glm4_moe": ["LNGLNL", "LN", "LN"],
    "deepseek_v3": ["LNGLNL", "LN", "LN"],
    "qwen3_next": ["LP", "LP"],
    "mimo_v2": ["LNGLN", "LN", "LNGLN", "LNGL"],
    "step3p7": ["LPL", "LP", "LPL", "LP", "LP", "LPL"],
    "deepseek_v32": ["NGLN"],
}
"""Chains of a few layers, and of MTP layers that run for verified tokens only (K = 1). Experts end
one; so does a hidden state that an MTP layer reads."""


def graph_of(directory: Path, dtype: str = "bfloat16") -> StepGraph:
    """What the pass is given, on the reference operators."""
    return on_references(directory, "pack-weights", "fuse-elementwise", dtype=dtype)


def calls(graph: StepGraph, target: Any) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target is target.default]


def kinds_of(graph: StepGraph, namespace: Any = REFERENCE) -> list[str]:
    return [str(node.args[2]) for node in calls(graph, namespace.linear_chain)]


LATE = {"deepseek_v3", "qwen3_next", "mimo_v2", "deepseek_v32"}
"""The slow run finds the chains of these; the others have chains of every kind."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LATE else []) for name in FOUND],
)
def test_each_chain_is_found(family: str, checkpoint: Callable[..., Path]) -> None:
    graph = by_cpu_passes(checkpoint(family, "random"))
    assert kinds_of(graph, OURS) == FOUND[family]


def test_all_stages_are_taken_once(checkpoint: Callable[..., Path]) -> None:
    graph = graph_of(checkpoint("mimo", "random"))
    assert FuseLinearChains().apply(graph) == 3
    assert FuseLinearChains().apply(graph) == 0
    assert not calls(graph, REFERENCE.packed_gated_linear)
    assert not calls(graph, REFERENCE.add_rms_norm)


def test_grouped_linears_are_stages() -> None:
    """After SwiGLU was found among them. What the graph computes stays, bit for bit."""
    made = {
        "first": random_weight("int4", (64, 96), 32),
        "both": random_weight("int8", (128, 64), 64, zeros="zeros", seed=1),
        "last": random_weight("float8", (64, 64), 64, seed=2),
    }
    tensors = {"x": bf16(3, 96, seed=3), "residual": bf16(3, 64, seed=4), "weight": bf16(64) + 1}
    for name, one in made.items():
        parts = zip(("codes", "scales", "zeros"), one.parts, strict=True)
        tensors |= {f"{name}_{part}": tensor for part, tensor in parts if tensor is not None}
    names = list(tensors)

    def layer(out: Tensor, *given: Tensor) -> None:
        t = dict(zip(names, given, strict=True))

        def linear(x: Tensor, name: str) -> Tensor:
            parts = (t[f"{name}_codes"], t[f"{name}_scales"], t.get(f"{name}_zeros"))
            return REFERENCE.grouped_linear(x, *parts, made[name].features)

        first = linear(t["x"], "first")
        total, x = REFERENCE.add_rms_norm(t["residual"], first, t["weight"], EPSILON)
        both = linear(x, "both")
        gate, up = (torch.ops.aten.slice.Tensor(both, -1, at, at + 64) for at in (0, 64))
        active = F.silu(gate) * up
        out.copy_(linear(active, "last") + total)

    graph = small_graph(layer, batch_out=torch.zeros(3, 64).bfloat16(), **tensors)
    before = run(graph)
    assert FuseElementwise().apply(graph) == 1
    assert FuseLinearChains().apply(graph) == 1
    assert kinds_of(graph) == ["lNgzl"]
    assert torch.equal(run(graph), before)


def test_a_chain_has_one_epsilon(checkpoint: Callable[..., Path]) -> None:
    graph = graph_of(checkpoint("mimo", "random"))
    second = calls(graph, REFERENCE.add_rms_norm)[1]
    second.update_arg(3, 1e-3)
    FuseLinearChains().apply(graph)
    assert kinds_of(graph)[:2] == ["LNGL", "NB"]
    assert [chain.args[4] for chain in calls(graph, REFERENCE.linear_chain)[:2]] == [1e-6, 1e-3]


def test_what_is_read_on_the_way_ends_a_chain(checkpoint: Callable[..., Path]) -> None:
    """A result of the gated layer, and the first norm's residual sum."""
    for target, index, expected in (
        (REFERENCE.packed_gated_linear, None, ["LNG", "LNB"]),
        (REFERENCE.add_rms_norm, 0, ["LNGL", "NB"]),
    ):
        graph = graph_of(checkpoint("mimo", "random"))
        node = calls(graph, target)[0]
        if index is not None:
            (node,) = (user for user in node.users if user.args[1] == index)
        output = next(iter(reversed(graph.graph.nodes)))
        with graph.graph.inserting_before(output):
            read = graph.graph.call_function(torch.ops.aten.neg_.default, (node,))
            read.meta = dict(node.meta)
        FuseLinearChains().apply(graph)
        assert kinds_of(graph)[:2] == expected


def test_stages_with_other_arguments_are_left_alone(checkpoint: Callable[..., Path]) -> None:
    graph = graph_of(checkpoint("mimo", "random"))
    first, second = calls(graph, REFERENCE.add_rms_norm)[:2]
    first.kwargs = {"rows": first.args[2]}
    second.replace_input_with(second.args[0], second.args[1])  # Twice the same summand.
    FuseLinearChains().apply(graph)
    assert kinds_of(graph)[0] == "NB"


def test_a_write_on_the_way_ends_a_chain(checkpoint: Callable[..., Path]) -> None:
    graph = graph_of(checkpoint("mimo", "random"))
    gated = calls(graph, REFERENCE.packed_gated_linear)[0]
    cache = calls(graph, REFERENCE.write_cache)[0].args[0]
    with graph.graph.inserting_before(gated):
        graph.graph.call_function(torch.ops.aten.zero_.default, (cache,)).meta = dict(cache.meta)
    FuseLinearChains().apply(graph)
    assert kinds_of(graph)[:2] == ["LN", "GLNB"]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_other_dtypes_are_left_alone(dtype: str, checkpoint: Callable[..., Path]) -> None:
    assert FuseLinearChains().apply(graph_of(checkpoint("mimo", "random"), dtype)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_no_token_changes(family: str, checkpoint: Callable[..., Path]) -> None:
    before = ("pack-weights", "fuse-elementwise", "skip-idle-rows")
    check_no_token_changes(checkpoint(family), before, (*before, "fuse-linear-chains"))
