"""Collectives through memory that ranks share: values, races, and ranks that end or hang."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked_ranks import forks_of, run_ranks
from helpers.ranks import memory_shared_by
from helpers.small_graphs import run, small_graph
from torch import Tensor

from mtpc.backends.cpu.backend import UseCpuKernels
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.tape import open_tape, write_tape
from mtpc.capture.graph import get_tensor
from mtpc.ranks import exchanges
from mtpc.ranks.exchanges import share_memory
from mtpc.ranks.group import Ranks

load_kernels()
GROUP = "0"
SLOT = 256
"""Bytes that a rank tells at once in these tests, so that most values take several turns."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = ((1,), (31,), (128,), (129,), (3, 200), (2, 5, 7))
WAIT_S = 5.0


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's own, with negative zeros, infinities and what is no number among them."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(7 * sum(shape) + rank))
    flat = made.view(-1)
    flat[:: 5 + rank] = -0.0
    flat[3 :: 11 + rank] = float("inf")
    flat[4 :: 13 + rank] = float("nan")
    return (4 * made).to(dtype)


def bits(value: Tensor) -> Tensor:
    """Where no number is, any will do: torch has different bits for it at the end of a tensor."""
    if value.is_floating_point():
        value = torch.where(value.isnan(), torch.nan, value)
    return value.reshape(-1).view(torch.uint8)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    alike = found.dtype == wanted.dtype and found.shape == wanted.shape
    return alike and torch.equal(bits(found), bits(wanted))


def check(name: str, *arguments: Any) -> None:
    """A kernel gives the bits of its reference, which torch.distributed carries."""
    results = [
        getattr(operators, name)(*arguments, GROUP)
        for operators in (torch.ops.mtpc_cpu, torch.ops.mtpc)
    ]
    found, wanted = (each if isinstance(each, tuple) else (each,) for each in results)
    for one, other in zip(found, wanted, strict=True):
        assert same_bits(one, other), (name, arguments, one, other)


