"""The Triton kernels that choose tokens and keep what was chosen, in Triton's interpreter.

`tests/run_triton.sh` runs them.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers.sampling_cases import (
    CASES,
    call,
    check_places,
    compare_records,
    make_logits,
    make_rows,
)
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import load_kernels
from mtpc.backends.triton_kernels.launch import run
from mtpc.backends.triton_kernels.plans import plan
from mtpc.engine.sampling_rows import pack_bits
from mtpc.errors import BackendError
from mtpc.sampling_params import FLOATS, INTS

pytestmark = pytest.mark.triton

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_triton, torch.ops.mtpc
VOCABS = (5003, 1030, 97, 32, 5)
"""Around words, pairs, blocks of 1,024 and chunks of 2,048."""


OTHERS = (torch.float64, torch.bfloat16, torch.float16)
"""Logits of these dtypes are only read in another way: the fast part has what reads and writes most
of them, and the greedy choice."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CASES),
        *(
            pytest.param(name, dtype, marks=[pytest.mark.slow] * (name not in ("greedy", "all")))
            for name in CASES
            for dtype in OTHERS
        ),
    ],
)
def test_sample_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """The very tokens, ties at edges and requests that are off included; K = 0 to 4."""
    for seed, vocab in enumerate(VOCABS):
        width = 1 + seed
        rows = make_rows(CASES[name], vocab, seed % 2 == 0, seed)
        logits = make_logits(3 * width, vocab, dtype, seed)
        found, wanted = (call(ops, logits, rows, seed) for ops in (OURS, REFERENCE))
        assert found.tolist() == wanted.tolist()
        assert found[width : 2 * width].tolist() == [-1] * width
        assert (found[:width] >= 0).all()


@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_its_own_for_each_row(name: str) -> None:
    vocab = 70
    rows, logits = make_rows(CASES[name], vocab, True, 1), make_logits(6, vocab, torch.float32, 1)
    gen = torch.Generator().manual_seed(2)
    allowed = [torch.randperm(vocab, generator=gen)[:40].tolist() for _ in range(5)]
    mask = torch.stack([*(pack_bits(ids, vocab) for ids in allowed), pack_bits([], vocab)])
    found = call(OURS, logits, rows, 1, mask)
    assert torch.equal(found, call(REFERENCE, logits, rows, 1, mask))
    assert int(found[5]) == -1, "nothing is allowed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_nothing(bad: float) -> None:
    for name, vocab in itertools.product(("greedy", "sampled", "all"), (20, 1100)):
        rows = make_rows(CASES[name], vocab, False, 0)
        logits = make_logits(6, vocab, torch.float32, 0)
        logits[1, vocab - 3], logits[4] = bad, -float("inf")
        found = call(OURS, logits, rows, 0)
        assert torch.equal(found, call(REFERENCE, logits, rows, 0))
        assert int(found[1]) == int(found[4]) == -1
        assert int(found[0]) >= 0


@pytest.mark.parametrize("case", [{"top_k": 3}, {"top_p": 0.75}, {"top_k": 9, "top_p": 0.4}])
def test_edges_among_equal_and_extreme_logits(case: dict[str, float]) -> None:
    """Zeros of both signs, numbers one unit apart, minus infinity, and all of them many times."""
    values = torch.tensor([0.0, -0.0, 1.0, 1.0 + 2**-23, -1e30, 1e-45, -float("inf"), 0.5])
    for seed in range(4):
        gen = torch.Generator().manual_seed(seed)
        logits = values[torch.randint(0, len(values), (6, 40), generator=gen)]
        rows = make_rows({"temperature": 1.0, **case}, 40, False, seed)
        found, wanted = (call(ops, logits, rows, seed) for ops in (OURS, REFERENCE))
        assert found.tolist() == wanted.tolist()


MANY = (
    {"top_p": 0.5},
    {"top_k": 12_000},
    {"top_k": 12_000, "top_p": 0.9, "min_p": 0.2},
    {"top_p": 0.9, "min_p": 0.8},
)


@pytest.mark.parametrize(
    ("case", "spread"),
    [
        pytest.param(case, spread, marks=[pytest.mark.slow] * (spread != 0.01 and len(case) < 3))
        for case in MANY
        for spread in (0.01, 0.5, 6.0)
    ],
)
def test_edges_among_many_logits(case: dict[str, float], spread: float) -> None:
    """Near one another, so that all are in one bin and more than are put side by side; in some
    bins; and far apart, so that the last bin holds most."""
    logits = make_logits(3, 20_000, torch.float32, 7) / 3 * spread
    rows = make_rows({"temperature": 1.0, **case}, 20_000, False, 7)
    found, wanted = (call(ops, logits, rows, 7) for ops in (OURS, REFERENCE))
    assert found.tolist() == wanted.tolist()


def test_rows_that_choose_nothing_are_skipped() -> None:
    rows, logits = make_rows(CASES["all"], 40, False, 0), make_logits(2, 40, torch.float32, 0)
    ids, positions = torch.zeros(2, dtype=torch.int64), torch.tensor([-1, 5])
    found = OURS.sample(logits, ids, positions, torch.tensor([4]), *rows.tuple())
    assert int(found[0]) == -1
    assert int(found[1]) >= 0


