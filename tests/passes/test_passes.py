"""Each pass: golden text before and after, exact rewrite count, idempotence, eager equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plans import plan_of
from helpers.small_graphs import Function, check_pass, operations, run, small_graph
from helpers.spelled_out import spell_out
from torch import Tensor, fx, nn

from mtpc import ops
from mtpc.backends.cpu.passes.pack_weights import PackWeights
from mtpc.backends.gpu.passes.merge_projections import MergeProjections
from mtpc.backends.pipeline import pass_names, select_passes
from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.errors import GraphError, OptionError
from mtpc.layout import BufferSpec, Layout, StepKey
from mtpc.passes import Pass, Verifier, run_pipeline
from mtpc.passes.absorb_latent import AbsorbLatent
from mtpc.passes.canonicalise import Canonicalise
from mtpc.passes.fuse_draft_chain import FuseDraftChain
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.hoist_shared import HoistShared
from mtpc.passes.resize_metadata import row_demands
from mtpc.passes.select_head_rows import SelectHeadRows
from mtpc.passes.trim_draft_head import TrimDraftHead
from mtpc.weights.weights import Weights

aten = torch.ops.aten


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_canonicalise() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        y = aten.to.dtype(x, torch.float64)  # already that
        y = aten.slice.Tensor(y, 0, 0, 9223372036854775807)  # all of it
        y = aten.view.default(y, [2, 3])  # that shape already
        x.sin()  # nobody looks
        out.copy_(y.cos())

    graph = small_graph(body, x=_random(2, 3), batch_out=torch.zeros(2, 3, dtype=torch.float64))
    before = "to[2,3] slice[2,3] view[2,3] sin[2,3] cos[2,3] copy_[2,3]"
    check_pass(graph, Canonicalise(), before, "cos[2,3] copy_[2,3]", rewrites=4)


def test_canonicalise_keeps_writes_that_someone_reads() -> None:
    """A write to a temporary is live exactly if the temporary is read afterwards."""

    def body(x: Tensor, out: Tensor) -> None:
        used, unused = x.clone(), x.clone()
        used.add_(1)
        unused.add_(2)
        out.copy_(used)

    graph = small_graph(body, x=_random(2), batch_out=torch.zeros(2, dtype=torch.float64))
    before = "clone[2] clone[2] add_[2] add_[2] copy_[2]"
    check_pass(graph, Canonicalise(), before, "clone[2] add_[2] copy_[2]", rewrites=2)


def test_select_head_rows() -> None:
    """The selection moves above the head, the norm, the residual sum and sin, to a sum of rows."""

    def body(x: Tensor, weight: Tensor, gain: Tensor, rows: Tensor, out: Tensor) -> None:
        h = aten.add.Tensor(aten.sin.default(aten.cumsum.default(x, 0)), x)
        h = aten.mul.Tensor(h, aten.rsqrt.default(aten.mean.dim(aten.pow(h, 2), [-1], True)))
        logits = aten.linear.default(aten.mul.Tensor(gain, h), weight)
        out.copy_(aten.index_select.default(logits, 0, rows))

    graph = small_graph(
        body,
        x=_random(6, 4),
        weight=_random(5, 4),
        gain=_random(4),
        rows=torch.tensor([1, 4]),
        batch_out=torch.zeros(2, 5, dtype=torch.float64),
    )
    before = (
        "cumsum[6,4] sin[6,4] add[6,4] pow[6,4] mean[6,1] rsqrt[6,1] mul[6,4] mul[6,4] linear[6,5] "
        "index_select[2,5] copy_[2,5]"
    )
    after = (
        "cumsum[6,4] index_select[2,4] sin[2,4] index_select[2,4] add[2,4] "
        "pow[2,4] mean[2,1] rsqrt[2,1] mul[2,4] mul[2,4] linear[2,5] copy_[2,5]"
    )
    found = operations(graph)
    assert found == before.split()
    expected = run(graph)
    run_pipeline(graph, (SelectHeadRows(), HoistShared()), Verifier(propagate=True))
    assert graph.history[-2].rewrites == 8
    assert sorted(operations(graph)) == sorted(after.split())
    torch.testing.assert_close(run(graph), expected, rtol=1e-12, atol=1e-12)
    assert SelectHeadRows().apply(graph) == 0


def test_select_head_rows_leaves_full_uses_alone() -> None:
    """Where another user needs all rows, nothing moves."""

    def body(x: Tensor, weight: Tensor, rows: Tensor, out: Tensor) -> None:
        logits = aten.linear.default(x, weight)
        out.copy_(aten.index_select.default(logits, 0, rows) + logits.sum())

    graph = small_graph(
        body,
        x=_random(6, 4),
        weight=_random(5, 4),
        rows=torch.tensor([1, 4]),
        batch_out=torch.zeros(2, 5, dtype=torch.float64),
    )
    text = "linear[6,5] index_select[2,5] sum[] add[2,5] copy_[2,5]"
    check_pass(graph, SelectHeadRows(), text, text, rewrites=0)


def test_select_head_rows_keeps_one_row_that_becomes_several() -> None:
    """It would be lost: no operand of one row tells whether it is broadcast."""

    def body(x: Tensor, weight: Tensor, rows: Tensor, out: Tensor) -> None:
        out.copy_(aten.index_select.default(aten.linear.default(x, weight), 0, rows))

    graph = small_graph(
        body,
        x=_random(1, 4),
        weight=_random(5, 4),
        rows=torch.tensor([0, 0, 0]),
        batch_out=torch.zeros(3, 5, dtype=torch.float64),
    )
    text = "linear[1,5] index_select[3,5] copy_[3,5]"
    check_pass(graph, SelectHeadRows(), text, text, rewrites=0)


def test_hoist_shared() -> None:
    """Equal calls merge, unless memory they read was written in between."""

    def body(x: Tensor, state: Tensor, out: Tensor) -> None:
        first, again = x.sin(), x.sin()
        old = state.cos()
        state.add_(1)
        new = state.cos()
        out.copy_(first + again + old - new)

    graph = small_graph(
        body,
        x=_random(3),
        batch_state=_random(3),
        batch_out=torch.zeros(3, dtype=torch.float64),
    )
    graph.buffer("batch.state").zero_()
    before = "sin[3] sin[3] cos[3] add_[3] cos[3] add[3] add[3] sub[3] copy_[3]"
    after = "sin[3] cos[3] add_[3] cos[3] add[3] add[3] sub[3] copy_[3]"
    assert operations(graph) == before.split()
    assert HoistShared().apply(graph) == 1
    graph.module.recompile()
    assert operations(graph) == after.split()
    assert HoistShared().apply(graph) == 0
    found = run(graph)
    expected = 2 * graph.weights["x"].sin() + torch.zeros(3).double().cos() - torch.ones(3).cos()
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-6)


def test_merge_projections() -> None:
    def body(x: Tensor, q: Tensor, k: Tensor, other: Tensor, out: Tensor) -> None:
        joint = aten.cat([aten.linear(x, q), aten.linear(x, k)], -1)
        out.copy_(aten.linear(joint, other))

    graph = small_graph(
        body,
        x=_random(2, 4),
        q=_random(3, 4),
        k=_random(5, 4),
        other=_random(2, 8),
        batch_out=torch.zeros(2, 2, dtype=torch.float64),
    )
    before = "linear[2,3] linear[2,5] cat[2,8] linear[2,2] copy_[2,2]"
    after = "linear[2,8] slice[2,3] slice[2,5] cat[2,8] linear[2,2] copy_[2,2]"
    check_pass(graph, MergeProjections(), before, after, rewrites=1, exact=False)
    assert graph.weights["merged.q+k"].shape == (8, 4)


def test_absorb_latent() -> None:
    """The rewrite is exact in real arithmetic: equal to 1e-12 in float64."""
    heads, rank, rope, nope, value_dim = 3, 8, 4, 6, 5

    def body(q, cache, kv_up, table, lens, starts, out):  # type: ignore[no-untyped-def]
        out.copy_(ops.expanded_latent_attention(q, cache, kv_up, table, lens, starts, 0.3, nope))

    graph = small_graph(
        body,
        q=_random(4, heads, nope + rope),
        kv_cache=_random(5, 4, rank + rope),
        kv_up=_random(heads * (nope + value_dim), rank),
        table=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        lens=torch.tensor([7, 5], dtype=torch.int32),
        starts=torch.tensor([0, 2, 4], dtype=torch.int32),
        batch_out=torch.zeros(4, heads, value_dim, dtype=torch.float64),
    )
    before = "expanded_latent_attention[4,3,5] copy_[4,3,5]"
    after = (
        "view[3,11,8] slice[3,6,8] slice[3,5,8] slice[4,3,6] transpose[3,4,6] slice[4,3,4] "
        "matmul[3,4,8] transpose[4,3,8] cat[4,3,12] latent_attention[4,3,8] transpose[3,8,5] "
        "transpose[3,4,8] matmul[3,4,5] transpose[4,3,5] copy_[4,3,5]"
    )
    found = operations(graph)
    assert found == before.split()
    expected = run(graph)
    assert AbsorbLatent().apply(graph) == 1
    graph.module.recompile()
    assert sorted(operations(graph)) == sorted(after.split())
    torch.testing.assert_close(run(graph), expected, rtol=1e-12, atol=1e-12)
    assert AbsorbLatent().apply(graph) == 0


def test_the_verifier_sees_a_host_sync() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    graph = small_graph(body, x=_random(3), batch_out=torch.zeros(3, dtype=torch.float64))
    copy = next(n for n in graph.graph.nodes if n.target is aten.copy_.default)
    with graph.graph.inserting_before(copy):
        node = graph.graph.call_function(aten.nonzero.default, (copy.args[1],))
    node.meta["val"] = None
    with pytest.raises(GraphError, match="makes the host wait"):
        Verifier(propagate=False)(graph, "a-bad-pass")


def test_the_verifier_sees_a_written_weight() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        x.add_(1)
        out.copy_(x)

    with pytest.raises(GraphError, match="writes the weight x"):
        small_graph(body, x=_random(3), batch_out=torch.zeros(3, dtype=torch.float64))


def test_the_verifier_sees_a_wrong_shape() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(aten.slice.Tensor(x, 0, 0, 3))

    graph = small_graph(body, x=_random(5), batch_out=torch.zeros(3, dtype=torch.float64))
    cut = next(n for n in graph.graph.nodes if n.target is aten.slice.Tensor)
    cut.args = (cut.args[0], 0, 0, 2)
    with pytest.raises(GraphError, match="a-bad-pass"):
        Verifier(propagate=True)(graph, "a-bad-pass")


def test_pass_options() -> None:
    with pytest.raises(OptionError, match="unknown pass 'fuse-chain'"):
        select_passes(plan_of(disabled_passes=("fuse-chain",)))
    with pytest.raises(OptionError, match="cannot be disabled"):
        select_passes(plan_of(disabled_passes=("resize-metadata",)))
    idle = ("trim-draft-head", "shard")  # A plan without ranks and draft vocabulary has neither.
    usual = [name for name in pass_names("required", "on") if name not in idle]
    assert [step.name for step in select_passes(plan_of())] == usual
    names = [
        step.name
        for step in select_passes(
            plan_of(disabled_passes=("hoist-shared",)), ("merge-projections",)
        )
    ]
    assert "hoist-shared" not in names
    assert names[-1] == "merge-projections"


@pytest.mark.parametrize("split", ["chunk", "split", "unbind", "dropout"])
def test_views_that_schemas_do_not_announce(split: str) -> None:
    """A write through such a view reaches the buffer: it is kept, and orders what reads it."""

    def body(state: Tensor, out: Tensor) -> None:
        before = state.cos()
        if split == "chunk":
            part = aten.chunk(state, 2)[0]
        elif split == "split":
            part = aten.split.Tensor(state, 2)[1]
        elif split == "unbind":
            part = aten.unbind.int(state, 0)[1]
        else:
            part = aten.dropout(state, 0.5, False)
        part.add_(1)
        out.copy_(before - aten.alias(state).cos())

    graph = small_graph(
        body, batch_state=torch.zeros(4).double(), batch_out=torch.zeros(4).double()
    )
    expected = run(graph)
    assert expected.abs().sum() > 0
    run_pipeline(graph, (Canonicalise(), HoistShared()), Verifier(propagate=True))
    graph.buffer("batch.state").zero_()
    assert torch.equal(run(graph), expected)


def test_a_true_copy_is_kept() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        first = x.clone()
        second = aten.to.dtype(first, torch.float64, False, True)
        second.add_(1)
        out.copy_(first)

    graph = small_graph(body, x=_random(3), batch_out=torch.zeros(3).double())
    expected = run(graph)
    run_pipeline(graph, (Canonicalise(),), Verifier(propagate=True))
    assert torch.equal(run(graph), expected)


def test_rows_are_not_selected_across_a_write() -> None:
    """select-head-rows must not recompute from an operand that was changed in between."""

    def body(x: Tensor, rows: Tensor, out: Tensor) -> None:
        h = x.clone()
        doubled = aten.mul.Tensor(h, h)
        h.add_(1)
        out.copy_(aten.index_select.default(doubled, 0, rows) + aten.select.int(h, 0, 0))

    graph = small_graph(
        body, x=_random(4, 2), rows=torch.tensor([1, 3]), batch_out=torch.zeros(2, 2).double()
    )
    expected = run(graph)
    run_pipeline(graph, (SelectHeadRows(),), Verifier(propagate=True))
    assert graph.history[-1].rewrites == 0
    assert torch.equal(run(graph), expected)


@pytest.mark.parametrize(
    "row_wise",
    [
        lambda x: aten.add.Tensor(x, x.cos(), alpha=3),
        lambda x: aten.sub.Tensor(x, x.cos(), alpha=3),
        lambda x: aten.add.Scalar(x, 2, 3),
        lambda x: aten.mean.dim(x.float(), [-1], True, dtype=torch.float64),
        lambda x: aten.clamp.default(x, max=0.1),
        lambda x: aten.linear.default(x, torch.ones(2, 4).double(), torch.ones(2).double()),
    ],
    ids=["add", "sub", "add-scalar", "mean", "clamp", "linear"],
)
@pytest.mark.parametrize("spelled_out", [False, True])
def test_select_head_rows_keeps_every_argument(
    row_wise: Callable[[Tensor], Tensor], spelled_out: bool
) -> None:
    """What is computed again for fewer rows has the arguments that it had."""
    width = row_wise(_random(1, 4)).shape[-1]

    def body(x: Tensor, rows: Tensor, out: Tensor) -> None:
        out.copy_(aten.index_select.default(row_wise(x), 0, rows))

    graph = small_graph(
        body,
        x=_random(6, 4),
        rows=torch.tensor([1, 4]),
        batch_out=torch.zeros(2, width, dtype=torch.float64),
    )
    if spelled_out:
        spell_out(graph)
    expected = run(graph)
    run_pipeline(graph, (SelectHeadRows(),), Verifier(propagate=True))
    assert graph.history[-1].rewrites >= 1
    assert torch.equal(run(graph), expected)


def _norm(x: Tensor, weight: Tensor, alpha: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    wide = x.float()
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(wide, 2), [-1], True, dtype=dtype)
    scale = aten.rsqrt.default(aten.add.Tensor(mean, 0.5, alpha=alpha))
    return weight * (wide * scale).bfloat16()


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, alpha: int = 1) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return aten.add.Tensor(x * cos, turned * sin, alpha=alpha)


def _narrow(*shape: int) -> Tensor:
    return _random(*shape).bfloat16()


@pytest.mark.parametrize("spelled_out", [False, True])
@pytest.mark.parametrize(
    ("chain", "shapes", "changes"),
    [
        (_norm, [(3, 8), (8,)], [{"alpha": 3}, {"dtype": torch.float64}]),
        (_rotary, [(1, 2, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)], [{"alpha": 3}]),
    ],
)
def test_a_chain_with_an_argument_that_the_operator_lacks_is_no_match(
    chain: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    changes: list[dict[str, Any]],
    spelled_out: bool,
) -> None:
    """fuse-elementwise takes the chain as it knows it, however it is spelled, and no other."""
    for change in ({}, *changes):

        def body(*tensors: Tensor, change: dict[str, Any] = change) -> None:
            tensors[-1].copy_(chain(*tensors[:-1], **change))

        tensors = {f"t{i}": _narrow(*shape) for i, shape in enumerate(shapes)}
        graph = small_graph(body, **tensors, batch_out=_narrow(*shapes[0]))
        if spelled_out:
            spell_out(graph)
        expected = run(graph)
        run_pipeline(graph, (FuseElementwise(),), Verifier(propagate=True))
        assert graph.history[-1].rewrites == (0 if change else 1)
        assert torch.equal(run(graph), expected)


@pytest.mark.parametrize("step", [MergeProjections(), PackWeights()], ids=lambda p: p.name)
def test_a_bias_by_name_is_kept(step: Pass) -> None:
    def body(x, one, other, bias, out):  # type: ignore[no-untyped-def]
        left, right = aten.linear.default(x, one, bias), aten.linear.default(x, other, bias)
        out.copy_(torch.cat([left, right], -1))

    graph = small_graph(
        body,
        x=_narrow(3, 8),
        one=_narrow(32, 8),
        other=_narrow(32, 8),
        bias=_narrow(32),
        batch_out=torch.zeros(3, 64).bfloat16(),
    )
    spell_out(graph)
    expected = run(graph)
    run_pipeline(graph, (step,), Verifier(propagate=True))
    assert graph.history[-1].rewrites == 1
    torch.testing.assert_close(run(graph), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("keepdim", [False, True])
def test_a_trimmed_head_has_its_bias_and_its_dimensions(keepdim: bool) -> None:
    def body(x, weight, bias, out):  # type: ignore[no-untyped-def]
        out.copy_(aten.argmax.default(aten.linear.default(x, weight, bias), -1, keepdim))

    graph = small_graph(
        body,
        x=_random(3, 4),
        weight=_random(9, 4),
        bias=torch.eye(9, dtype=torch.float64)[2] * 100,
        batch_out=torch.zeros((3, 1) if keepdim else 3, dtype=torch.int64),
    )
    for node in graph.graph.nodes:
        node.meta["piece"] = "drafts.0"
    spell_out(graph)
    run_pipeline(graph, (TrimDraftHead((0, 2, 5)),), Verifier(propagate=True))
    assert graph.history[-1].rewrites == int(not keepdim)
    assert run(graph).flatten().tolist() == [2, 2, 2]


def test_a_cast_that_rounds_is_no_part_of_a_wide_linear() -> None:
    """pack-weights reads operands before they were widened, and not before they were rounded."""

    def body(x, router, weight, out):  # type: ignore[no-untyped-def]
        wide = aten.linear.default(x.bfloat16().float(), router)
        out.copy_(wide + aten.linear.default(x.bfloat16(), weight).float())

    graph = small_graph(
        body,
        x=_random(3, 8).float(),
        router=_random(32, 8).float(),
        weight=_narrow(32, 8),
        batch_out=torch.zeros(3, 32),
    )
    expected = run(graph)
    run_pipeline(graph, (PackWeights(),), Verifier(propagate=True))
    assert graph.history[-1].rewrites == 2
    (wide,) = (n for n in graph.graph.nodes if "float32_linear" in str(n.target))
    assert wide.args[0].meta["val"].dtype == torch.bfloat16
    torch.testing.assert_close(run(graph), expected, rtol=1e-6, atol=1e-6)


def test_minus_zero_is_another_argument() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(1 / aten.mul.Scalar(x, 0.0) + 2 / aten.mul.Scalar(x, -0.0))

    graph = small_graph(body, x=torch.ones(2).double(), batch_out=torch.zeros(2).double())
    expected = run(graph)
    run_pipeline(graph, (HoistShared(),), Verifier(propagate=True))
    torch.testing.assert_close(run(graph), expected, equal_nan=True)


def test_a_demand_for_rows_is_seen_by_name() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(aten.slice.Tensor(x, 0, 0, 3))

    graph = small_graph(body, batch_x=_random(5), batch_out=torch.zeros(3, dtype=torch.float64))
    assert row_demands(graph) == {"batch.x": 3}
    spell_out(graph)
    assert row_demands(graph) == {"batch.x": 3}


def test_a_piece_takes_no_argument_by_name() -> None:
    """An argument by name would be lost where the piece is inlined."""
    module, graph = nn.Module(), fx.Graph()
    set_tensor(module, "batch.out", torch.zeros(2))
    module.add_module("pieces", nn.Module())
    module.pieces.add_module("body", Function(lambda out: out.add_(1)))  # type: ignore[operator]
    out = graph.get_attr("batch.out")
    graph.call_module("pieces.body", (out,), {"scale": 2})
    graph.output(())
    layout = Layout([BufferSpec("batch.out", (2,), torch.float32)], {})
    step = StepGraph(fx.GraphModule(module, graph), StepKey.decode(1, 0), layout, Weights({}))
    with pytest.raises(GraphError, match=r"pieces\.body is given scale by name"):
        FuseDraftChain({}).apply(step)