def check_values(ranks: Ranks) -> None:
    """Every collective, on every dtype that steps have."""
    assert share_memory(ranks, SLOT) == ""
    rank, size = ranks.rank, ranks.size
    for dtype in FLOATS:
        for shape in SHAPES:
            check("all_reduce", numbers(rank, *shape, dtype=dtype))
        check("all_reduce", numbers(rank, 40, 30, dtype=dtype).T)
        assert torch.ops.mtpc_cpu.all_reduce(torch.zeros(0, 4, dtype=dtype), GROUP).shape == (0, 4)
        rows, step = numbers(rank, 6 if rank + 1 < size else 5, 33, dtype=dtype), 6
        check("vocab_embedding", rows, torch.tensor([[0, 5, 6], [size * 6 - 2, 3, 11]]), step)
        for width in (1, 16, 700):
            last = width if rank + 1 < size else max(1, width - 3)
            logits = numbers(rank, 20, last, dtype=dtype)
            logits[::2] = logits[::2].nan_to_num(0.0, posinf=1.0)
            logits[::4] = logits[::4].round()  # Many are equal.
            check("vocab_max", logits, width)
            check("vocab_max", logits.reshape(4, 5, last).transpose(0, 1), width)
    for dtype in (*FLOATS, torch.int64, torch.int32, torch.bool):
        for shape, dim in (((9,), 0), ((3, 9), 1), ((9, 50), 0), ((2, 9, 21), 1), ((2, 4, 9), 2)):
            each = -(-shape[dim] // size)
            whole = numbers(0, *shape).nan_to_num(2.0, posinf=3.0).to(dtype)
            own = whole.narrow(dim, min(9, rank * each), max(0, min(each, 9 - rank * each)))
            check("all_gather", own + own.new_full((), rank), dim, shape[dim])
            check("first_rank", own.new_full((5, 67), rank + 1))
        whole = numbers(0, 3, 8, 5).nan_to_num(2.0, posinf=3.0).to(dtype)
        check("rank_part", whole, 1, size)
        check("rank_part", whole.transpose(0, 1), 0, size)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_values_are_those_of_the_references(size: int, tmp_path: Path) -> None:
    """Ragged ends of turns, parts of different lengths, equal logits, no numbers at all."""
    run_ranks(size, tmp_path, check_values)


def race(ranks: Ranks) -> None:
    """Many sums, each of which a rank can know by itself, of ranks that come late by turns."""
    assert share_memory(ranks) == ""
    dice = random.Random(ranks.rank)
    for turn in range(600):
        part = torch.full((30_000,), turn * ranks.size + ranks.rank, dtype=torch.float64)
        wanted = sum(turn * ranks.size + rank for rank in range(ranks.size))
        found = torch.ops.mtpc_cpu.all_reduce(part, GROUP)
        assert (found == wanted).all(), (turn, found.unique(), wanted)
        if dice.random() < 0.1:
            # A rank that waits so long sleeps between two looks, and so reads late.
            time.sleep(dice.choice([0.0002, 0.004]))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_fast_rank_overwrites_nothing(size: int, tmp_path: Path) -> None:
    run_ranks(size, tmp_path, race)


def meet_for_ever(ranks: Ranks) -> Iterator[Any]:
    """Collectives until they fail; says how, and when."""
    assert share_memory(ranks) == ""
    assert memory_shared_by(os.getpid()) == 1, "with a name, it could be left there"
    part = torch.ones(1000)
    torch.ops.mtpc_cpu.all_reduce(part, GROUP)
    yield None
    try:
        while True:
            torch.ops.mtpc_cpu.all_reduce(part, GROUP)
    except RuntimeError as error:
        failed = time.monotonic()
        try:
            torch.ops.mtpc_cpu.all_reduce(part, GROUP)
        except RuntimeError as again:
            yield str(error), str(again), failed


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_all(lost: int, tmp_path: Path) -> None:
    """Wherever it was; the others say which one, now and in later collectives."""
    with forks_of(3, tmp_path, meet_for_ever) as forks:
        for fork in forks:
            fork.told()
        time.sleep(0.05)
        forks[lost].kill()
        killed = time.monotonic()
        for rank in {0, 1, 2} - {lost}:
            error, again, failed = forks[rank].told()
            assert error.startswith(f"rank {lost} of 3 "), error
            assert again.startswith(f"rank {lost} of 3 is lost to the others")
            assert failed - killed < 3.0


def test_a_rank_that_hangs_ends_all(tmp_path: Path) -> None:
    """When the process group's timeout is over."""
    with forks_of(2, tmp_path, meet_for_ever, WAIT_S) as forks:
        for fork in forks:
            fork.told()
        forks[1].kill(signal.SIGSTOP)
        stopped = time.monotonic()
        error, _, failed = forks[0].told()
        assert error == f"rank 1 of 2 has not answered for {WAIT_S:.0f} s"
        assert WAIT_S - 0.5 < failed - stopped < WAIT_S + 5


def part_ways(ranks: Ranks) -> str:
    """Ranks that are in different collectives."""
    assert share_memory(ranks) == ""
    with pytest.raises(RuntimeError) as caught:
        torch.ops.mtpc_cpu.all_reduce(torch.ones(4 + ranks.rank), GROUP)
    return str(caught.value)


def test_ranks_in_different_collectives(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, part_ways):
        assert "is in another exchange" in said or "is lost to the others" in said


def fall_back(ranks: Ranks) -> list[str]:
    """Shared, then not, for each reason; then shared again."""
    part = torch.ones(3)
    said = [share_memory(ranks, SLOT)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 0:  # As if /dev/shm were full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT, limits[1]))
    said.append(share_memory(ranks, SLOT))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(RuntimeError, match="the ranks of group 0 share no memory"):
        torch.ops.mtpc_cpu.all_reduce(part, GROUP)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            place = exchanges._place
            patch.setattr(exchanges, "_place", lambda *of: replace(place(*of), machine="another"))
        said.append(share_memory(ranks, SLOT))
    said.append(share_memory(ranks, SLOT))
    assert torch.ops.mtpc_cpu.all_reduce(part, GROUP)[0] == ranks.size
    return said


def test_ranks_that_cannot_share_memory(tmp_path: Path) -> None:
    """All of them know, and none goes on with what they shared before."""
    one, other = run_ranks(2, tmp_path, fall_back)
    assert one == other
    first, full, apart, last = one
    assert (first, last) == ("", "")
    assert full.startswith("ranks exchange values over torch.distributed, not through shared")
    assert "rank 0 of 2 cannot share memory: [Errno 27]" in full
    assert apart.endswith("rank 1 of 2 is on another machine than rank 0")


def play(ranks: Ranks) -> None:
    """A tape calls the kernels where memory is shared, and else the references."""

    def step(out: Tensor, x: Tensor) -> None:
        total = torch.ops.mtpc.all_reduce(x, GROUP)
        largest, ids = torch.ops.mtpc.vocab_max(x, 7, GROUP)
        out.copy_(total + largest[:, None] + torch.ops.mtpc.all_gather(ids, 0, 6, GROUP)[:3, None])

    graph = small_graph(step, batch_out=torch.zeros(3, 7), x=numbers(ranks.rank, 3, 7).nan_to_num())
    wanted = run(graph)
    assert UseCpuKernels().apply(graph) == 3
    text = write_tape(*lower_to_tape(graph))
    replay = open_tape(text, lambda name: get_tensor(graph.module, name).detach())
    for is_shared in (False, True):
        assert not is_shared or share_memory(ranks) == ""
        graph.buffer("batch.out").fill_(-7)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            replay()
        assert same_bits(graph.buffer("batch.out"), wanted)
        seen = {event.name for event in profile.events()}
        assert ("mtpc_cpu::all_reduce" in seen) == is_shared
        assert ("mtpc::all_reduce" in seen) != is_shared


def test_a_tape_runs_with_and_without_shared_memory(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, play)


def test_every_collective_has_a_kernel() -> None:
    """Those of `mtpc.ops.collectives`, which alone take a group."""
    taking = {
        str(reference.name()).removeprefix("mtpc::")
        for reference in kernel_table()
        if any(argument.name == "group" for argument in reference._schema.arguments)
    }
    wanted = {"all_reduce", "all_gather", "rank_part", "vocab_embedding", "vocab_max", "first_rank"}
    assert taking == wanted
