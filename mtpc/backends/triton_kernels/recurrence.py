"""What the kernels of recurrences share (`mtpc.ops.recurrence`): Gated DeltaNet's and Mamba-2's.

A first launch makes the terms of all positions in parallel: of the step's rows, and of accepted
drafts of the step before, whose inputs are in `history`. Its entries are the rows, then as many
positions of each request as may be replayed. Then a program goes through a request's positions one
by one, with some columns of one head's state in registers, and stores them once, after the certain
rows. `remember_rows` at last updates the history that the others read.

Kernels load where a request stands themselves. If a function did, Inductor would believe that they
write all that it reads: the result is part of an address, and a call hides the loads.

A step of many rows goes through chunks of positions by matrix products instead. Positions are those
that are replayed, then the step's rows. A first launch works on all chunks in parallel, and leaves
a square of numbers for each: of every position with every other. A second one goes through a
request's chunks in order; a program has some columns of one head's state. Its products are of
bfloat16 parts (`dot2`), because float32 products spill on NVIDIA. A row with NaN spoils also the
rows before it in its chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Change, Choice, Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Limit
from mtpc.backends.triton_kernels.tiles import dot
from mtpc.errors import BackendError

COLUMNS, _REMEMBERED = 32, 1024
"""Columns of the state in a program; inputs that a program of `remember_rows_kernel` copies."""
BY_COLUMNS = Choice(
    (Change(factors={"BLOCK_V": 0.5}), Change(threads=256, factors={"BLOCK_V": 2})),
    {"BLOCK_V": (2, "DV")},
)
NO_END: tl.constexpr = tl.constexpr(2**31 - 1)
"""Behind all rows."""
_MAX_DIM = 256
"""The most rows of a column of the state, which a program has in registers."""


def dim_limit(what: str) -> Limit:
    """Why a state has too many rows, which are called `what`; None where it has not."""

    def limit(call: Mapping[str, Any]) -> str | None:
        dim = call["recurrent"].shape[2]
        return f"{what} {dim}; it takes up to {_MAX_DIM}" if dim > _MAX_DIM else None

    return limit


@triton.jit
def silu(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded before and after, as if the convolution were a module of its own."""
    x = x.to(DTYPE).to(tl.float32)
    return (x / (1 + tl.exp(-x))).to(DTYPE).to(tl.float32)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)), and x above 20; NaN stays NaN."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1 + power
    # The logarithm of a rounded sum, times what the rounding changes: small results stay exact.
    exact = tl.where(total == 1, power, tl.log(total) * (power / (total - 1)))
    return tl.where(x <= 20, exact, x)


