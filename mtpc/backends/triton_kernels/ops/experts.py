"""Experts: each chosen expert's weights are read once per tile of the rows that chose it.

A first launch sorts the choices by expert, into tiles of as many rows as a program has: a program
has one expert, counts all choices, and then lists its own, in the order of rows. Each expert's
tiles follow those of the experts before it, so tiles without rows come last. The number of tiles is
known on the device only. The sizes bound it, and a grid has a program for each possible tile;
programs of tiles without rows end at once.

A program of the other two has one tile and one block of features. So no program searches for its
rows, and few programs of a grid have no work. A tile has as many rows as an expert gets if rows
choose evenly: 16 in decode, up to 128 in a prompt. A separate kernel sums a row's experts, in the
order of the experts, so that the rounding does not depend on atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import (
    Change,
    Choice,
    Launch,
    adjacent,
    await_launches,
    power_of_two,
    widen,
)
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.backends.triton_kernels.tiles import dot

_LEAST_TILE = 16
"""Rows of the smallest product."""
FIXED_TILE = 32
"""Rows of a tile if results must not depend on how many rows a step has."""
_BLOCK = 1024
"""Choices that a program loads together."""
_SHAPES = {32: (32, 128, 128), 64: (64, 64, 128), 128: (64, 64, 256)}
"""Output features of a program, inputs in one product and threads, by the most rows of a tile.
With few rows a program waits for weights, with many for products."""
_MAX_TILE, _SUM_BLOCK = max(_SHAPES), 1024
"""The most rows of a tile; sums of a program of `expert_sum_kernel`."""
_CHANGES = (
    Change(threads=64, factors={"BLOCK_F": 0.5}),
    Change(num_stages=3, factors={"BLOCK_K": 0.5}),
    Change(threads=256),
)


@triton.jit
def sort_choices_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, experts_ptr, picks_ptr, num_picks, num_tiles,
    EXPERTS: tl.constexpr, E_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """experts[i] is the expert of tile i, picks[i] its choices, as indices of ids; -1 for none.

    The last program has no expert; it marks the tiles without rows.
    """
    await_launches(EARLY)
    expert = tl.program_id(0)
    lane, each = tl.arange(0, BLOCK), tl.arange(0, E_PAD)
    counts = tl.zeros([E_PAD], tl.int32)
    for first in range(0, num_picks, BLOCK):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < num_picks, other=-1)
        is_expert = (ids >= 0) & (ids < EXPERTS)
        ids = tl.where(is_expert, ids, 0).to(tl.int32)
        counts += tl.histogram(ids, E_PAD, mask=is_expert)
    tiles = (counts + TILE - 1) // TILE
    begin = tl.sum(tl.where(each < expert, tiles, 0))
    count = tl.sum(tl.where(each == expert, counts, 0))
    is_rest = expert == EXPERTS
    end = tl.where(is_rest, num_tiles, begin + (count + TILE - 1) // TILE)
    named = tl.where(is_rest, -1, expert) + tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_tiles, BLOCK):
        tile = first + lane
        tl.store(experts_ptr + tile, named, mask=(tile >= begin) & (tile < end))
    if count > 0:
        own = picks_ptr + begin * TILE
        listed = tl.full([], 0, tl.int32)
        for first in range(0, num_picks, BLOCK):
            ids = tl.load(ids_ptr + first + lane, mask=first + lane < num_picks, other=-1)
            is_own = ids == expert
            place = listed + tl.cumsum(is_own.to(tl.int32)) - 1
            tl.store(own + place, first + lane, mask=is_own)
            listed += tl.sum(is_own.to(tl.int32))
        rest = count + tl.arange(0, TILE)
        tl.store(own + rest, tl.full([TILE], -1, tl.int32), mask=rest < (end - begin) * TILE)


@dataclass(frozen=True)
class SortedChoices:
    """Choices as kernels take them.

    Attributes:
        launch: the launch that sorts them.
        experts: int32 [tiles], each tile's expert; -1 where a tile has no rows.
        picks: int32 [tiles, rows of a tile], indices of the choices, row * choices + choice; -1
            for none. Undefined for tiles without rows.
    """

    launch: Launch
    experts: Tensor
    picks: Tensor

    @property
    def num_tiles(self) -> int:
        """The most tiles."""
        return self.picks.shape[0]

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.picks.shape[1]

    def arguments(self) -> dict[str, Any]:
        """The arguments that kernels take."""
        return dict(experts_ptr=self.experts, picks_ptr=self.picks)


def sort_choices(ids: Tensor, num_experts: int, most: int, is_fixed: bool = False) -> SortedChoices:
    """Sort choices into tiles.

    Args:
        ids: integers [T, k], contiguous. Those outside of 0 to E - 1 are in no tile.
        num_experts: E.
        most: the most rows of a tile. A tile has as many as an expert gets if rows choose evenly.
        is_fixed: whether tiles have `FIXED_TILE` rows instead.
    """
    num_picks = ids.numel()
    tile = min(power_of_two(-(-num_picks // num_experts), _LEAST_TILE), most)
    tile = FIXED_TILE if is_fixed else tile
    # An expert that is chosen has a tile, and one more for each `tile` of its other rows.
    chosen = min(num_picks, num_experts)
    num_tiles = chosen + (num_picks - chosen) // tile
    experts = ids.new_empty((num_tiles,), dtype=torch.int32)
    picks = ids.new_empty((num_tiles, tile), dtype=torch.int32)
    values = dict(
        ids_ptr=ids, experts_ptr=experts, picks_ptr=picks, num_picks=num_picks,
        num_tiles=num_tiles, EXPERTS=num_experts, E_PAD=power_of_two(num_experts, 64), TILE=tile,
        BLOCK=min(power_of_two(num_picks, 128), _BLOCK),
    )  # fmt: skip
    launch = Launch(sort_choices_kernel, (num_experts + 1, 1, 1), values, threads=128)
    return SortedChoices(launch, experts, picks)


@triton.jit
def glu(  # type: ignore[no-untyped-def]
    gate, up, LIMIT: tl.constexpr, LIMIT_INPUT: tl.constexpr, GELU: tl.constexpr
):
    """silu(gate) * up or gelu(gate) * up, bounded as `mtpc::experts` says. It uses `where`, because
    minima would drop NaN."""
    if LIMIT > 0:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if LIMIT_INPUT:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
    # The tanh form of GELU is x times the logistic function of this.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    gate = gate / (1 + tl.exp(-inner))
    if LIMIT > 0 and not LIMIT_INPUT:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    return gate * up


@triton.jit
def squared_relu(x):  # type: ignore[no-untyped-def]
    """relu(x)^2. It uses `where`, because a maximum would drop NaN."""
    x = tl.where(x < 0, 0.0, x)
    return x * x


@triton.jit
def expert_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, experts_ptr, picks_ptr, hidden_ptr, x_stride,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_INPUT: tl.constexpr, GELU: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """hidden[t, j] = silu(gate x) * (up x) of row t's expert j; weight [E, 2I, H]. Not GATED:
    relu(gate x)^2; weight [E, I, H]."""
    await_launches(EARLY)
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    pick = tl.load(picks_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    live, token = pick >= 0, pick // CHOICES
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inner = feature < INNER
    base = weight_ptr + expert.to(tl.int64) * ((2 if GATED else 1) * INNER * H)
    gate = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    up = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for begin in range(0, H, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        x_mask = live[:, None] & (k < H)[None]
        x = tl.load(x_ptr + token[:, None] * x_stride + k[None], mask=x_mask, other=0.0)
        at = base + feature[None] * H + k[:, None]
        mask = inner[None] & (k < H)[:, None]
        gate += dot(x, tl.load(at, mask=mask, other=0.0), WIDEN)
        if GATED:
            up += dot(x, tl.load(at + INNER * H, mask=mask, other=0.0), WIDEN)
    value = glu(gate, up, LIMIT, LIMIT_INPUT, GELU) if GATED else squared_relu(gate)
    out = hidden_ptr + pick[:, None] * INNER + feature[None]
    tl.store(out, value.to(hidden_ptr.dtype.element_ty), mask=live[:, None] & inner[None])


@triton.jit
def expert_down_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, weight_ptr, experts_ptr, picks_ptr, scale_ptr, part_ptr,
    H: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """part[t, j] = (down hidden[t, j]) * scale[t, j], float32; weight [E, H, I]."""
    await_launches(EARLY)
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    pick = tl.load(picks_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    live = pick >= 0
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    base = weight_ptr + expert.to(tl.int64) * (H * INNER)
    acc = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (k < INNER)[None]
        x = tl.load(hidden_ptr + pick[:, None] * INNER + k[None], mask=mask, other=0.0)
        w_mask = (feature < H)[None] & (k < INNER)[:, None]
        weight = tl.load(base + feature[None] * INNER + k[:, None], mask=w_mask, other=0.0)
        acc += dot(x, weight, WIDEN)
    scale = tl.load(scale_ptr + pick, mask=live, other=0.0).to(tl.float32)
    out = part_ptr + pick[:, None] * H + feature[None]
    tl.store(out, acc * scale[:, None], mask=live[:, None] & (feature < H)[None])


@triton.jit
def expert_sum_kernel(  # type: ignore[no-untyped-def]
    part_ptr, ids_ptr, out_ptr, num_experts,
    H: tl.constexpr, CHOICES: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of part[t, j] over j in the order of the experts."""
    await_launches(EARLY)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, C_PAD)
    ids = tl.load(ids_ptr + token * CHOICES + j, mask=j < CHOICES, other=2147483647)
    ties = (ids[None] == ids[:, None]) & (j[None] < j[:, None])
    rank = tl.sum(((ids[None] < ids[:, None]) | ties).to(tl.int32), 1)
    acc = tl.zeros([BLOCK], tl.float32)
    for place in range(CHOICES):
        here = rank == place
        choice = tl.sum(tl.where(here, j, 0), 0)
        expert = tl.sum(tl.where(here, ids, 0), 0)
        width = tl.where((expert >= 0) & (expert < num_experts), H, 0)
        at = (token * CHOICES + choice).to(tl.int64) * H + column
        acc += tl.load(part_ptr + at, mask=column < width, other=0.0)
    out = out_ptr + token * H + column
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=column < H)


