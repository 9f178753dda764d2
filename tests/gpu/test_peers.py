"""Exchanges through the memory of other ranks: the kernel in Triton's interpreter, interpreted by
several processes that share one file as the memory of their GPUs. It has never run on GPUs.

Needs Triton's interpreter: `tests/run_triton.sh`.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from helpers.forked_ranks import run_ranks
from helpers.mapped_peers import share_mapped
from helpers.small_graphs import run, small_graph

from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import lower_by_inductor
from mtpc.backends.gpu.passes.spell_collectives import SpellCollectives
from mtpc.backends.peer_memory import BLOCK_BYTES, BLOCKS, MOST_BYTES, PEERS, PeerMemory
from mtpc.backends.triton_kernels import launch as launches
from mtpc.backends.triton_kernels import load_kernels, triton_bindings
from mtpc.backends.triton_kernels.ops.exchanges import gather_ranks, sum_ranks
from mtpc.backends.triton_kernels.plans import plan
from mtpc.capture.graph import operators
from mtpc.passes.shard import Sharding
from mtpc.ranks.exchanges import share_peers
from mtpc.ranks.group import Ranks

pytestmark = pytest.mark.triton

ours = torch.ops.mtpc
SHAPES = ((1,), (3, 5), (1, 1024), (4, 513), (2, 1023), (0, 8))
"""Ragged ones, one block, more than one, none."""


def numbers(rank: int, call: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums of them depend on the order."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * call + rank))
    return (made * 30.0 ** ((rank + call) % 3)).to(dtype)


def expected(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def join(ranks: Ranks, directory: Path) -> None:
    load_kernels()
    share_mapped(ranks.rank, ranks.size, ranks.group, directory / "memory")
    ranks.tell_all(None)


def same_bits(ranks: Ranks, directory: Path) -> None:
    """Of the reference, over gloo, too."""
    join(ranks, directory)
    kernels, group = torch.ops.mtpc_loaded, ranks.group
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for call, shape in enumerate(SHAPES):
            part = numbers(ranks.rank, call, *shape, dtype=dtype)
            found, wanted = kernels.sum_ranks(part, group), ours.sum_ranks(part, group)
            if dtype == torch.bfloat16:  # The interpreter truncates, where devices round.
                exact = ours.sum_ranks(part.float(), group)
                wanted = (exact.view(torch.int32) >> 16).short().view(dtype)
            assert torch.equal(bits(found), bits(wanted)), (dtype, shape)
            assert found.shape == wanted.shape
    for dtype in (torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.bool):
        for call, shape in enumerate(SHAPES):
            part = numbers(ranks.rank, call, *shape).to(dtype)
            found = kernels.gather_ranks(part, ranks.size, group)
            assert torch.equal(bits(found), bits(ours.gather_ranks(part, ranks.size, group)))
            assert found.dtype == dtype
    part = numbers(ranks.rank, 0, 6, 10).T  # Not as it is in memory, after another exchange.
    found = kernels.sum_ranks(part, group, found)
    assert torch.equal(found, ours.sum_ranks(part, group))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_bits_are_those_of_the_reference(size: int, tmp_path: Path) -> None:
    run_ranks(size, tmp_path, partial(same_bits, directory=tmp_path), 300.0)


CALLS = 60


def many_calls(ranks: Ranks, directory: Path) -> list[int]:
    """Sums and gathers of all sizes in a row, with ranks that are late by turns; the launches of a
    captured graph come again with the same tensors. Nobody waits for others but in the kernel.

    Returns:
        The calls that gave wrong bits.
    """
    join(ranks, directory)
    late, wrong = random.Random(ranks.rank), list[int]()
    kernels, group = torch.ops.mtpc_loaded, ranks.group
    for call in range(CALLS):
        shape = SHAPES[call % (len(SHAPES) - 1)]
        parts = [numbers(r, call, *shape, dtype=torch.float32) for r in range(ranks.size)]
        if late.random() < 0.3:
            time.sleep(late.random() * 0.02)
        if call % 3:
            found, wanted = kernels.sum_ranks(parts[ranks.rank], group), expected(parts)
        else:
            found = kernels.gather_ranks(parts[ranks.rank], ranks.size, group)
            wanted = torch.stack(parts)
        if not torch.equal(bits(found), bits(wanted)):
            wrong.append(call)
    counts = PEERS[group].flags
    assert counts[0].tolist() == [CALLS] * ranks.size
    return wrong


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_late_ranks_change_nothing(size: int, tmp_path: Path) -> None:
    wrong = run_ranks(size, tmp_path, partial(many_calls, directory=tmp_path), 300.0)
    assert wrong == [[]] * size


def replayed(ranks: Ranks, directory: Path) -> None:
    """The launches of two exchanges, made once and run again and again, as a graph's are."""
    join(ranks, directory)
    part, group = torch.zeros(2, 700), ranks.group
    one, total = plan("sum_ranks", part, group, None)
    two, gathered = plan("gather_ranks", total, ranks.size, group, None)
    for call in range(9):
        parts = [numbers(rank, call, 2, 700) for rank in range(ranks.size)]
        part.copy_(parts[ranks.rank])
        launches.run([*one, *two])
        assert torch.equal(gathered, expected(parts).expand(ranks.size, -1, -1))
        if call == 4:
            total.fill_(-1.0)