@triton.jit
def request_of(  # type: ignore[no-untyped-def]
    entry, ends, num_tokens, EACH: tl.constexpr
):
    """The request of a row, or of an entry behind the rows, of which each request has EACH; R or
    more for a row of none. `ends` holds where the rows of each request end, and is padded by
    NO_END."""
    owner = tl.sum((ends <= entry).to(tl.int32))
    return tl.where(entry < num_tokens, owner, (entry - num_tokens) // EACH)


@triton.jit
def position_of(  # type: ignore[no-untyped-def]
    entry, start, committed, stood, num_tokens, REPLAYED: tl.constexpr
):
    """An entry's position, and whether there is such a position."""
    replayed = stood + (entry - num_tokens) % REPLAYED
    position = tl.where(entry < num_tokens, committed + entry - start, replayed)
    return position, (entry < num_tokens) | (position < committed)


@triton.jit
def convolve(  # type: ignore[no-untyped-def]
    rows_ptr, history_ptr, conv_ptr, start, committed, slot, position, channel, inside,
    FIELDS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr,
    W_PAD: tl.constexpr,
):  # fmt: skip
    """The convolution's sums at one position. Inputs behind the channels are not mixed."""
    tap, field = tl.arange(0, W_PAD)[:, None], channel[None]
    at, is_mixed = position - WIDTH + 1 + tap, field < CHANNELS
    mask = (tap < WIDTH) & inside[None] & (is_mixed | (tap == WIDTH - 1))
    new = rows_ptr + (start + at - committed).to(tl.int64) * FIELDS + field
    old = history_ptr + (slot * KEPT + at % KEPT) * FIELDS + field
    x = tl.load(new, mask=mask & (at >= committed), other=0.0).to(tl.float32)
    older = mask & (at >= 0) & (at < committed)
    x += tl.load(old, mask=older, other=0.0).to(tl.float32)
    w = tl.load(conv_ptr + field * WIDTH + tap, mask=mask & is_mixed, other=1.0).to(tl.float32)
    return tl.sum(x * w, 0)


@triton.jit
def remember_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, history_ptr, standing_ptr, slots_ptr, lens_ptr, starts_ptr, certain_ptr, out_ptr,
    num_reqs, num_tokens,
    KEPT: tl.constexpr, FIELDS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    R_PAD: tl.constexpr,
):  # fmt: skip
    """Programs 0 to T - 1 copy their row to history, or zero a row of out that has no request; the
    next R programs set standing."""
    token, reqs = tl.program_id(0), tl.arange(0, R_PAD)
    column, is_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), token < num_tokens
    ends = tl.load(starts_ptr + 1 + reqs, mask=reqs < num_reqs, other=NO_END)
    request = request_of(token, ends, num_tokens, 1)
    length = tl.load(lens_ptr + request, mask=request < num_reqs, other=0).to(tl.int32)
    if length > 0:
        start = tl.load(starts_ptr + request).to(tl.int32)
        committed = length - tl.load(starts_ptr + request + 1).to(tl.int32) + start
        slot = tl.load(slots_ptr + request).to(tl.int64)
        position = committed + token - start
        if is_row & (position >= length - KEPT):
            row = tl.load(rows_ptr + token.to(tl.int64) * FIELDS + column, mask=column < FIELDS)
            to = history_ptr + (slot * KEPT + position % KEPT) * FIELDS + column
            tl.store(to, row, mask=column < FIELDS)
        sure = tl.minimum(committed + tl.load(certain_ptr + request).to(tl.int32), length)
        first = (is_row == 0) & (tl.program_id(1) == 0)
        tl.store(standing_ptr + slot, sure.to(standing_ptr.dtype.element_ty), mask=first)
    else:
        zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        to = out_ptr + token.to(tl.int64) * OUT + column
        tl.store(to, zeros, mask=column < tl.where(is_row, OUT, 0))


