"""The choice of DeepSeek-V3.2's indexer: reference and kernel against the definition."""

from __future__ import annotations

from dataclasses import replace

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