@operator()
def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    limit: float, limit_input: bool, gelu: bool, *, batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Sort the choices; gate and up with the activation; the down projection; the sum over experts.

    Raises:
        BackendError: elements of a weight's row are not adjacent in memory.
    """
    form = dict(LIMIT=float(limit), LIMIT_INPUT=limit_input, GELU=gelu, GATED=True)
    return expert_plan(x, gate_up, down, expert_ids, expert_weights, form, batch_invariant)


def expert_plan(
    x: Tensor, weight: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    form: dict[str, Any], batch_invariant: bool,
) -> Plan:  # fmt: skip
    """The plan of experts with an activation.

    Args:
        x: [T, H].
        weight: [E, 2I, H], gate rows first, or [E, I, H] without gates.
        down: [E, H, I].
        expert_ids: integers [T, k].
        expert_weights: [T, k].
        form: the activation, as constants of `expert_gate_up_kernel`.
        batch_invariant: whether tiles must not depend on how many rows there are.

    Raises:
        BackendError: elements of a weight's row are not adjacent in memory.
    """
    out = x.new_empty(x.shape)
    if x.shape[0] == 0:
        return [], out
    weight, down = (adjacent(w, "expert weights").contiguous() for w in (weight, down))
    ids, scales = expert_ids.contiguous(), expert_weights.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_tokens, width), (count, _, inner) = x.shape, down.shape
    picks = ids.shape[1]
    hidden = x.new_empty((num_tokens, picks, inner))
    part = x.new_empty((num_tokens, picks, width), dtype=torch.float32)
    choices = sort_choices(ids, count, _MAX_TILE, batch_invariant)
    features, depth, threads = next(s for rows, s in _SHAPES.items() if choices.tile <= rows)
    shared = dict(
        **choices.arguments(), H=width, INNER=inner, CHOICES=picks, BLOCK_T=choices.tile,
        BLOCK_F=features, BLOCK_K=depth if x.dtype.itemsize == 2 else depth // 2,
        WIDEN=widen(expert_down_kernel, x),
    )  # fmt: skip
    first = dict(x_ptr=x, weight_ptr=weight, hidden_ptr=hidden, x_stride=x.stride(0), **form)
    second = dict(hidden_ptr=hidden, weight_ptr=down, scale_ptr=scales, part_ptr=part)
    grid_up, grid_down = ((choices.num_tiles, -(-n // features), 1) for n in (inner, width))
    by_inner, by_width = (Choice(_CHANGES, {"BLOCK_F": (1, cut)}) for cut in ("INNER", "H"))
    launches = [
        choices.launch,
        Launch(expert_gate_up_kernel, grid_up, shared | first, threads, choice=by_inner),
        Launch(expert_down_kernel, grid_down, shared | second, threads, choice=by_width),
        expert_sum_launch(part, ids, out, count),
    ]
    return launches, out


def expert_sum_launch(part: Tensor, ids: Tensor, out: Tensor, num_experts: int) -> Launch:
    """The sum of each row's experts.

    Args:
        part: float32 [T, k, H], what each chosen expert adds.
        ids: int64 [T, k], contiguous; choices outside of 0 to E - 1 add nothing.
        out: [T, H], contiguous.
        num_experts: E.
    """
    num_tokens, picks, width = part.shape
    block = min(power_of_two(width), _SUM_BLOCK)
    values = dict(
        part_ptr=part, ids_ptr=ids, out_ptr=out, num_experts=num_experts, H=width, CHOICES=picks,
        C_PAD=power_of_two(picks), BLOCK=block,
    )  # fmt: skip
    return Launch(expert_sum_kernel, (num_tokens, -(-width // block), 1), values, threads=128)


@operator()
def relu2_experts(
    x: Tensor, up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor, *,
    batch_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Sort the choices; relu(up)^2; the down projection; the sum over experts.

    Raises:
        BackendError: elements of a weight's row are not adjacent in memory.
    """
    form = dict(LIMIT=0.0, LIMIT_INPUT=False, GELU=False, GATED=False)
    return expert_plan(x, up, down, expert_ids, expert_weights, form, batch_invariant)
