"""The choice of DeepSeek-V3.2's indexer: reference and kernel against the definition."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.batches import DTYPES, Batch, make_batch
from helpers.compiled import run_on
from helpers.index_batches import LENGTHS, batch, choose, plainly, weights_of

from mtpc.backends.cpu_kernels import load_kernels

load_kernels()
OURS = torch.ops.mtpc_cpu
REFERENCE = torch.ops.mtpc


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 6, 33, 290, 5000])
@pytest.mark.parametrize("ops", [OURS, REFERENCE], ids=["kernel", "reference"])
def test_the_best_are_chosen(ops: object, count: int, dtype: torch.dtype) -> None:
    """Ragged rows, off requests, NaN in what nobody sees: the positions of highest score."""
    of = batch(LENGTHS, dtype)
    found = choose(ops, of, count)
    assert found.dtype == torch.int32
    assert found.shape == (of.q.shape[0], min(count, of.table.shape[1] * of.k.shape[1]))
    for row, seen, must, may in zip(found.tolist(), *plainly(of, count), strict=True):
        chosen = [slot for slot in row if slot >= 0]
        assert row == chosen + [-1] * (len(row) - len(chosen))
        assert len(set(chosen)) == len(chosen) == min(count, len(seen))
        assert must <= set(chosen) <= may


@pytest.mark.parametrize("seq", [15, 16, 17, 255, 256, 257, 513])
@pytest.mark.parametrize("count", [8, 256])
def test_edges_of_pages_and_splits(seq: int, count: int) -> None:
    """Some of 32 heads score each key, so no two are equal: both choose the same, in order."""
    of = make_batch([(seq, min(seq, 4)), (seq, 1)], heads=(32, 1), dims=(12, 1))
    assert torch.equal(choose(OURS, of, count), choose(REFERENCE, of, count))


def test_positions_ascend() -> None:
    of = batch([(300, 3)])
    order = {slot: p for p, slot in enumerate(_slots(of, 0))}
    for row in choose(OURS, of, 40).tolist():
        places = [order[slot] for slot in row]
        assert places == sorted(places)


def _slots(of: Batch, request: int) -> list[int]:
    place = of.k.shape[1]
    table = of.table[request].tolist()
    return [table[p // place] * place + p % place for p in range(int(of.seq_lens[request]))]


def test_of_equal_scores_the_kernel_chooses_the_earlier_positions() -> None:
    """All keys alike: no order of rows or threads decides."""
    of = batch([(300, 2), (40, 1)])
    of.k.fill_(0.5)
    wanted = [_slots(of, 0)[:7], _slots(of, 0)[:7], _slots(of, 1)[:7]]
    assert choose(OURS, of, 7).tolist() == wanted


def test_a_visible_nan_is_not_hidden() -> None:
    """A broken key is attended to, and so reaches the logits."""
    of = batch([(300, 1)])
    slot = _slots(of, 0)[123]
    of.k.view(-1, 12)[slot, 3] = float("nan")
    assert slot in choose(OURS, of, 5)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_does_not_depend_on_threads_batch_or_rows(dtype: torch.dtype) -> None:
    lengths = [(700, 4), (0, 2), (1100, 20), (5, 3)]
    of = make_batch(lengths, dtype=dtype, heads=(64, 1), dims=(128, 1))
    with run_on(1):
        alone = choose(OURS, of, 200)
    with run_on(2):
        assert torch.equal(choose(OURS, of, 200), alone)
    for request, (seq, rows) in enumerate(lengths):
        end = int(of.starts[request + 1])
        width = of.table.shape[1] * of.k.shape[1]
        assert width > 200
        for last in {1, rows} if seq else ():
            single = choose(OURS, of.only(request, last), 200)
            assert torch.equal(single, alone[end - last : end])


def test_any_strides_and_dtypes() -> None:
    of = batch(LENGTHS)
    expected = choose(OURS, of, 20)
    turned = of.q.transpose(0, 2).contiguous().transpose(0, 2)
    apart = torch.stack([of.k, of.k], -1).flatten(-2)[..., ::2]
    wide = replace(of, q=turned, k=apart, table=of.table.long(), starts=of.starts.long())
    assert torch.equal(choose(OURS, wide, 20), expected)
    assert torch.equal(choose(OURS, replace(of, q=of.q.double()), 20), expected)
    assert torch.equal(choose(OURS, replace(of, k=of.k.to(torch.bfloat16)), 20), expected)


def test_rows_of_no_request_choose_nothing() -> None:
    of = batch([(37, 4), (0, 2)], spare_rows=3)
    for ops in (OURS, REFERENCE):
        found = choose(ops, of, 6)
        assert bool((found[:4] >= 0).all())
        assert bool((found[4:] == -1).all())


def test_schema_and_fake_hold() -> None:
    of = batch(LENGTHS)
    indices = (of.table.clamp(max=0), of.seq_lens, of.starts)
    arguments = (of.q, weights_of(of.q), of.k[:, :, 0].nan_to_num(), *indices, 6)
    for ops in (OURS, REFERENCE):
        torch.library.opcheck(
            ops.choose_slots.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 5, 8)}, r"expected query \[T, H, D\], index_cache \[N, P, D\]"),
        ({"weights": torch.zeros(2, 4)}, r"expected weights \[T, H\]"),
        ({"count": 0}, "count >= 1"),
    ],
)
def test_misfits_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 5, 12),
        "weights": torch.zeros(2, 5),
        "index_cache": torch.zeros(3, 4, 12),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([2], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
        "count": 2,
    }
    OURS.choose_slots(**arguments)
    with pytest.raises(RuntimeError, match=message):
        OURS.choose_slots(**{**arguments, **change})


@pytest.mark.parametrize(
    ("forbidden", "status"), [("the rest", 0), ("a live row", -signal.SIGSEGV)]
)
def test_only_what_rows_see_and_choose_is_read(forbidden: str, status: int) -> None:
    """Keys by page (DeepSeek-V3.2, GLM-5) and by request slot (DeepSeek-V4), and chosen latents:
    no other memory of the caches may be read, however long `max_len`. A process that does dies."""
    command = [sys.executable, "-c", _GUARDED, forbidden]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == status


_GUARDED = """
import sys, torch
from helpers.guarded import guarded
from mtpc.backends.cpu_kernels import load_kernels
load_kernels()
OURS = torch.ops.mtpc_cpu
torch.manual_seed(0)

