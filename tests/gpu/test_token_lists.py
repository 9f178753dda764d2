"""The kernel of aiter's lists, in Triton's interpreter (`tests/run_triton.sh`): what it lists, and
that it leaves alone what no context reaches."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.aiter.token_lists import BEHIND, list_on_gpu, token_lists
from mtpc.backends.triton_kernels import token_lists as kernel
from mtpc.backends.triton_kernels.launch import run
from mtpc.backends.triton_kernels.token_lists import list_plan

pytestmark = pytest.mark.triton
POISON, WILD = -7, 123_457
"""What no list has: in memory that is left alone, and as a page that no context reaches."""


def _table(lens: list[int], page: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Pages in random order; entries that no context reaches are wild."""
    gen = torch.Generator().manual_seed(sum(lens) + page)
    pages = 1 + torch.randperm(len(lens) * blocks, generator=gen).view(len(lens), blocks)
    used = torch.arange(blocks)[None] * page < torch.tensor(lens)[:, None]
    table = torch.where(used, pages, WILD).int()
    return table, torch.tensor(lens, dtype=torch.int32)


def _listed(lens: list[int], page: int, blocks: int, behind: int) -> tuple[Tensor, ...]:
    """Starts and rows by the kernel, on poisoned memory; and by the reference."""
    table, seq_lens = _table(lens, page, blocks)
    launch, (starts, rows) = list_plan(table, seq_lens, page, behind)
    starts.fill_(POISON)
    rows.fill_(POISON)
    run([launch])
    return starts, rows, *token_lists(table, seq_lens, page)


@pytest.mark.parametrize(
    ("lens", "page"),
    [
        ([15, 16, 17, 32], 16),  # Edges of pages.
        ([1, 64, 63, 2, 40], 1),
        ([0, 5, 0, 0, 31, 0], 16),  # Requests that are off, the first and the last ones, too.
        ([0, 0], 64),
        ([1023, 1024, 1025, 2049], 64),  # Edges of a program's blocks.
        ([2176], 64),  # A table without an entry to spare.
        ([9999, 3], 64),  # A length beyond the table.
        ([3, 9999], 16),
        ([*range(33)], 4),  # More requests than a vector of 32 holds.
    ],
)
def test_lists_are_those_of_the_reference(lens: list[int], page: int) -> None:
    """And behind them, zeros as far as assembly may look; then what was there before."""
    blocks, behind = 2176 // page, 700
    starts, rows, wanted_starts, wanted = _listed(lens, page, blocks, behind)
    assert torch.equal(starts, wanted_starts)
    end = int(starts[-1])
    assert torch.equal(rows[: end + behind], wanted[: end + behind])
    assert rows[end:][:behind].eq(0).all()
    assert rows[end + behind :].eq(POISON).all()
    assert len(rows) == len(lens) * blocks * page + behind


@pytest.mark.parametrize("programs", [1, 5, 4096])
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid follows from the table alone, and few programs list long contexts."""
    monkeypatch.setattr(kernel, "_PROGRAMS", programs)
    table, seq_lens = _table([4000, 0, 17], 16, 256)
    launch, _ = list_plan(table, seq_lens, 16, BEHIND)
    assert launch.grid == (3, min(4, -(-programs // 3)), 1)
    starts, rows, wanted_starts, wanted = _listed([4000, 0, 17], 16, 256, BEHIND)
    assert torch.equal(starts, wanted_starts)
    assert torch.equal(rows[: 4018 + BEHIND], wanted[: 4018 + BEHIND])


def test_work_follows_the_context() -> None:
    """One token of 2,176 each: the kernel writes their rows and what follows, and nothing else."""
    _, rows, _, _ = _listed([1] * 8, 16, 136, 100)
    assert int(rows.ne(POISON).sum()) == 8 + 100


def test_gpus_run_the_kernel() -> None:
    """What the operator calls for their tensors, on the CPU's."""
    given = _table([40, 0, 16, 7], 16, 3)
    starts, rows = list_on_gpu(*given, 16)
    wanted_starts, wanted = token_lists(*given, 16)
    assert torch.equal(starts, wanted_starts)
    assert torch.equal(rows[: 64 + BEHIND], wanted[: 64 + BEHIND])
    assert rows.shape == wanted.shape
    name = "mtpc_aiter::token_lists"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
