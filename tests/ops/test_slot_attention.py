"""Attention to keys by request slot (DeepSeek-V4): the C++ kernel against the reference, what it
reads, and that a row's bits do not depend on how its text was cut."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from helpers.batches import DTYPES, close
from helpers.compiled import run_on
from helpers.places import TESTS
from helpers.slot_batches import Call, Text, make_call, run_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtpc.backends.cpu_kernels import load_kernels

load_kernels()
OURS = torch.ops.mtpc_cpu
REFERENCE = torch.ops.mtpc
KINDS = ("window", "all", "chosen")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Ragged rows, padding, NaN in what nobody sees; a ring that has come round, one that is empty,
    entries of none to many."""
    call = make_call(kind, dtype)
    found, wanted = call.run(OURS), call.run(REFERENCE)
    assert wanted.isfinite().all()
    assert not found[-2:].any()
    close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "window"),
    [(1, 5, 1), (17, 64, 40), (16, 130, 3), (64, 512, 128), (130, 32, 33), (7, 33, 300)],
)
def test_sizes_that_no_tile_divides(heads: int, dim: int, window: int, dtype: torch.dtype) -> None:
    """More heads than a task has; widths that no register divides, and odd ones; one position."""
    for kind in ("all", "chosen"):
        call = make_call(kind, dtype, heads=heads, dim=dim, window=window)
        call.query.mul_(dim**-0.5)
        close(call.run(OURS), call.run(REFERENCE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "chosen"])
def test_more_keys_than_a_split(kind: str, dtype: torch.dtype) -> None:
    """Windows of 200 and up to 600 entries, in splits of 256 keys."""
    requests = ((700, 3), (250, 2), (55, 1), (56, 1))
    call = make_call(
        kind, dtype, window=200, ratio=1, choices=400, requests=requests, most=600, padding=1
    )
    close(call.run(OURS), call.run(REFERENCE))


def test_a_row_alone_any_strides_and_dtypes() -> None:
    call = make_call("all", padding=0)
    assert call.entries is not None
    assert call.counts is not None
    wanted = call.run(OURS)
    one = replace(
        call, query=call.query[:1], fresh=call.fresh[:1], slots=call.slots[:1],
        sees_ring=call.sees_ring[:1], sees_fresh=call.sees_fresh[:1, :1], counts=call.counts[:1],
    )  # fmt: skip
    assert torch.equal(one.run(OURS), wanted[:1])
    spread = replace(
        call,
        query=call.query.transpose(0, 2).contiguous().transpose(0, 2),
        fresh=torch.stack([call.fresh, call.fresh], 1)[:, 0],
        ring=torch.stack([call.ring, call.ring], 2)[:, :, 0],
        sees_ring=call.sees_ring.t().contiguous().t(),
        sees_fresh=call.sees_fresh.t().contiguous().t(),
        sinks=torch.stack([call.sinks, call.sinks], 1)[:, 1],
        entries=torch.stack([call.entries, call.entries], -1).flatten(-2)[..., ::2],
        slots=call.slots.int(),
        counts=call.counts.int(),
    )
    assert torch.equal(spread.run(OURS), wanted)
    wide = replace(call, query=call.query.double())
    close(wide.run(OURS), wide.run(REFERENCE))
    narrow = make_call("all", torch.bfloat16)
    mixed = replace(narrow, query=narrow.query.float())
    close(mixed.run(OURS), mixed.run(REFERENCE))


def test_no_entries_no_keys_no_rows() -> None:
    """Entries without places, a row that sees the sink alone, and a call without rows."""
    call = make_call("all")
    assert call.entries is not None
    plain = replace(call, entries=None, counts=None)
    none = replace(call, entries=call.entries[:, :0], counts=torch.zeros_like(call.slots))
    assert torch.equal(none.run(OURS), plain.run(OURS))
    blind = replace(plain, sees_fresh=plain.sees_fresh & False, sees_ring=plain.sees_ring & False)
    assert torch.equal(blind.run(OURS), torch.zeros_like(plain.query))
    empty = replace(
        plain, query=plain.query[:0], fresh=plain.fresh[:0], slots=plain.slots[:0],
        sees_ring=plain.sees_ring[:0], sees_fresh=plain.sees_fresh[:0, :0],
    )  # fmt: skip
    assert empty.run(OURS).shape == (0, 6, 20)


