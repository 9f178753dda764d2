"""Which calls of mtpc's operators aiter's kernels cannot take, by the data of `facts`.

Each `Limit` takes the arguments of an `mtpc::` operator by name, and says why a kernel cannot take
the call; None if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpc.backends.aiter.facts import DEVICES, FACTS, HEADS
from mtpc.layout import dtype_name


@dataclass(frozen=True)
class Place:
    """Where a call is.

    Attributes:
        phase: of the step; "decode": all requests have equally many rows.
        device: name of the architecture; None is no GPU, which limits nothing.
    """

    phase: str
    device: str | None


@dataclass(frozen=True)
class Parts:
    """Heads of queries as kernels take them: so many calls of so many heads each."""

    calls: int
    heads: int


Limit = Callable[[Mapping[str, Any], Place], str | None]
_BALANCE = 128
"""Rows of queries, times heads, whose products with a key take about as long as its bytes: on an
MI300X 130, and on an MI355X 165, by AMD's figures of memory and bfloat16 matrices."""


def paged_attention(call: Mapping[str, Any], place: Place) -> str | None:
    """Of `unified_attention`, for any number of rows."""
    q, k, v = call["q"], call["k_cache"], call["v_cache"]
    if dtype_name(q.dtype) not in FACTS["attention dtypes"].value or k.dtype != q.dtype:
        return f"{dtype_name(q.dtype)} queries on a {dtype_name(k.dtype)} cache"
    if k.shape[3] != v.shape[3]:
        return f"heads of {k.shape[3]} and {v.shape[3]}; it takes equal ones"
    page, least, tile = k.shape[1], FACTS["least page"].value, FACTS["keys of a tile"].value
    if page < least or (page < tile and tile % page):
        return f"pages of {page} tokens; it takes {least}, 32, and {tile} or more"
    return None


def latent_attention(call: Mapping[str, Any], place: Place) -> str | None:
    """Of `mla_decode_fwd` and, for prompts, `mla_prefill_fwd`, which splits no context: few rows of
    a long one would occupy few processors."""
    q, cache, rank = (call[name] for name in ("q", "latent_cache", "latent_rank"))
    width, wanted = q.shape[2], FACTS["latent widths"].value
    if dtype_name(q.dtype) != FACTS["latent dtype"].value:
        return f"{dtype_name(q.dtype)}; it takes {FACTS['latent dtype'].value}"
    if (width, rank) != wanted:
        return f"rows of {width} with rank {rank}; it takes {wanted[0]} and {wanted[1]}"
    if not cache.is_contiguous():
        return "a cache with gaps; it takes rows that follow each other"
    num_reqs = call["block_table"].shape[0]
    if latent_rows(q.shape[0], num_reqs, place.phase) is None and q.shape[0] <= num_reqs:
        return "a row of each prompt; it would not split their contexts"
    return None


def latent_rows(tokens: int, num_reqs: int, phase: str) -> int | None:
    """Rows of each request; None where they may have different numbers."""
    return tokens // num_reqs if phase == "decode" and tokens % num_reqs == 0 else None


def latent_parts(heads: int, rows: int | None, device: str | None) -> Parts:
    """Which kernel takes some heads, in the least time on paper.

    There is none for most numbers of heads. So heads are cut into parts, each of which reads the
    keys again, or filled up with heads of zeros.

    Args:
        heads: on this rank.
        rows: of each request; None: any, as prompts have.
        device: name of the architecture; None is any.
    """

    def cost(parts: Parts) -> tuple[float, int, int]:
        work = parts.heads if rows is None else max(1.0, parts.heads * rows / _BALANCE)
        return parts.calls * work, parts.calls * parts.heads, parts.calls

    sizes = (size for size in HEADS if _takes(size, rows, device))
    return min((Parts(-(-heads // size), size) for size in sizes), key=cost)


def _takes(heads: int, rows: int | None, device: str | None) -> bool:
    """Whether there is a kernel for exactly so many heads."""
    found = HEADS[heads]
    devices = found.prompts if rows is None else found.devices
    is_known = bool(devices) and device in (*devices, None)
    return is_known and (rows is None or found.rows is None or rows <= found.rows)


def experts(call: Mapping[str, Any], place: Place) -> str | None:
    """Of `fused_moe`, by what all steps have in common: they agree on the order of the weights."""
    x, gate_up, down = call["x"], call["gate_up"], call["down"]
    is_known = dtype_name(x.dtype) in FACTS["expert dtypes"].value
    if not is_known or {gate_up.dtype, down.dtype} != {x.dtype}:
        return f"{dtype_name(x.dtype)} rows with {dtype_name(gate_up.dtype)} weights"
    (_, hidden, inner), step = down.shape, FACTS["expert step"].value
    if hidden % step or inner % step:
        return f"experts of {inner} features of {hidden}; it takes multiples of {step}"
    return None


def refused_device(name: str | None) -> str | None:
    """Why nothing runs on devices of an architecture."""
    if name not in (*DEVICES, None):
        return f"{name}; it is bound on {' and '.join(DEVICES)}"
    return None
