"""Into how many parts aiter cuts contexts, and what it allocates: its formulas, by sizes of a step.

They are those of its sources (`facts.COMMIT`) for gfx942 and gfx950. `*_scratch` take the arguments
of our operators by name and give the bytes of each allocation beside the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from mtpc.backends.aiter.facts import FACTS

_UNITS_ELSEWHERE = 304
"""An MI300X's."""
_MOST_SPLITS = 16
_COST = 84.1
"""Of a split, in keys: `overhead`."""


def units(device: torch.device) -> int:
    """Compute units of a GPU, which aiter asks rocminfo for; an MI300X's for what is none."""
    if device.type != "cuda":
        return _UNITS_ELSEWHERE
    return torch.cuda.get_device_properties(device).multi_processor_count


def latent_splits(num_reqs: int, longest: int, units: int) -> int:
    """Splits of each context in latent attention: `get_meta_param` (aiter/mla.py, 282).

    Args:
        num_reqs: requests.
        longest: tokens of a context that fills its pages.
        units: compute units.
    """

    def worth(splits: int) -> float:
        programs = num_reqs * splits
        return programs / (ceil(programs / units) * units) * longest / (longest + _COST * splits)

    return max(range(1, _MOST_SPLITS + 1), key=worth)


def latent_scratch(call: Mapping[str, Any]) -> tuple[int, ...]:
    """Each split's result and sum, in float32, and counts of splits (aiter/mla.py, 622 to 721).

    The results of one split are the final ones where requests have four rows, and for some numbers
    of heads.
    """
    rows, heads, _ = call["q"].shape
    num_reqs, splits = call["block_table"].shape[0], call["num_kv_splits"]
    sums, few = 4 * rows * splits * heads, FACTS["one split is final"].value
    is_final = splits == 1 and (rows == 4 * num_reqs or heads in few)
    return (0 if is_final else sums * call["latent_rank"], sums, 4 * num_reqs, 4)


def prompt_scratch(call: Mapping[str, Any]) -> tuple[int, ...]:
    """A sum for each row and head, in float32 (aiter/mla.py, 1170)."""
    rows, heads, _ = call["q"].shape
    return (4 * rows * heads,)


def paged_segments(call: Mapping[str, Any]) -> int:
    """Segments of each context in paged attention; 1 where nothing is left to join.

    `unified_attention`, `use_2d_kernel` and `select_3d_config`
    (aiter/ops/triton/attention/unified_attention.py, 401, 284 and 140).
    """
    (rows, heads, width), (_, page, groups, _) = call["q"].shape, call["k_cache"].shape
    num_reqs, blocks = call["block_table"].shape
    shared, longest, is_single = heads // groups, blocks * page, call["max_query_len"] == 1
    each = max(16, _power(shared)) // shared
    programs = (num_reqs if is_single else rows // each + num_reqs) * groups
    target, is_wide = 4 * units(call["q"].device), width >= 512
    if (is_wide and not is_single) or call["sliding_window"] > 0:
        return 1
    if longest <= 512 or programs > target:
        return 1
    most = min(128, ceil(longest / min(64, page)))
    least = min(16 if is_wide else 8, most)
    wanted = ceil((2 if is_wide else 4) * target / programs)
    return _power(max(least, min(most, wanted)))


def paged_scratch(call: Mapping[str, Any]) -> tuple[int, ...]:
    """Each segment's result, peak and sum, in float32 (537 to 558 there)."""
    segments, (rows, heads, width) = paged_segments(call), call["q"].shape
    sums = 4 * rows * heads * segments
    return (sums * _power(width), sums, sums) if segments > 1 else ()


def experts_scratch(call: Mapping[str, Any]) -> tuple[int, ...]:
    """The rows between `fused_moe`'s two products, and lists of rows sorted by expert, in blocks of
    up to 128."""
    rows, (count, _, inner) = call["expert_ids"].numel(), call["down"].shape
    lists = 4 * (rows + 128 * (count + 1))
    return (rows * inner * call["x"].itemsize, lists, lists, lists)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