def test_sinks_only_take_part_in_the_normalisation() -> None:
    """As large as to leave nothing, and as small as to be none."""
    call = make_call("all")
    none = replace(call, sinks=call.sinks.fill_(-torch.inf).clone()).run(OURS)
    close(none[:-2], call.run(REFERENCE)[:-2])
    assert not none[-2:].any()
    assert none[:-2].abs().amax(-1).min() > 0.05
    call.sinks[2] = 1e4
    found = call.run(OURS)
    assert not found[:, 2].any()
    rest = [head for head in range(6) if head != 2]
    assert torch.equal(found[:, rest], none[:, rest])


def test_nan_reaches_rows_that_see_it() -> None:
    call = make_call("window")
    call.fresh[1] = torch.nan
    found, sees = call.run(OURS), call.sees_fresh[:, 1]
    assert found[sees].isnan().all()
    assert found[~sees].isfinite().all()
    assert 1 < int(sees.sum()) < len(sees)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_rows_bits_do_not_depend_on_how_texts_are_cut(data: st.DataObject) -> None:
    """Decoded a row at a time or in chunks of any size, alone or beside another text, with longer
    rings, on one thread or two: a key counts alike in the ring and among the forward's own."""
    kind = data.draw(st.sampled_from(["all", "chosen"]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    window = data.draw(st.integers(1, 12))
    lengths = data.draw(st.lists(st.integers(1, 45), min_size=1, max_size=2))
    texts = [Text.make(n, n, window, kind, dtype) for n in lengths]
    # All texts hold as many entries as the longest one: they share a tensor.
    most = max(lengths)
    texts = [replace(text, entries=_longer(text.entries, most)) for text in texts]
    wanted = [
        run_texts(OURS, [text], [[1] * n], window)[0]
        for text, n in zip(texts, lengths, strict=True)
    ]
    cuts = [_cut(n, data.draw(st.lists(st.integers(1, 20), max_size=12))) for n in lengths]
    places = window + data.draw(st.integers(0, 3))
    with run_on(data.draw(st.sampled_from([1, 2]))):
        found = run_texts(OURS, texts, cuts, places)
    for mine, alone in zip(found, wanted, strict=True):
        assert torch.equal(mine, alone)


def _longer(entries: Tensor, count: int) -> Tensor:
    return torch.cat([entries, torch.full_like(entries[:1], torch.nan).expand(count, -1)])[:count]


def _cut(length: int, sizes: list[int]) -> list[int]:
    """Sizes of forwards that make up a length; the last takes what is left."""
    ends = [0, *(end for end in accumulate(sizes) if end < length), length]
    return [b - a for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)],
)
def test_long_texts_in_chunks_and_beside_others(dtype: torch.dtype) -> None:
    """Of the released window, with many heads and splits; threads share the heads of a row."""
    sizes = {"heads": 64, "dim": 128}
    texts = [Text.make(seed, 420, 128, "all", dtype, **sizes) for seed in (1, 2)]
    with run_on(2):
        decoded = run_texts(OURS, texts[:1], [[150, *[1] * 8, 262]], 128)[0]
        chunks = run_texts(OURS, texts, [[100, 57, 3, 260], [7, 413]], 131)[0]
    assert torch.equal(decoded, chunks)
    exact = [replace(t, **{n: getattr(t, n).double() for n in _FLOATS}) for t in texts[:1]]
    close(chunks, run_texts(REFERENCE, exact, [[420]], 128)[0].to(dtype))


_FLOATS = ("query", "keys", "entries", "sinks")


def test_a_ring_of_which_all_is_seen() -> None:
    """Its oldest key cannot be told, so the order of sums is the places'."""
    text = Text.make(3, 30, 8, "all", torch.float64)
    found = run_texts(OURS, [text], [[1] * 30], 7)[0]
    close(found, run_texts(REFERENCE, [text], [[30]], 8)[0])


