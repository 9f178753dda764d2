"""The C++ sampling kernels against the reference ops: the same tokens, counts and reports."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers.compiled import run_on
from helpers.sampling_cases import (
    CASES,
    Rows,
    call,
    check_places,
    compare_records,
    make_logits,
    make_rows,
)

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.engine.sampling_rows import pack_bits

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_sample_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Vocabularies around words, blocks and pairs; ties abound in the 16-bit types."""
    for vocab, seed, biased in itertools.product((5, 32, 97, 1030), range(4), (False, True)):
        rows = make_rows(CASES[name], vocab, biased, seed)
        logits = make_logits(12, vocab, dtype, seed)
        found, wanted = (call(ops, logits, rows, seed) for ops in (OURS, REFERENCE))
        assert found.tolist() == wanted.tolist()
        assert found[4:8].tolist() == [-1] * 4
        assert (found[:4] >= 0).all()


def test_sample_with_a_mask_of_its_own_for_each_row() -> None:
    vocab = 70
    for name, seed in itertools.product(CASES, range(3)):
        rows, logits = (
            make_rows(CASES[name], vocab, True, seed),
            make_logits(6, vocab, torch.float32, 1),
        )
        gen = torch.Generator().manual_seed(seed)
        allowed = [torch.randperm(vocab, generator=gen)[:40].tolist() for _ in range(5)]
        mask = torch.stack([*(pack_bits(ids, vocab) for ids in allowed), pack_bits([], vocab)])
        found = call(OURS, logits, rows, seed, mask)
        assert torch.equal(found, call(REFERENCE, logits, rows, seed, mask))
        assert all(t in ids for t, ids in zip(found[:2].tolist(), allowed, strict=False))
        assert int(found[5]) == -1, "nothing is allowed"
        free = torch.full_like(mask, -1)
        without = call(OURS, logits, rows, seed)
        assert torch.equal(call(OURS, logits, rows, seed, free), without), "all is allowed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_nothing(bad: float) -> None:
    for name, vocab in itertools.product(CASES, (20, 9000)):
        rows, logits = (
            make_rows(CASES[name], vocab, False, 0),
            make_logits(6, vocab, torch.float32, 0),
        )
        logits[1, vocab - 3], logits[4] = bad, -float("inf")
        found = call(OURS, logits, rows, 0)
        assert torch.equal(found, call(REFERENCE, logits, rows, 0))
        assert int(found[1]) == int(found[4]) == -1
        assert int(found[0]) >= 0


def test_sample_does_not_depend_on_threads_batch_or_rows() -> None:
    rows = make_rows(CASES["filters"], 5000, True, 3)
    logits = make_logits(12, 5000, torch.float32, 3)
    ids, positions = torch.arange(12), torch.arange(12) + 40
    whole = OURS.sample(logits, ids, positions, torch.tensor([4, 2, 6]), *rows.tuple())
    with run_on(2):
        again = OURS.sample(logits, ids, positions, torch.tensor([4, 2, 6]), *rows.tuple())
    assert torch.equal(whole, again)
    for row in range(12):
        one = slice(row, row + 1)
        slot = torch.tensor([(4, 2, 6)[row // 4]])
        alone = OURS.sample(logits[one], ids[one], positions[one], slot, *rows.tuple())
        assert alone.tolist() == whole[one].tolist()


def test_counts_and_reports_equal_the_reference() -> None:
    compare_records(OURS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_are_read_by_place(dtype: torch.dtype) -> None:
    check_places(OURS, dtype)


def test_schemas_hold() -> None:
    rows, logits = make_rows(CASES["all"], 40, True, 0), make_logits(6, 40, torch.float32, 0)
    rows = Rows(*(t[1:].clone() for t in rows.tuple()))
    slots, ids = torch.tensor([1, 2]), torch.arange(6)
    checks = ("test_schema", "test_faketensor")
    emitted = torch.tensor([1, 3], dtype=torch.int32)
    reports = (
        torch.zeros(2, 3).double(),
        torch.zeros(2, 3, 2).long(),
        torch.zeros(2, 3, 2).double(),
    )
    samples = {
        "sample": (logits, ids, ids, slots, *rows.tuple()),
        "count_tokens": (rows.counts, ids.view(2, 3), emitted, slots),
        "write_logprobs": (*reports, logits, ids.view(2, 3), emitted, slots, rows.ints),
    }
    for name, arguments in samples.items():
        torch.library.opcheck(getattr(OURS, name).default, arguments, test_utils=checks)


def test_misfits_are_refused() -> None:
    rows, logits = make_rows({}, 40, False, 0), make_logits(6, 40, torch.float32, 0)
    with pytest.raises(RuntimeError, match=r"output_counts \[S, 30\]"):
        call(OURS, logits[:, :30], rows, 0)
    with pytest.raises(RuntimeError, match="floats must be"):
        call(OURS, logits, dataclasses.replace(rows, floats=rows.floats.float()), 0)
    with pytest.raises(RuntimeError, match="a multiple of the 3"):
        call(OURS, logits[:4], rows, 0)
    given = (torch.arange(6), torch.arange(6), torch.tensor([4, 0, 6]), *rows.tuple(), None)
    with pytest.raises(RuntimeError, match="5 rows of logits; expected one for each of 6"):
        OURS.sample(logits[:5], *given)
    with pytest.raises(RuntimeError, match="place 6 of 6 rows of logits"):
        OURS.sample(logits, *given, torch.arange(6) + 1)