def test_launches_can_be_replayed(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, partial(replayed, directory=tmp_path), 120.0)


def left_alone(ranks: Ranks, directory: Path) -> float:
    """Rank 0 waits for a rank that never comes, until it is let go; seconds that it took."""
    join(ranks, directory)
    memory, start = PEERS[ranks.group], time.monotonic()
    if ranks.rank == 0:
        timer = threading.Timer(1.0, memory.let_go)
        timer.start()
        for _ in range(3):  # Nor does a later exchange wait.
            torch.ops.mtpc_loaded.sum_ranks(torch.ones(4), ranks.group)
        timer.join()
    return time.monotonic() - start


def test_a_rank_that_waits_can_be_let_go(tmp_path: Path) -> None:
    took_s, _ = run_ranks(2, tmp_path, partial(left_alone, directory=tmp_path), 60.0)
    assert 0.9 < took_s < 20


def shared(ranks: Ranks, directory: Path) -> list[str]:
    """What ranks are told that share memory, and whether they have an entry."""
    make = partial(share_mapped, ranks.rank, ranks.size)
    said = [share_peers(ranks, "good", lambda: make("good", directory / "good"))]
    assert "good" in PEERS

    def fail() -> PeerMemory:
        if ranks.rank == 1:
            raise RuntimeError("no room\nfor a second line")
        return make("bad", directory / "bad")

    def apart() -> PeerMemory:
        """Each has memory of its own, where it sees flags of the others, but not what they give."""
        memory = make("apart", directory / f"apart {ranks.rank}")
        memory.flags.fill_(9)
        memory.flags[:, ranks.rank] = 0
        return memory

    said.append(share_peers(ranks, "bad", fail))
    said.append(share_peers(ranks, "apart", apart))
    assert "apart" not in PEERS
    return said


def test_ranks_try_an_exchange_before_they_share(tmp_path: Path) -> None:
    one, other = run_ranks(2, tmp_path, partial(shared, directory=tmp_path), 60.0)
    assert one == other
    assert one[0] == ""
    by_nccl = "GPUs exchange small values by NCCL, not by a kernel: rank"
    assert one[1] == f"{by_nccl} 1 of 2 cannot share its GPU's memory: no room"
    assert one[2].startswith(f"{by_nccl} 0 of 2 has read [")
    assert one[2].endswith("there, expected 3.0")


def lowered(ranks: Ranks, directory: Path) -> list[str]:
    """A step of two sums, of which neither needs the other, bound and compiled by Inductor."""
    join(ranks, directory)

    def step(out: Tensor, x: Tensor, y: Tensor) -> None:
        out.copy_(ours.all_reduce(x.relu(), "0") + ours.all_reduce(y.sin(), "0"))

    x, y = numbers(ranks.rank, 0, 2, 64), numbers(ranks.rank, 1, 2, 64)
    graph = small_graph(step, batch_out=torch.zeros(2, 64), x=x, y=y)
    wanted = run(graph)
    SpellCollectives(Sharding(ranks.rank, 2, "0", {}, {}, MOST_BYTES)).apply(graph)
    BindKernels(triton_bindings()).apply(graph)
    compiled = lower_by_inductor(graph)
    graph.buffer("batch.out").zero_()
    ranks.meet()
    for _ in range(3):
        compiled()
    torch.testing.assert_close(graph.buffer("batch.out"), wanted)
    assert PEERS["0"].flags[0].tolist() == [6, 6]
    return [str(op) for _, op in operators(graph.graph) if str(op).startswith("mtpc")]


@pytest.mark.slow
def test_inductor_calls_the_kernel(tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path, partial(lowered, directory=tmp_path), 300.0)
    assert found == [["mtpc_loaded.sum_ranks.default"] * 2] * 2


def test_limits(tmp_path: Path) -> None:
    """What is too large, or has no memory, or adds otherwise, stays with torch.distributed."""
    group, fits = "limits", torch.zeros(MOST_BYTES // 4)
    call = {"part": fits, "group": group}
    assert sum_ranks.limit(call) == "its ranks do not share memory"
    share_mapped(0, 2, group, tmp_path / "memory")
    try:
        for operator in (sum_ranks, gather_ranks):
            assert operator.limit(call) is None
            refusal = operator.limit({**call, "part": torch.zeros(MOST_BYTES // 4 + 1)})
            assert refusal == "524292 bytes; it takes up to 524288"
        assert sum_ranks.limit({**call, "part": fits.double()[:8]}) == "torch.float64"
        (launch,) = sum_ranks.plan(fits, group)[0]
        assert launch.grid == (BLOCKS, 1, 1)
        assert launch.constants["BLOCK"] * fits.itemsize == BLOCK_BYTES
    finally:
        del PEERS[group]