@pytest.mark.parametrize(
    ("forbidden", "status"), [("the rest", 0), ("a live row", -signal.SIGSEGV)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_rows_see_is_read(kind: str, forbidden: str, status: int) -> None:
    """Of the ring, the forward's keys and the entries. A process that reads more dies."""
    command = [sys.executable, "-c", _GUARDED, kind, forbidden]
    assert subprocess.run(command, cwd=TESTS, check=False).returncode == status


_GUARDED = """
import sys, torch
from dataclasses import replace
from helpers.batches import close
from helpers.guarded import WIDTH, guarded
from helpers.slot_batches import make_call
from mtpc.backends.cpu_kernels import load_kernels
load_kernels()
call = make_call(sys.argv[1], dim=WIDTH, heads=2)
call = replace(call, query=call.query / WIDTH**0.5)
plain, protected = {}, {}
for name in ("ring", "fresh", "entries")[: 2 if sys.argv[1] == "window" else 3]:
    rows = getattr(call, name).flatten(0, -2)
    live = rows[:, 0].isfinite().nonzero().flatten().tolist()
    shape, spared = tuple(getattr(call, name).shape), sys.argv[2] != "a live row"
    assert 0 < len(live) < len(rows)
    plain[name], protected[name] = guarded(shape, live, spared)
found = replace(call, **protected).run(torch.ops.mtpc_cpu)
close(found, replace(call, **plain).run(torch.ops.mtpc))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_schema_and_fake_hold(kind: str) -> None:
    call = make_call(kind)
    numbers = {
        name: value.nan_to_num()
        for name in ("fresh", "ring", "entries")
        if (value := getattr(call, name)) is not None
    }
    for ops in (OURS, REFERENCE):
        torch.library.opcheck(
            ops.slot_attention.default,
            _arguments(replace(call, **numbers)),
            test_utils=("test_schema", "test_faketensor"),
        )


def _arguments(call: Call) -> tuple[Any, ...]:
    rows = (call.query, call.fresh, call.ring, call.slots, call.sees_ring, call.sees_fresh)
    return (*rows, call.sinks, 0.3, call.window, call.entries, call.counts, call.chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(15, 120)}, r"expected query \[T, N, D\] of one head or more"),
        ({"query": torch.zeros(15, 0, 20)}, r"expected query \[T, N, D\] of one head or more"),
        ({"ring": torch.zeros(0, 12, 20)}, r"expected ring \[S, places, D\] of one slot or more"),
        ({"fresh": torch.zeros(14, 20)}, r"expected fresh \[T, D\] and ring"),
        ({"ring": torch.zeros(5, 12, 21)}, r"expected fresh \[T, D\] and ring"),
        ({"fresh": torch.zeros(15, 20).half()}, "fresh and ring of one dtype"),
        ({"entries": torch.zeros(5, 40, 20).double()}, "entries and ring of one dtype"),
        ({"entries": torch.zeros(4, 40, 20)}, r"expected entries \[S, E, D\] for ring"),
        ({"slots": torch.zeros(14, dtype=torch.int64)}, r"expected row_slots \[T\]"),
        ({"slots": torch.zeros(15)}, "row_slots must be an int32 or int64 tensor"),
        ({"sees_ring": torch.zeros(15, 12)}, r"expected bool sees_ring \[T, places\]"),
        ({"sees_ring": torch.zeros(15, 11).bool()}, r"expected bool sees_ring \[T, places\]"),
        ({"sees_fresh": torch.zeros(15, 14).bool()}, r"expected bool sees_fresh \[T, T\]"),
        ({"sinks": torch.zeros(5)}, r"expected sinks \[N\] for query"),
        ({"window": 0}, "expected window >= 1"),
        ({"counts": None}, "expected entries with entry_counts, or neither"),
        ({"entries": None, "counts": None}, "expected chosen_entries with entries only"),
        ({"counts": torch.zeros(14, dtype=torch.int64)}, r"expected entry_counts \[T\]"),
        ({"chosen": torch.zeros(15, dtype=torch.int32)}, r"expected chosen_entries \[T, k\]"),
        ({"query": torch.zeros(15, 6, 20, dtype=torch.int32)}, "expected float32, bfloat16"),
        ({"query": torch.zeros(15, 6, 20).bool()}, "expected float32, bfloat16"),
    ],
)
def test_misfits_are_refused(change: dict[str, Any], message: str) -> None:
    call = make_call("chosen")
    assert call.query.shape == (15, 6, 20)
    with pytest.raises(RuntimeError, match=message):
        replace(call, **change).run(OURS)


def test_wild_indices_reach_no_other_memory() -> None:
    """Slots, counts and choices beyond the tensors are taken as the nearest ones."""
    call = make_call("chosen", padding=0)
    wild = 2**30
    assert call.counts is not None
    assert call.chosen is not None
    replace(
        call, slots=call.slots * wild, counts=call.counts * wild, chosen=call.chosen * wild
    ).run(OURS)
