"""Collectives spelled out around one exchange: the bits of the references, in one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.plans import plan_of
from helpers.small_graphs import run, small_graph
from torch import Tensor

from mtpc.backends import make_backend
from mtpc.backends.gpu.ops import exchanges
from mtpc.backends.gpu.passes import spell_collectives
from mtpc.backends.gpu.passes.spell_collectives import SpellCollectives
from mtpc.capture.graph import operators
from mtpc.models.load import load
from mtpc.ops import collectives
from mtpc.passes.shard import Sharding
from mtpc.program.compiler import StepCompiler
from mtpc.ranks.group import Ranks

ours = torch.ops.mtpc
GROUP = "0"
GATHER = ours.gather_ranks.default


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(7 * sum(shape) + rank))
    return (4 * made).to(dtype)


def check(step: Callable[..., None], **tensors: Tensor) -> None:
    """A step leaves the same bits in `batch.out` before and after the pass."""
    graph = small_graph(step, **tensors)
    wanted = run(graph)
    sharding = Sharding(torch.distributed.get_rank(), 3, GROUP, {}, {})
    assert SpellCollectives(sharding).apply(graph) == 1
    left = {op for _, op in operators(graph.graph) if str(op).startswith("mtpc")}
    assert left <= {GATHER, ours.rank_part.default}
    assert torch.equal(run(graph), wanted)
    assert not (wanted == -7).all()


def check_all(ranks: Ranks) -> None:
    """Every collective; the last rank has a smaller part of what does not divide."""
    rank, last = ranks.rank, int(ranks.rank == 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        out = torch.zeros(5, 7, dtype=dtype)

        def total(out: Tensor, x: Tensor) -> None:
            out.copy_(ours.all_reduce(x, GROUP))

        check(total, batch_out=out.clone(), x=numbers(rank, 5, 7, dtype=dtype))

        def embedded(out: Tensor, rows: Tensor, ids: Tensor) -> None:
            out.copy_(ours.vocab_embedding(rows, ids, 6, GROUP))

        rows = numbers(rank, 6 - last, 7, dtype=dtype)
        ids = torch.tensor([0, 5, 6, 16, 12])
        check(embedded, batch_out=out.clone(), rows=rows, ids=ids)
        logits = numbers(rank, 5, 6 - last, dtype=dtype)
        logits[1], logits[2, 0] = 1.0, torch.nan  # Equal ones, and what is no number.

        def largest(out: Tensor, logits: Tensor) -> None:
            values, ids = ours.vocab_max(logits, 6, GROUP)
            out.copy_(torch.stack([values.nan_to_num(9.0).double(), ids.double()]))

        check(largest, batch_out=torch.zeros(2, 5, dtype=torch.float64), logits=logits)
        for dim, shape in ((0, (3 - last, 4)), (1, (4, 3 - last))):

            def whole(out: Tensor, x: Tensor, dim: int = dim) -> None:
                out.copy_(ours.all_gather(x, dim, 8, GROUP))

            wide = [8 if i == dim else n for i, n in enumerate(shape)]
            check(whole, batch_out=torch.zeros(wide, dtype=dtype), x=numbers(rank, *shape))

    def told(out: Tensor, x: Tensor) -> None:
        out.copy_(ours.first_rank(x, GROUP))

    check(told, batch_out=torch.zeros(4, dtype=torch.int64), x=torch.arange(1, 5) * (rank + 1))


def test_values_are_those_of_the_references(tmp_path: Path) -> None:
    run_ranks(3, tmp_path, check_all)


def count_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the bytes that this rank sends to others in each exchange."""
    sent, gather, exchange = list[int](), collectives._gather, exchanges._exchange

    def gathered(whole: Tensor, part: Tensor, group: Any) -> None:
        sent.append(whole.nbytes - part.nbytes)
        gather(whole, part, group)

    def exchanged(found: Tensor, parts: Tensor, group: Any) -> None:
        sent.append(parts.nbytes - parts.nbytes // len(parts))
        exchange(found, parts, group=group)

    patch.setattr(collectives, "_gather", gathered)
    patch.setattr(exchanges, "_exchange", exchanged)
    return sent


def reduce_by_blocks(ranks: Ranks, dtype: torch.dtype) -> list[tuple[int, list[int], list[int]]]:
    """Bytes of a summand, and those sent by the reference and after the pass; the bits are equal.

    The last shape does not divide by the ranks. A few kilobytes count as many.
    """
    spell_collectives.LEAST_SAVED = 2 << 10
    sent, found = count_sent(pytest.MonkeyPatch()), []
    for rows, width in ((1, 8), (64, 40), (65, 41)):
        x = numbers(ranks.rank, rows, width, dtype=dtype)

        def total(out: Tensor, x: Tensor) -> None:
            out.copy_(ours.all_reduce(x, GROUP))

        graph = small_graph(total, batch_out=torch.zeros_like(x), x=x)
        wanted = run(graph)
        whole = sent[:]
        sent.clear()
        assert SpellCollectives(Sharding(ranks.rank, ranks.size, GROUP, {}, {})).apply(graph) == 1
        assert torch.equal(run(graph).view(torch.uint8), wanted.view(torch.uint8))
        found.append((x.nbytes, whole, sent[:]))
        sent.clear()
    return found


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32]
)
@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_large_sums_are_made_by_blocks(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of more than two ranks: they send 2 (n - 1) / n of the size, in place of n - 1 times it."""
    for told in run_ranks(size, tmp_path, partial(reduce_by_blocks, dtype=dtype)):
        small, large, odd = told
        assert small == (small[0], [small[0] * (size - 1)], [small[0] * (size - 1)])
        nbytes, gathered, exchanged = large
        assert gathered == [nbytes * (size - 1)]
        if size == 2:
            assert exchanged == gathered
            continue
        padded = -(-nbytes // dtype.itemsize // size) * size * dtype.itemsize
        assert exchanged == [padded // size * (size - 1)] * 2
        assert sum(exchanged) < 0.7 * sum(gathered)
        assert len(odd[2]) == 2
        assert sum(odd[2]) <= 2 * (size - 1) * (odd[0] / size + dtype.itemsize)


@pytest.mark.parametrize(
    ("ranks", "rows", "is_large"), [(4, 8, False), (4, 512, True), (2, 4096, False)]
)
def test_what_is_large_is_known_from_shapes(ranks: int, rows: int, is_large: bool) -> None:
    """Rows of decode steps are not, and of two ranks nothing is, as they would send as much."""

    def total(out: Tensor, x: Tensor) -> None:
        out.copy_(ours.all_reduce(x, GROUP))

    x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
    graph = small_graph(total, batch_out=torch.zeros_like(x), x=x)
    SpellCollectives(Sharding(0, ranks, GROUP, {}, {})).apply(graph)
    made = [op for _, op in operators(graph.graph) if str(op).startswith("mtpc")]
    assert made == [ours.exchange_ranks.default, GATHER][not is_large :]


@pytest.mark.parametrize(("rows", "is_small"), [(4, True), (5, False)])
def test_small_sums_of_ranks_that_share_memory(rows: int, is_small: bool) -> None:
    """They stay one operator, which follows the exchange before it."""

    def total(out: Tensor, x: Tensor) -> None:
        out.copy_(ours.all_reduce(x, GROUP) + ours.all_reduce(x.neg(), GROUP))

    x = torch.zeros(rows, 64, dtype=torch.bfloat16)
    graph = small_graph(total, batch_out=torch.zeros_like(x), x=x)
    SpellCollectives(Sharding(0, 2, GROUP, {}, {}, 4 * 64 * 2)).apply(graph)
    made = [n for n, op in operators(graph.graph) if str(op).startswith("mtpc")]
    assert [n.target for n in made] == [ours.sum_ranks.default if is_small else GATHER] * 2
    assert made[1].kwargs["after"] is made[0]


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("mimo", marks=pytest.mark.slow)])
def test_exchanges_of_a_step_have_one_order(family: str, checkpoint: Callable[..., Path]) -> None:
    """Those of experts and shared experts, of which neither needs the other, too."""
    loaded = load(str(checkpoint(family, "random")), "float32", True)
    options = plan_of(
        spec_tokens=2, batch_buckets=(2,), max_len=64, page_size=4, prefill_chunk=8,
        sampling=False, enabled_passes=(SpellCollectives.name,),
    )  # fmt: skip
    compiler = StepCompiler(loaded, options, make_backend("eager"), ranks=Ranks(0, 2, GROUP))
    graph = compiler.rewritten(compiler.keys[0])
    reaches: dict[Any, set[Any]] = {}
    exchanges: list[Any] = []
    for node in graph.graph.nodes:
        reaches[node] = set().union(*(reaches[n] | {n} for n in node.all_input_nodes))
        if node.target is GATHER:
            assert not exchanges or exchanges[-1] in reaches[node], node
            exchanges.append(node)
    assert len(exchanges) > 8
    ordered = [node for node in exchanges if node.kwargs.get("after") is not None]
    assert (len(ordered) > 0) == (family == "deepseek_v3")
    assert len(ordered) < len(exchanges) / 2, "most depend on each other anyway"
