"""The Triton kernels of the indexer, in Triton's interpreter: `tests/run_triton.sh`."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from helpers.batches import make_batch
from helpers.index_batches import LENGTHS, batch, choose, plainly
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import load_kernels
from mtpc.backends.triton_kernels.launch import run
from mtpc.backends.triton_kernels.plans import plan

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 6, 33, 290, 5000])
def test_the_best_are_chosen(count: int, dtype: torch.dtype) -> None:
    """Rows of K = 0 to 4, off requests, NaN in what nobody sees or asked for, equal scores."""
    of = batch(LENGTHS, dtype, spare_rows=2).poisoned()
    found = choose(OURS, of, count)
    assert found.dtype == torch.int32
    assert found[-2:].eq(-1).all()
    for row, seen, must, may in zip(found[:-2].tolist(), *plainly(of, count), strict=True):
        chosen = [slot for slot in row if slot >= 0]
        assert row == chosen + [-1] * (len(row) - len(chosen))
        assert len(set(chosen)) == len(chosen) == min(count, len(seen))
        assert must <= set(chosen) <= may


@pytest.mark.parametrize("seq", [15, 16, 17, 63, 64, 65, 1023, 1024, 1025])
@pytest.mark.parametrize("count", [8, 256])
def test_edges_of_pages_and_blocks(seq: int, count: int) -> None:
    """No two scores are equal: kernels and reference choose the same, in the same order."""
    of = make_batch([(seq, min(seq, 3)), (seq, 1)], heads=(32, 1), dims=(12, 1))
    assert torch.equal(choose(OURS, of, count), choose(REFERENCE, of, count))


@pytest.mark.parametrize("beyond", [0, 3, 40])
@pytest.mark.parametrize("count", [5, 100])
def test_tables_without_an_entry_to_spare(count: int, beyond: int) -> None:
    """Every entry is in use; a length beyond them all has no more positions than they have."""
    sizes = dict(heads=(32, 1), dims=(12, 1))
    of = make_batch([(16, 4), (3, 2), (16, 1)], page_size=4, spare_pages=0, **sizes)
    of.seq_lens[[0, 2]] += beyond
    assert torch.equal(choose(OURS, of, count), choose(REFERENCE, of, count))


def test_a_wide_table() -> None:
    """2,048 entries, of which one request uses all."""
    sizes = dict(heads=(32, 1), dims=(12, 1))
    of = make_batch([(2048, 2), (5, 1)], page_size=1, spare_pages=0, **sizes)
    assert torch.equal(choose(OURS, of, 300), choose(REFERENCE, of, 300))


def test_scores_of_all_signs_and_sizes() -> None:
    """Every digit of a score decides: 2^-40 to 2^40, and negative ones, zero and infinity."""
    of = make_batch([(900, 1)], heads=(2, 1), dims=(4, 1))
    of.q[:] = torch.eye(2, 4)  # The first head scores by the first number, the second against it.
    values = torch.randn(900).exp2() * 2.0 ** torch.randint(-40, 41, (900,))
    keys = of.k.flatten(0, 2)
    slots = [int(of.table[0, p // 16]) * 16 + p % 16 for p in range(900)]
    keys[slots] = 0
    keys[slots[::2], 0], keys[slots[1::2], 1] = values[::2], values[1::2]
    keys[slots[5], 1], keys[slots[6], 0] = float("inf"), float("inf")
    weights = torch.tensor([[1.0, -1.0]])
    for count in (1, 100, 449, 450, 451, 899):
        found, expected = (
            ops.choose_slots(of.q, weights, of.k[:, :, 0], of.table, of.seq_lens, of.starts, count)
            for ops in (OURS, REFERENCE)
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", [1, 9, 10, 11, 12, 21, 22, 23, 32])
def test_the_last_bits_of_a_score_decide(bits: int) -> None:
    """Scores that differ in their last bits alone, where digits of 11 bits meet."""
    of = make_batch([(700, 1)], heads=(2, 1), dims=(4, 1))
    given = (of.q, torch.ones(1, 2), of.k[:, :, 0], of.table, of.seq_lens, of.starts)
    generator = torch.Generator().manual_seed(bits)
    scores = torch.randint(2**bits, (700,), generator=generator)
    for count in (1, 350, 699):
        (_, choice), out = plan("choose_slots", *given, count)
        choice.arguments["scores_ptr"][0, :700] = (scores + 5 * 2**bits * (bits < 29)).int()
        run([choice])
        best = scores.sort(descending=True, stable=True).indices[:count].sort().values
        slots = of.table[0][best // 16] * 16 + best % 16
        assert torch.equal(out[0, :count].long(), slots.long())


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_few_programs_score_all_positions(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And write every entry of every row: nothing fills the results before."""
    module = sys.modules["mtpc.backends.triton_kernels.ops.choose_slots"]
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    of = make_batch([(1000, 1), (0, 1), (64, 1)], heads=(32, 1), dims=(12, 1), spare_rows=2)
    given = (of.q, torch.ones(5, 32), of.k[:, :, 0], of.table, of.seq_lens, of.starts, 100)
    launches, out = plan("choose_slots", *given)
    assert launches[0].grid[1] == -(-programs // 5)
    out.fill_(7)
    run(launches)
    assert torch.equal(out, REFERENCE.choose_slots(*given))
    assert out[1].eq(-1).all()
    assert out[3:].eq(-1).all()


def test_of_equal_scores_the_earlier_positions_are_chosen() -> None:
    of = batch([(300, 2), (40, 1)])
    of.k.fill_(0.5)
    found = choose(OURS, of, 7)
    table = of.table.tolist()
    for row, request in zip(found.tolist(), (0, 0, 1), strict=True):
        place = of.k.shape[1]
        assert row == [table[request][p // place] * place + p % place for p in range(7)]


def test_a_visible_nan_is_not_hidden() -> None:
    of = batch([(300, 1)])
    slot = int(of.table[0, 123 // of.k.shape[1]]) * of.k.shape[1] + 123 % of.k.shape[1]
    of.k.view(-1, 12)[slot, 3] = float("nan")
    assert slot in choose(OURS, of, 5)[0].tolist()


def test_rows_of_no_request_choose_nothing_and_wild_pages_harm_nobody() -> None:
    of = batch([(37, 4), (0, 2)], spare_rows=3)
    found = choose(OURS, of, 6)
    assert bool((found[:4] >= 0).all())
    assert bool((found[4:] == -1).all())
    wild = replace(of, table=torch.full_like(of.table, 2**30))
    assert bool((choose(OURS, wild, 6)[:4] < of.k.shape[0] * of.k.shape[1]).all())