def cache(shape, live):
    return guarded(shape, live, spared=sys.argv[1] != "a live row")

ints = lambda *values: torch.tensor(values, dtype=torch.int32)
query, weights = torch.randn(4, 8, 1024), torch.rand(4, 8)

# Pages of four keys: request 0 has rows 0 and 1 and 10 tokens, request 1 rows 2 and 3 and 7.
table, place = torch.tensor([[3, 1, 6, 0, 0], [2, 5, 0, 0, 0]], dtype=torch.int32), 4
live = [int(table[r, p // place]) * place + p % place for r, n in ((0, 10), (1, 7))
        for p in range(n)]
values, keys = cache((8, place, 1024), live)
arguments = table, ints(10, 7), ints(0, 2, 4), 5
chosen = OURS.choose_slots(query, weights, keys, *arguments)
assert torch.equal(chosen, torch.ops.mtpc.choose_slots(query, weights, values, *arguments))

# Latents of the chosen slots alone: each row is a request of one row, in pages of one token.
values, latents = cache((32, 1, 1024), sorted(set(chosen.flatten().tolist()) - {-1}))
arguments = chosen, (chosen >= 0).sum(1, dtype=torch.int32), ints(0, 1, 2, 3, 4), 1024**-0.5, 960
found = OURS.latent_attention(query, latents, *arguments)
torch.testing.assert_close(found, torch.ops.mtpc.latent_attention(query, values, *arguments))

# Sixteen entries by request slot, of which rows see 9, 10, 0 and 3.
live = [1 * 16 + e for e in range(10)] + [3 * 16 + e for e in range(3)]
values, keys = cache((4, 16, 1024), live)
arguments = ints(1, 1, 0, 3)[:, None], ints(9, 10, 0, 3), ints(0, 1, 2, 3, 4), 5
found = OURS.choose_slots(query, weights, keys, *arguments)
assert torch.equal(found, torch.ops.mtpc.choose_slots(query, weights, values, *arguments))
assert (found >= 0).sum(1).tolist() == [5, 5, 0, 3]
"""
