"""Products of rows with codes of 4 or 8 bits that have a scale for each group of inputs.

The files in `ops` share two things. A separate launch rounds rows to int8 group by group, because
every program would otherwise repeat it. Device functions unpack the codes of a tile of 32 features,
which are adjacent in memory. Sums of a group's integers are exact.

Device functions take loaded values, not pointers; see `tiles.locate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, power_of_two, widen
from mtpc.backends.triton_kernels.tiles import dot
from mtpc.ops.grouped import LARGEST, TINY
from mtpc.weights.grouped import GroupForm, form_of
from mtpc.weights.packing import TILE

TILE_ROWS = 64
"""The most rows in a tile."""
# AMD: of two waves each may have more registers, for more loads under way.
CHOICE = Choice((Change(num_stages=3), Change(threads=64), Change(amd={"waves_per_eu": 2})))
_MOST_INPUTS, _FEWEST_INPUTS = 128, 32
"""The most and the fewest inputs of one product."""
_MOST_SUM = 2**31 - 1
_POINTS = {"": 0, "zeros": 1, "mins": 2}
# Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
_ROUNDING: tl.constexpr = tl.constexpr(12582912.0)
_LARGEST: tl.constexpr = tl.constexpr(float(LARGEST))
_TINY: tl.constexpr = tl.constexpr(TINY)
_TILE: tl.constexpr = tl.constexpr(TILE)
_ZEROS: tl.constexpr = tl.constexpr(_POINTS["zeros"])
_MINS: tl.constexpr = tl.constexpr(_POINTS["mins"])


@triton.jit
def round_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr, integers_ptr, steps_ptr, sums_ptr, x_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's group as int8; its step, the largest magnitude / 127; and the sum of its integers."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, to = x_ptr + token * x_stride + group * GROUP, integers_ptr + token * K + group * GROUP
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    finite = tl.full([BLOCK], 1, tl.int32)
    for begin in range(0, GROUP, BLOCK):
        mask = begin + lane < GROUP
        size = tl.abs(tl.load(row + begin + lane, mask=mask, other=0.0).to(tl.float32))
        finite = finite & (size < float("inf")).to(tl.int32)  # 0 for NaN, too.
        largest = tl.maximum(largest, size)
    peak, sound = tl.max(largest, 0), tl.min(finite, 0) == 1
    # Rounded to nearest as in the reference: a slightly smaller quotient changes an integer.
    inverse = tl.where(peak < _TINY, 0.0, tl.div_rn(_LARGEST, tl.where(peak < _TINY, 1.0, peak)))
    inverse = tl.where(sound, inverse, 0.0)
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, GROUP, BLOCK):
        mask = begin + lane < GROUP
        value = tl.load(row + begin + lane, mask=mask, other=0.0).to(tl.float32)
        scaled = tl.where(sound, value, 0.0) * inverse
        integers = (scaled + _ROUNDING) - _ROUNDING
        total += integers.to(tl.int32)
        tl.store(to + begin + lane, integers.to(tl.int8), mask=mask)
    at = token * (K // GROUP) + group
    tl.store(steps_ptr + at, tl.where(sound, tl.div_rn(peak, _LARGEST), float("nan")))
    tl.store(sums_ptr + at, tl.sum(total, 0))


@triton.jit
def unpack_halves(packed, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes [BLOCK_K / 8 * TILE * 4] of a tile's stream as codes [BLOCK_K, TILE] less 8, int8."""
    low = (packed & 15).to(tl.int8) - 8
    high = (packed >> 4).to(tl.int8) - 8
    both = tl.reshape(tl.join(low, high), [BLOCK_K // 8, _TILE, 4, 2])
    return tl.reshape(tl.permute(both, (0, 3, 2, 1)), [BLOCK_K, _TILE])


@triton.jit
def unpack_bytes(packed, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes [BLOCK_K / 4 * TILE * 4] of a tile's stream as [BLOCK_K, TILE]."""
    groups = tl.reshape(packed, [BLOCK_K // 4, _TILE, 4])
    return tl.reshape(tl.permute(groups, (0, 2, 1)), [BLOCK_K, _TILE])


@triton.jit
def read_float8(codes):  # type: ignore[no-untyped-def]
    """Bytes that hold float8 (E4M3), as float32."""
    bits, wide = codes.to(tl.int32) & 127, codes.to(tl.int32)
    normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
    size = tl.where(bits == 127, float("nan"), size)
    return tl.where(wide > 127, -size, size)


@triton.jit
def add_products(  # type: ignore[no-untyped-def]
    sums, x, packed, BLOCK_K: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr
):
    """sums [rows, TILE] + x [rows, BLOCK_K] times the codes of as many inputs.

    Codes are integers less their default zero point. BITS is 0 for float8: then x is not rounded,
    and sums are floats.
    """
    if BITS == 4:
        out = tl.dot(x, unpack_halves(packed, BLOCK_K), sums, out_dtype=tl.int32)
    elif BITS == 8:
        # A byte less 128 is the byte with its top bit flipped, read as signed.
        signed = unpack_bytes((packed ^ 128).to(tl.int8, bitcast=True), BLOCK_K)
        out = tl.dot(x, signed, sums, out_dtype=tl.int32)
    else:
        out = sums + dot(x, read_float8(unpack_bytes(packed, BLOCK_K)).to(x.dtype), WIDEN)
    return out


@triton.jit
def add_group(  # type: ignore[no-untyped-def]
    total, sums, steps, inputs, scales, points, BITS: tl.constexpr, POINTS: tl.constexpr
):
    """total + a group's sums, scaled.

    `steps` are the rows' steps, `inputs` the sums of their integers, `scales` the tile's scales,
    and `points` its zero points or minima. Those that a form lacks are not used.
    """
    scales = scales.to(tl.float32)
    zero: tl.constexpr = 8 if BITS == 4 else 128
    if BITS == 0:
        out = total + sums * scales[None]
    else:
        if POINTS == _ZEROS:
            sums -= inputs[:, None] * (points.to(tl.int32) - zero)[None]
        if POINTS == _MINS:
            sums += inputs[:, None] * zero
        out = total + sums.to(tl.float32) * (steps[:, None] * scales[None])
        if POINTS == _MINS:
            least = steps[:, None] * points.to(tl.float32)[None]
            out -= inputs.to(tl.float32)[:, None] * least
    return out


@dataclass(frozen=True)
class GroupedRows:
    """Rows as kernels take them.

    Attributes:
        launches: the launches that round them; none for float8.
        x: int8 [T, K], or of the rows' own dtype if codes are float8.
        steps: float32 [T, groups]; x itself if codes are float8.
        sums: int32 [T, groups]; as above.
    """

    launches: list[Launch]
    x: Tensor
    steps: Tensor
    sums: Tensor

    def arguments(self) -> dict[str, Any]:
        """The arguments that kernels take."""
        return dict(x_ptr=self.x, steps_ptr=self.steps, sums_ptr=self.sums)


def prepare_rows(x: Tensor, form: GroupForm) -> GroupedRows:
    """Rows x [T, K] for a weight of a form."""
    if form.kind == "float8":
        x = x.contiguous()
        return GroupedRows([], x, x, x)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    groups = inputs // form.group
    integers = x.new_empty((rows, inputs), dtype=torch.int8)
    steps = x.new_empty((rows, groups), dtype=torch.float32)
    sums = x.new_empty((rows, groups), dtype=torch.int32)
    values = dict(
        x_ptr=x, integers_ptr=integers, steps_ptr=steps, sums_ptr=sums, x_stride=x.stride(0),
        K=inputs, GROUP=form.group, BLOCK=min(power_of_two(form.group), 1024),
    )  # fmt: skip
    launch = Launch(round_groups_kernel, (rows, groups, 1), values, threads=128)
    return GroupedRows([launch], integers, steps, sums)


def form_constants(kernel: Any, x: Tensor, form: GroupForm) -> dict[str, Any]:
    """The constants of a weight of a form, for rows x [_, K]."""
    block = min(power_of_two(form.group, _FEWEST_INPUTS), _MOST_INPUTS)
    if form.kind == "float8" and x.dtype == torch.float32:
        block = _FEWEST_INPUTS  # More products of float32 spill on NVIDIA.
    points = "zeros" if form.has_zeros else "mins" if form.has_mins else ""
    bits = {"int4": 4, "int8": 8, "float8": 0}[form.kind]
    return dict(
        GROUP=form.group, BLOCK_K=block, BITS=bits, POINTS=_POINTS[points],
        WIDEN=bits == 0 and widen(kernel, x),
    )  # fmt: skip


def weight_arguments(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    """Arguments of kernels: bytes of codes, scales, and zero points or minima (scales if none)."""
    scales = scales.contiguous()
    points = scales if zeros is None else zeros.contiguous()
    raw = codes.contiguous().view(torch.uint8)
    return dict(codes_ptr=raw, scales_ptr=scales, zeros_ptr=points)


def limit_group(inputs: int, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> str | None:
    """Why a weight's groups are too large; None where they are not."""
    form = form_of(inputs, codes, scales, zeros)
    most = _MOST_SUM // (2 * 128 * LARGEST)
    if form.kind == "float8" or form.group <= most:
        return None
    return f"groups of {form.group} inputs; their int32 sums hold {most}"
