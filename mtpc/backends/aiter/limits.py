"""Which calls of mtpc's operators aiter's kernels cannot take, by the data of `facts`.

Each function takes the arguments of an `mtpc::` operator by name, the phase of the step ("decode":
all requests have equally many rows), and the name of an architecture; None is no GPU, which limits
nothing. It says why a kernel cannot take the call; None if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtpc.backends.aiter.facts import DEVICES, FACTS, HEADS
from mtpc.layout import dtype_name

Limit = Callable[[Mapping[str, Any], str, str | None], str | None]


def paged_attention(call: Mapping[str, Any], phase: str, device: str | None) -> str | None:
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


def latent_attention(call: Mapping[str, Any], phase: str, device: str | None) -> str | None:
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
    found = HEADS.get(q.shape[1])
    if found is None:
        return f"{q.shape[1]} heads; it takes {', '.join(map(str, HEADS))}"
    num_reqs = call["block_table"].shape[0]
    rows = latent_rows(q.shape[0], num_reqs, phase)
    what = "prompts" if rows is None else f"{rows} query rows a request"
    if rows is None and q.shape[0] <= num_reqs:
        return "a row of each prompt; it would not split their contexts"
    if rows is not None and found.rows is not None and rows > found.rows:
        return f"{what} with {found.heads} heads; it takes up to {found.rows}"
    devices = found.prompts if rows is None else found.devices
    if not devices:
        known = " or ".join(str(each.heads) for each in HEADS.values() if each.prompts)
        return f"{what} with {found.heads} heads; it takes them with {known}"
    if device not in (*devices, None):
        return f"{what} with {found.heads} heads on {device}; it takes them on {devices[0]}"
    return None


def latent_rows(tokens: int, num_reqs: int, phase: str) -> int | None:
    """Rows of each request; None where they may have different numbers."""
    return tokens // num_reqs if phase == "decode" and tokens % num_reqs == 0 else None


def experts(call: Mapping[str, Any], phase: str, device: str | None) -> str | None:
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
