"""Attention to keys by request slot, which gathers nothing and reads existing entries only.

A program has one row, 16 heads and one split of the row's keys: those of the ring, those of the
forward within the window, and entries. Keys are also the values. Splits are as in
`paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.combine import combine_launches, splits_for
from mtpc.backends.triton_kernels.launch import (
    Change,
    Choice,
    Launch,
    adjacent,
    power_of_two,
    widen,
)
from mtpc.backends.triton_kernels.operator import Plan, attention_limit, operator
from mtpc.backends.triton_kernels.tiles import dot, fade_in

_HEADS = 16
"""Heads that a program holds; see `latent_attention`."""
_CHOICE = Choice((Change(factors={"BLOCK_N": 0.5}), Change(num_stages=1)))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, at, seen, live, peak, total, acc, D: tl.constexpr, SCALE: tl.constexpr, WIDEN: tl.constexpr
):
    """Attention of live heads to the keys at `at` [n, BLOCK_D] that are seen; they are the values.

    `at` is computed here, not given to the kernel: see `tiles.locate`.
    """
    d = tl.arange(0, q.shape[1])
    keys = tl.load(at, mask=seen[:, None] & (d < D)[None], other=0.0).to(q.dtype)
    scores = dot(q, tl.trans(keys), WIDEN) * SCALE
    visible = live[:, None] & seen[None]
    weights, fade, peak, total = fade_in(scores, visible, peak, total, 0.0)
    return peak, total, acc * fade[:, None] + dot(weights.to(keys.dtype), keys, WIDEN)


@triton.jit
def slot_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, fresh_ptr, ring_ptr, slots_ptr, sees_ring_ptr, sees_fresh_ptr, entries_ptr, counts_ptr,
    chosen_ptr, acc_ptr, stats_ptr, num_tokens, q_token, q_head, fresh_token, ring_slot, ring_place,
    entries_slot, entries_row,
    HEADS: tl.constexpr, D: tl.constexpr, PLACES: tl.constexpr, OWN: tl.constexpr,
    ENTRIES: tl.constexpr, CHOICES: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    token, split = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d, lane, live = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), head < HEADS
    q_at = q_ptr + token.to(tl.int64) * q_token + head[:, None] * q_head + d[None]
    q = tl.load(q_at, mask=live[:, None] & (d < D)[None], other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for n in range(split * BLOCK_N, PLACES, SPLITS * BLOCK_N):
        place = n + lane
        flags = sees_ring_ptr + token.to(tl.int64) * PLACES + place
        seen = tl.load(flags, mask=place < PLACES, other=0) != 0
        at = ring_ptr + slot * ring_slot + place[:, None] * ring_place + d[None]
        peak, total, acc = _attend(q, at, seen, live, peak, total, acc, D, SCALE, WIDEN)
    # Splits take further blocks in turn, after those of the ring.
    passed: tl.constexpr = (PLACES + BLOCK_N - 1) // BLOCK_N
    turn = (split + (SPLITS - 1) * passed) % SPLITS
    for n in range(turn * BLOCK_N, OWN, SPLITS * BLOCK_N):
        row = token - n - lane
        inside = (n + lane < OWN) & (row >= 0)
        flags = sees_fresh_ptr + token.to(tl.int64) * num_tokens + row
        seen = tl.load(flags, mask=inside, other=0) != 0
        at = fresh_ptr + row.to(tl.int64)[:, None] * fresh_token + d[None]
        peak, total, acc = _attend(q, at, seen, live, peak, total, acc, D, SCALE, WIDEN)
    if ENTRIES > 0:
        passed_own: tl.constexpr = passed + (OWN + BLOCK_N - 1) // BLOCK_N
        turn = (split + (SPLITS - 1) * passed_own) % SPLITS
        count = tl.load(counts_ptr + token).to(tl.int32)
        for n in range(turn * BLOCK_N, count, SPLITS * BLOCK_N):
            seen = n + lane < count
            if CHOICES > 0:
                listed = chosen_ptr + token.to(tl.int64) * CHOICES + n + lane
                entry = tl.load(listed, mask=seen, other=0).to(tl.int64)
                rows = entry // ENTRIES * entries_slot + entry % ENTRIES * entries_row
            else:
                rows = slot * entries_slot + (n + lane) * entries_row
            at = entries_ptr + rows[:, None] + d[None]
            peak, total, acc = _attend(q, at, seen, live, peak, total, acc, D, SCALE, WIDEN)
    at = (split * num_tokens + token) * HEADS + head
    tl.store(stats_ptr + 2 * at, peak, mask=live)
    tl.store(stats_ptr + 2 * at + 1, total, mask=live)
    used = live & (total != 0)  # NaN too: it must reach the logits.
    out_at = at.to(tl.int64)[:, None] * D + d[None]
    tl.store(acc_ptr + out_at, acc, mask=used[:, None] & (d < D)[None])


@operator(
    limit=attention_limit,
    row_bound="it adds keys of a ring and of the step's own rows apart, so its sums depend on "
    "which tokens are in one step",
)
def slot_attention(
    query: Tensor, fresh: Tensor, ring: Tensor, row_slots: Tensor, sees_ring: Tensor,
    sees_fresh: Tensor, sinks: Tensor, scale: float, window: int, entries: Tensor | None,
    entry_counts: Tensor | None, chosen_entries: Tensor | None,
) -> Plan:  # fmt: skip
    """Attention by splits, then the sum of the splits.

    Raises:
        BackendError: elements of a row of the state are not adjacent in memory.
    """
    out = query.new_empty(query.shape)
    query = query if query.stride(-1) == 1 else query.contiguous()
    fresh = fresh if fresh.stride(-1) == 1 else fresh.contiguous()
    ring = adjacent(ring, "ring")
    older = adjacent(ring if entries is None else entries, "entries")
    entry_counts = row_slots if entry_counts is None else entry_counts.contiguous()
    listed = entry_counts if chosen_entries is None else chosen_entries.contiguous()
    (num_tokens, heads, dim), places = query.shape, ring.shape[1]
    num_entries = 0 if entries is None else entries.shape[1]
    choices = 0 if chosen_entries is None else chosen_entries.shape[1]
    own, block_n = min(window, num_tokens), 32 if query.dtype.itemsize == 2 else 16
    blocks = [-(-n // block_n) for n in (places, own, choices or num_entries)]
    head_blocks = -(-heads // _HEADS)
    splits = splits_for(num_tokens * head_blocks, sum(blocks)).count
    acc = query.new_empty((splits, num_tokens, heads, dim), dtype=torch.float32)
    stats = query.new_empty((splits, num_tokens, heads, 2), dtype=torch.float32)
    values = dict(
        q_ptr=query, fresh_ptr=fresh, ring_ptr=ring, slots_ptr=row_slots.contiguous(),
        sees_ring_ptr=sees_ring.contiguous(), sees_fresh_ptr=sees_fresh.contiguous(),
        entries_ptr=older, counts_ptr=entry_counts, chosen_ptr=listed, acc_ptr=acc, stats_ptr=stats,
        num_tokens=num_tokens, q_token=query.stride(0), q_head=query.stride(1),
        fresh_token=fresh.stride(0), ring_slot=ring.stride(0), ring_place=ring.stride(1),
        entries_slot=older.stride(0), entries_row=older.stride(1),
        HEADS=heads, D=dim, PLACES=places, OWN=own, ENTRIES=num_entries, CHOICES=choices,
        SCALE=scale, SPLITS=splits, BLOCK_H=_HEADS, BLOCK_N=block_n,
        BLOCK_D=power_of_two(dim, 16), WIDEN=widen(slot_attention_kernel, query, ring),
    )  # fmt: skip
    grid = (num_tokens, head_blocks, splits)
    attend = Launch(slot_attention_kernel, grid, values, choice=_CHOICE)
    return [attend, *combine_launches(acc, stats, None, out, sinks)], out