@dataclass(frozen=True)
class Recurrence:
    """A step's rows, state and requests, as the kernels take them.

    Attributes:
        rows: [T, F], contiguous.
        conv: [C, W], contiguous.
        recurrent: [S, HV, D, DV].
        history: [S, B, F].
        out: [T, HV, DV], the result.
        certain: int32 [R], contiguous.
        requests: standing, slots, lengths and first rows, by the kernels' names.
    """

    rows: Tensor
    conv: Tensor
    recurrent: Tensor
    history: Tensor
    out: Tensor
    certain: Tensor
    requests: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        rows: Tensor,
        conv: Tensor,
        state: tuple[Tensor, Tensor, Tensor],
        indices: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Recurrence:
        """From the arguments of an operator.

        Args:
            rows: [T, F]; T > 0.
            conv: [C, W].
            state: recurrent, history and standing, as `mtpc.ops.recurrence` has them.
            indices: slots, lengths, first rows and certain lengths of the requests.

        Raises:
            BackendError: the state is not contiguous.
        """
        for tensor in state:
            if not tensor.is_contiguous():
                raise BackendError(
                    f"recurrent state with strides {tuple(tensor.stride())}; expected contiguous"
                )
        recurrent, history, standing = state
        slots, lens, starts, certain = (t.contiguous() for t in indices)
        out = rows.new_empty((rows.shape[0], recurrent.shape[1], recurrent.shape[3]))
        requests = dict(standing_ptr=standing, slots_ptr=slots, lens_ptr=lens, starts_ptr=starts)
        return cls(rows.contiguous(), conv.contiguous(), recurrent, history, out, certain, requests)

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.certain.shape[0]

    @property
    def replayed(self) -> int:
        """The most positions that a request replays."""
        return max(0, self.history.shape[1] - self.conv.shape[1] + 1)

    @property
    def entries(self) -> int:
        """Positions of which terms are made, at most."""
        return self.rows.shape[0] + self.num_reqs * self.replayed

    @property
    def values(self) -> dict[str, Any]:
        """What the kernels take, whatever the recurrence."""
        _, heads, dim, value_dim = self.recurrent.shape
        return dict(
            self.requests, rows_ptr=self.rows, state_ptr=self.recurrent, history_ptr=self.history,
            certain_ptr=self.certain, out_ptr=self.out, num_tokens=self.rows.shape[0],
            num_reqs=self.num_reqs, R_PAD=power_of_two(self.num_reqs), HEADS=heads, D=dim,
            DV=value_dim, KEPT=self.history.shape[1], REPLAYED=self.replayed,
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int, int, int]:
        """Of kernels that go through positions, with `COLUMNS` each."""
        _, heads, _, value_dim = self.recurrent.shape
        return self.num_reqs, heads, -(-value_dim // COLUMNS)

    def terms_launch(self, kernel: Any, programs: int, values: dict[str, Any]) -> Launch:
        """The first launch.

        Args:
            kernel: of one position, or of a part of it.
            programs: of one position.
            values: those that not every such kernel has.
        """
        width = self.conv.shape[1]
        values = self.values | values | dict(
            conv_ptr=self.conv, REPLAYED=max(1, self.replayed), WIDTH=width,
            W_PAD=power_of_two(width),
        )  # fmt: skip
        return Launch(kernel, (self.entries, programs, 1), values, threads=64)

    def remember_launch(self) -> Launch:
        """The last launch."""
        (num_tokens, fields), (_, heads, value_dim) = self.rows.shape, self.out.shape
        block = min(power_of_two(fields), _REMEMBERED)
        values = self.values | dict(FIELDS=fields, OUT=heads * value_dim, BLOCK=block)
        grid = (num_tokens + self.num_reqs, -(-fields // block), 1)
        return Launch(remember_rows_kernel, grid, values, threads=128)


CHUNK, FEATURES = 32, 32
"""Positions in a chunk; features of two positions in one product. Larger ones spill on NVIDIA."""
_LEAST_ROWS = 4 * CHUNK
"""The fewest rows of a step that goes in chunks. On paper, a chunk costs about ten positions."""


def count_chunks(num_tokens: int, num_reqs: int, replayed: int) -> int:
    """The most chunks of a step; 0 where a step has few rows, as steps that verify drafts do.

    A request's chunks begin at index (rows before it + replayed * requests before it) // CHUNK +
    requests before it, which leaves room for any lengths; see `tiles`.
    """
    if num_tokens < _LEAST_ROWS or num_tokens <= num_reqs * (replayed + 1):
        return 0
    return (num_tokens + num_reqs * replayed) // CHUNK + num_reqs


def squares(terms: Tensor, chunks: int, heads: int) -> Tensor:
    """Memory for a number for each two positions of a chunk, by head: [chunks, heads, CHUNK,
    CHUNK]."""
    return terms.new_empty((chunks, heads, CHUNK, CHUNK), dtype=torch.float32)


@triton.jit
def request_of_chunk(chunk, reqs, begins, num_reqs, REPLAYED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's request, and where the chunk begins among its positions. `begins` holds the first
    row of each request."""
    firsts = (begins + reqs * REPLAYED) // CHUNK + reqs
    request = tl.sum(((reqs < num_reqs) & (firsts <= chunk)).to(tl.int32)) - 1
    return request, (chunk - tl.sum(tl.where(reqs == request, firsts, 0))) * CHUNK


@triton.jit
def dot2(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b of float32, each operand as a sum of two bfloat16: a relative error of about 2^-16."""
    a1, b1 = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a2, b2 = (a - a1.to(tl.float32)).to(tl.bfloat16), (b - b1.to(tl.float32)).to(tl.bfloat16)
    return dot(a1, b2, WIDEN) + dot(a2, b1, WIDEN) + dot(a1, b1, WIDEN)


@triton.jit
def state_after(  # type: ignore[no-untyped-def]
    state, keys, delta, decay, position, last, WIDEN: tl.constexpr
):
    """The state after a chunk's positions up to `last`; keys [D, CHUNK]."""
    end = tl.sum(tl.where(position == last, decay, 0.0))
    left = tl.exp(tl.where(position <= last, end - decay, float("-inf")))
    return tl.exp(end) * state + dot2(keys * left[None], delta, WIDEN)


@triton.jit
def rows_at(  # type: ignore[no-untyped-def]
    first, length, committed, start, replays, CHUNK: tl.constexpr
):
    """A chunk's positions; whether each exists, and is a row of the step; its row; and its place in
    the terms."""
    position = first + tl.arange(0, CHUNK)
    now, row = position >= committed, (start + position - committed).to(tl.int64)
    return position, position < length, now, row, tl.where(now, row, replays + position)