def test_a_row_depends_on_no_other() -> None:
    rows, logits = (
        make_rows(CASES["filters"], 5000, True, 3),
        make_logits(6, 5000, torch.float32, 3),
    )
    ids, positions = torch.arange(6), torch.arange(6) + 40
    whole = OURS.sample(logits, ids, positions, torch.tensor([4, 2, 6]), *rows.tuple())
    for row in range(6):
        one, slot = slice(row, row + 1), torch.tensor([(4, 2, 6)[row // 2]])
        alone = OURS.sample(logits[one], ids[one], positions[one], slot, *rows.tuple())
        assert alone.tolist() == whole[one].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", range(1, 6))
def test_counts_and_reports_equal_the_reference(width: int, dtype: torch.dtype) -> None:
    compare_records(OURS, width, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_read_by_place(dtype: torch.dtype) -> None:
    check_places(OURS, dtype)


def test_the_most_probable_of_many_equals() -> None:
    """Over chunks of the vocabulary; of equals the first, and minus infinity where all else is
    taken."""
    gen = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (2, 5000), generator=gen).float()
    logits[1] = float("-inf")
    logits[1, 4500:4503] = torch.tensor([1.0, 2.0, 1.0])
    ints = make_rows({"logprobs": 6}, 8, False, 0).ints
    results = []
    for ops in (OURS, REFERENCE):
        reports = (
            torch.zeros(1, 2, dtype=torch.float64),
            torch.zeros(1, 2, 6, dtype=torch.int64),
            torch.zeros(1, 2, 6, dtype=torch.float64),
        )
        ids, emitted = torch.tensor([[7, 4501]]), torch.tensor([2], dtype=torch.int32)
        ops.write_logprobs(*reports, logits, ids, emitted, torch.tensor([4]), ints)
        results.append(reports)
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_misfits_are_refused() -> None:
    """A kernel would read what is not there."""
    rows, logits = make_rows(CASES["all"], 40, True, 0), make_logits(6, 40, torch.float32, 0)
    changes: list[dict[str, torch.Tensor]] = [
        {"floats": rows.floats.float()},
        {"ints": rows.ints[:, :-1]},
        {"counts": rows.counts[:, :-1]},
        {"allowed": rows.allowed.long()},
    ]
    for change in changes:
        with pytest.raises(BackendError, match="expected"):
            call(OURS, logits, dataclasses.replace(rows, **change), 0)
    with pytest.raises(BackendError, match="token_mask"):
        call(OURS, logits, rows, 0, torch.zeros(6, 1, dtype=torch.int32))
    with pytest.raises(BackendError, match="4 rows for 3 requests"):
        call(OURS, logits[:4], rows, 0)


def test_a_mask_that_begins_anywhere_is_the_same() -> None:
    """A step's part of the masks for drafts, where a word more or less lies before it."""
    rows, logits = make_rows(CASES["sampled"], 40, False, 0), make_logits(6, 40, torch.float32, 0)
    masks = torch.stack([pack_bits([3, 9, 31], 40), pack_bits([5, 38], 40)] * 8).flatten()
    for begin in (0, 2, 4):
        mask = masks[begin : begin + 12].view(6, 2)
        assert torch.equal(
            call(OURS, logits, rows, 0, mask), call(REFERENCE, logits, rows, 0, mask)
        )


@pytest.mark.parametrize("spread", [0.3, 3.0, 9.0])
@pytest.mark.parametrize("case", [{}, {"min_p": 0.3}, {"top_k": 700}])
def test_bins_hold_the_edge_and_little_else(case: dict[str, float], spread: float) -> None:
    """Counts are exact, as are the masses of all, of the last bin and of what is above the bins;
    there are few bins."""
    vocab = 5003
    logits = make_logits(3, vocab, torch.float64, 1) / 3 * spread
    rows = make_rows({"temperature": 1.0, "top_p": 0.93} | case, vocab, False, 1)
    where = (torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.tensor([4, 2, 6]))
    launches = plan("sample", logits, *where, *rows.tuple(), None)[0]
    run(launches)
    by_name = {name: value for launch in launches for name, value in launch.arguments.items()}
    for row, slot in enumerate((4, 2, 6)):
        x = by_name["scores_ptr"][row]
        far = ((x.max() - x) * 8).clamp(max=127).long()
        counts = by_name["counts_ptr"][row].sum(0)
        assert torch.equal(counts, far.bincount(minlength=128).int())
        first, last, inside = by_name["bins_ptr"][row].tolist()
        assert inside == int(((far >= first) & (far <= last)).sum())
        near = by_name["near_ptr"][row, :inside]
        assert torch.equal(near, x[(far >= first) & (far <= last)])
        number = dict(zip((*FLOATS, *INTS), (*rows.floats[slot], *rows.ints[slot]), strict=True))
        if number["top_k"] > 0:
            edge = x.topk(int(number["top_k"])).values[-1]
            assert (first, last) == (0, min(127, int((x.max() - edge) * 8)))
            continue
        mass = (x - x.max()).exp().where(x >= x.max() + number["min_p"].log(), 0)
        wanted = [mass.sum(), mass[far == 127].sum(), mass[far < first].sum()]
        masses = [*by_name["masses_ptr"][row].sum(1), by_name["above_ptr"][row].sum()]
        torch.testing.assert_close(torch.stack(masses), torch.stack(wanted), rtol=1e-14, atol=0)
        falling, order = x.sort(descending=True)
        held = mass[order].cumsum(0) >= number["top_p"] * mass.sum()
        edge = int((x.max() - falling[held][0]) * 8)
        assert first <= edge <= last <= first + 3
