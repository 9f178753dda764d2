"""Codes of keys and values: how rows of heads become codes, and how codes are read.

Codes are those of `mtpc.ops.attention.quantise_rows`, bit for bit. Kernels see float8 (E4M3) as
bytes, which integer arithmetic makes and reads: so every target compiles them, and none reads
another format of float8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.errors import BackendError
from mtpc.ops.attention import LARGEST_CODE

# Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
_ROUNDING: tl.constexpr = tl.constexpr(12582912.0)
_INT8: tl.constexpr = tl.constexpr(LARGEST_CODE[torch.int8])
_FLOAT8: tl.constexpr = tl.constexpr(LARGEST_CODE[torch.float8_e4m3fn])


@triton.jit
def magnitudes(x):  # type: ignore[no-untyped-def]
    """|x| as integers in the same order, infinity and NaN last. The largest is that of a row in
    which NaN counts."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def spread(x, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """`mtpc.ops.attention.spread` of rows x [rows, columns] of float32, D of the columns in use."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    for stage in tl.static_range(10):
        if (1 << stage) < (D & -D):
            pairs = tl.reshape(x, (rows, columns // (2 << stage), 2, 1 << stage))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.join(first + second, first - second)
            x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (rows, columns))
    return x


@triton.jit
def unspread(x, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The reverse of `spread`."""
    return spread(x.to(tl.float32), D) * (1.0 / (D & -D))


@triton.jit
def scales_of(largest, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of rows whose largest magnitudes these are; CODE is the dtype of kernels' codes."""
    most: tl.constexpr = _INT8 if tl.int8 == CODE else _FLOAT8
    return tl.div_rn(largest.to(tl.float32, bitcast=True), most)


@triton.jit
def codes_of(x, scales, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of rows x [rows, columns] with scales [rows]."""
    most: tl.constexpr = _INT8 if tl.int8 == CODE else _FLOAT8
    is_finite = scales < float("inf")  # Not so for NaN, either.
    divisor = tl.where(is_finite & (scales > 0), scales, 1.0)[:, None]
    x = tl.div_rn(tl.where(is_finite[:, None], x.to(tl.float32), 0.0), divisor)
    x = tl.minimum(tl.maximum(x, -most), most)  # Subnormal scales are imprecise.
    if tl.int8 == CODE:
        codes = ((x + _ROUNDING) - _ROUNDING).to(tl.int8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Of the mantissa three bits stay. Below 2^-6 there are multiples of 2^-9.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = ((tl.abs(x) * 512.0 + _ROUNDING) - _ROUNDING).to(tl.int32)
        code = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def read_codes(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, divided by the factor of `read_scales`, in a dtype of queries, which holds each of
    them exactly. `quantise_rows` makes no code of NaN."""
    if codes.dtype == tl.int8:
        numbers = codes.to(tl.float32)
    else:
        # As float16, whose exponents are 8 larger; so are those of subnormal numbers.
        signed = codes.to(tl.int8, bitcast=True).to(tl.int16)
        numbers = ((signed << 7) & -0x4080).to(tl.float16, bitcast=True)
        if dtype != tl.float16:
            numbers = numbers.to(tl.float32)
    return numbers.to(dtype)


@triton.jit
def read_scales(scales, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of what `read_codes` gives."""
    return scales if tl.int8 == CODE else scales * 256.0


@triton.jit
def weigh(weights, scales, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights [rows, positions] times scales in a dtype of queries, divided by a power of two for
    each row; and these powers. float16 would not hold products with small scales otherwise."""
    weights *= scales[None]
    powers = tl.full([weights.shape[0]], 1.0, tl.float32)
    if dtype == tl.float16:
        bits = tl.max(weights, 1).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.where((bits > 0) & (bits < (254 << 23)), bits, 127 << 23)
        powers = bits.to(tl.float32, bitcast=True)
        weights *= ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    return weights.to(dtype), powers


def as_codes(cache: Tensor, scales: Tensor | None, name: str) -> Tensor:
    """A cache as kernels take it: codes as int8 or bytes, other elements as they are.

    Args:
        cache: [pages, P, H, D].
        scales: float32 [pages, P, H], or None.
        name: of the cache, for messages.

    Raises:
        BackendError: the cache holds codes and there are no scales, or the other way round; or
            scales are not as `write_cache` takes them.
    """
    if (scales is not None) != (cache.dtype in LARGEST_CODE):
        found = "no scales" if scales is None else "scales"
        raise BackendError(
            f"{name} of {cache.dtype} with {found}; scales go with int8 and float8_e4m3fn"
        )
    if scales is None:
        return cache
    wanted = cache.shape[:3]
    if scales.dtype != torch.float32 or scales.shape != wanted or not scales.is_contiguous():
        raise BackendError(
            f"scales of {name} are {scales.dtype} {tuple(scales.shape)} with strides "
            f"{tuple(scales.stride())}; expected contiguous float32 {tuple(wanted)}"
        )
    return cache if cache.dtype == torch.int8 else cache.view(torch.uint8)
