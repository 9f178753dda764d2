"""Choices of experts sorted by expert, on the device, into tiles of as many rows as a program has.

Each expert's tiles follow those of the experts before it, so tiles without rows come last. The
number of tiles is known on the device only. The sizes bound it, and a grid has a program for each
possible tile; programs of tiles without rows end at once. One launch sorts: a program has one
expert, counts all choices, and then lists its own, in the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, await_launches, power_of_two

_LEAST_TILE = 16
"""Rows of the smallest product."""
FIXED_TILE = 32
"""Rows of a tile if results must not depend on how many rows a step has."""
_BLOCK = 1024
"""Choices that a program loads together."""


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
