"""Each pass: golden text before and after, exact rewrite count, idempotence, eager equality."""

from __future__ import annotations

import pytest
import torch
from helpers.small_graphs import check_pass, operations, run, small_graph
from torch import Tensor

from mtpc import ops
from mtpc.errors import GraphError, OptionError
from mtpc.passes import Verifier, run_pipeline, select_passes
from mtpc.passes.absorb_latent import AbsorbLatent
from mtpc.passes.canonicalise import Canonicalise
from mtpc.passes.hoist_shared import HoistShared
from mtpc.passes.merge_projections import MergeProjections
from mtpc.passes.select_head_rows import SelectHeadRows

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
    """The selection moves above the head, the norm and the residual sum, and stops at sin."""

    def body(x: Tensor, weight: Tensor, gain: Tensor, rows: Tensor, out: Tensor) -> None:
        h = aten.add.Tensor(aten.sin.default(x), x)
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
        "sin[6,4] add[6,4] pow[6,4] mean[6,1] rsqrt[6,1] mul[6,4] mul[6,4] linear[6,5] "
        "index_select[2,5] copy_[2,5]"
    )
    after = (
        "sin[6,4] index_select[2,4] index_select[2,4] add[2,4] "
        "pow[2,4] mean[2,1] rsqrt[2,1] mul[2,4] mul[2,4] linear[2,5] copy_[2,5]"
    )
    found = operations(graph)
    assert found == before.split()
    expected = run(graph)
    run_pipeline(graph, (SelectHeadRows(), HoistShared()), Verifier(propagate=True))
    assert graph.history[-2].rewrites == 7
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

    with pytest.raises(GraphError, match="writes weight x"):
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
        select_passes({}, ("fuse-chain",), ())
    with pytest.raises(OptionError, match="cannot be disabled"):
        select_passes({}, ("resize-metadata",), ())
    names = [step.name for step in select_passes({}, ("hoist-shared",), ("merge-projections",))]
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
