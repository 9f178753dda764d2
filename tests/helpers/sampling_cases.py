"""Sampling parameters for the kernel tests of `mtpc::sample` and related operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mtpc.engine.sampling_rows import pack_bits
from mtpc.sampling_params import FLOATS, INTS

SLOTS, STOPS, BIASES = 7, 3, 5
NEUTRAL = dict.fromkeys((*FLOATS, *INTS), 0) | {"top_p": 1, "repetition_penalty": 1, "logprobs": -1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "flat": {"temperature": 100.0},
    "cold": {"temperature": 0.01},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of all": {"temperature": 1.0, "top_k": 2**31 - 1},
    "top_1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_p near 1": {"temperature": 2.0, "top_p": 0.999999},
    "top_p near 0": {"temperature": 1.0, "top_p": 1e-9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "filters": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "masked": {"temperature": 1.0, "masked": 1},
    "greedy masked": {"masked": 1},
    "penalised": {"temperature": 1.0, "penalised": 1, "repetition_penalty": 1.4,
                  "presence_penalty": 0.5, "frequency_penalty": -0.3},
    "greedy penalised": {"penalised": 1, "frequency_penalty": 1.5},
    "early": {"temperature": 1.0, "first_stop": 10**6},
    "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "masked": 1,
            "penalised": 1, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "first_stop": 500},
}  # fmt: skip


@dataclasses.dataclass
class Rows:
    """Arguments of `sample` after state_slots, in order; row 0 and unread rows are garbage."""

    floats: Tensor
    ints: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    allowed: Tensor
    prompt: Tensor
    counts: Tensor
    stops: Tensor

    def tuple(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def make_rows(case: dict[str, Any], vocab: int, biased: bool, seed: int) -> Rows:
    gen = torch.Generator().manual_seed(seed)
    values = NEUTRAL | case
    floats = torch.tensor([[float(values[n]) for n in FLOATS]] * SLOTS, dtype=torch.float64)
    ints = torch.tensor([[int(values[n]) for n in INTS]] * SLOTS)
    ints[:, 0] = torch.randint(0, 2**62, (SLOTS,), generator=gen)
    bias_ids = torch.full((SLOTS, BIASES), -1)
    if biased:
        bias_ids[:, :3] = torch.stack([torch.randperm(vocab, generator=gen)[:3]] * SLOTS)
    some = [torch.randperm(vocab, generator=gen)[: max(2, vocab // 3)].tolist() for _ in range(2)]
    rows = Rows(
        floats,
        ints,
        bias_ids,
        torch.randn(SLOTS, BIASES, generator=gen, dtype=torch.float64) * 3,
        pack_bits(some[0], vocab).repeat(SLOTS, 1),
        pack_bits(some[1], vocab).repeat(SLOTS, 1),
        torch.randint(0, 3, (SLOTS, vocab), generator=gen, dtype=torch.int32),
        torch.tensor([[some[0][0], -1, vocab + 5]] * SLOTS),
    )
    _vary(rows, vocab)
    rows.floats[0], rows.ints[0], rows.bias_ids[0] = float("nan"), 2**60, 2**60
    return rows


def _vary(rows: Rows, vocab: int) -> None:
    """Make all request slots different, so that a wrong row is detected."""
    by_name = {name: rows.ints[:, i] for i, name in enumerate(INTS)}
    by_name |= {name: rows.floats[:, i] for i, name in enumerate(FLOATS)}
    for slot in range(SLOTS):
        for name in ("temperature", "repetition_penalty", "frequency_penalty"):
            by_name[name][slot] *= 1 + slot / 16
        if 1 < by_name["top_k"][slot] < vocab:
            by_name["top_k"][slot] += slot
        if by_name["top_p"][slot] < 0.99:
            by_name["top_p"][slot] *= 1 - slot / 64
        by_name["first_stop"][slot] //= 1 + slot % 2
        for per_slot in (rows.bias_ids, rows.stops):
            used = (per_slot[slot] >= 0) & (per_slot[slot] < vocab)
            per_slot[slot] = torch.where(used, (per_slot[slot] + slot) % vocab, per_slot[slot])
        for words in (rows.allowed, rows.prompt):
            words[slot] = words[slot].roll(slot)


def call(ops: Any, logits: Tensor, rows: Rows, seed: int, mask: Tensor | None = None) -> Tensor:
    """A call with three requests, the second off, with as many rows each as fit."""
    gen = torch.Generator().manual_seed(seed)
    count, vocab = logits.shape
    ids = torch.randint(0, vocab, (count,), generator=gen)
    positions = torch.randint(0, 1000, (count,), generator=gen)
    return ops.sample(logits, ids, positions, torch.tensor([4, 0, 6]), *rows.tuple(), mask)


def check_places(ours: Any, dtype: torch.dtype) -> None:
    """Logits that lie elsewhere, with NaN in between: the choices and reports are the same."""
    vocab, gen = 1030, torch.Generator().manual_seed(3)
    logits, places = make_logits(12, vocab, dtype, 5), torch.randperm(17, generator=gen)[:12]
    apart = torch.full((17, vocab), float("nan"), dtype=dtype)
    apart[places] = logits
    ids, positions = torch.arange(12), torch.arange(12) + 40
    positions[2], slots = -1, torch.tensor([4, 0, 6])
    used = torch.where((positions >= 0) & (slots.repeat_interleave(4) != 0), places, 2**40)
    for case in CASES.values():
        given = (ids, positions, slots, *make_rows(case, vocab, True, 3).tuple(), None)
        found = ours.sample(apart, *given, used)
        assert torch.equal(found, torch.ops.mtpc.sample(logits, *given))
    ints, emitted = make_rows({"logprobs": 2}, vocab, False, 0).ints, torch.tensor([4, 4, 2]).int()
    results = []
    for ops, rows in ((ours, (apart, places)), (torch.ops.mtpc, (logits, None))):
        reports = (torch.zeros(3, 4).double(), torch.zeros(3, 4, 2).long())
        reports = (*reports, torch.zeros(3, 4, 2).double())
        ops.write_logprobs(*reports, rows[0], ids.view(3, 4), emitted, slots, ints, rows[1])
        results.append(reports)
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert wanted[0].any()


def make_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=gen, dtype=torch.float64) * 3).to(dtype)


def compare_records(ours: Any, width: int = 3, dtype: torch.dtype = torch.float32) -> None:
    """Compare counts and reports of `ours` with the reference, for up to `width` emitted tokens."""
    vocab = 333  # More than a block of logits.
    logits = make_logits(4 * width, vocab, dtype, 5)
    ids = torch.randint(0, vocab, (4, width), generator=torch.Generator().manual_seed(1))
    ids[2] = ids[2, 0]
    few = max(width - 1, 1)
    emitted, slots = torch.tensor([width, 2, few, 0]).int(), torch.tensor([3, 0, 5, 1])
    ints = make_rows({}, vocab, False, 0).ints
    ints[3, INTS.index("logprobs")], ints[5, INTS.index("logprobs")] = 4, 0
    results = []
    for ops in (ours, torch.ops.mtpc):
        counts = torch.arange(SLOTS * vocab, dtype=torch.int32).view(SLOTS, vocab)
        ops.count_tokens(counts, ids, emitted, slots)
        reports = (
            torch.full((4, 5), 7.0, dtype=torch.float64),
            torch.full((4, 5, 4), 7),
            torch.full((4, 5, 4), 7.0, dtype=torch.float64),
        )
        ops.write_logprobs(*reports, logits, ids, emitted, slots, ints)
        results.append((counts, *reports))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    counts, own, top_ids, top = results[0]
    assert int(counts.sum()) - sum(range(SLOTS * vocab)) == width + few
    expected = logits.double().log_softmax(-1).view(4, width, vocab)
    torch.testing.assert_close(own[0, :width], expected[0].gather(1, ids[0, :, None])[:, 0])
    torch.testing.assert_close(top[2, few - 1], expected[2, few - 1].topk(4).values)
    assert top_ids[2, few - 1].tolist() == expected[2, few - 1].topk(4).indices.tolist()
    assert (own[0, width:] == 7).all(), "rows that emitted nothing are left as they were"
    assert (own[2, few:] == 7).all()
    assert (own[[1, 3]] == 7).all(), "nor are requests that are off, or that asked for nothing"
