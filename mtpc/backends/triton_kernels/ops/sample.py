"""Choosing tokens: logits adjusted by all of a request's parameters, then filters, noise, argmax.

In the first kernel, a program has one block of one row's vocabulary, and writes its adjusted logits
in float64. For a greedy row, one more program looks at the blocks' peaks and reads one block. For a
sampled row, `filters` finds which tokens are kept. Then a program for each block adds noise and
finds the block's best token, and a program for each row finds the best of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.filters import (
    NUM_FLOATS,
    NUM_INTS,
    SCRATCH,
    TEMPERATURE,
    filter_launches,
    row_peak,
)
from mtpc.backends.triton_kernels.launch import ALIGNMENT, Launch, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.errors import BackendError
from mtpc.sampling_params import FLOATS, INTS

_BLOCK = 1024
"""Tokens of a program."""

_REPETITION: tl.constexpr = tl.constexpr(FLOATS.index("repetition_penalty"))
_PRESENCE: tl.constexpr = tl.constexpr(FLOATS.index("presence_penalty"))
_FREQUENCY: tl.constexpr = tl.constexpr(FLOATS.index("frequency_penalty"))
_SEED: tl.constexpr = tl.constexpr(INTS.index("seed"))
_FIRST_STOP: tl.constexpr = tl.constexpr(INTS.index("first_stop"))
_MASKED: tl.constexpr = tl.constexpr(INTS.index("masked"))
_PENALISED: tl.constexpr = tl.constexpr(INTS.index("penalised"))


@triton.jit
def _bits(words_ptr, token, inside):  # type: ignore[no-untyped-def]
    """Whether each token's bit is set, of 32 in a word."""
    words = tl.load(words_ptr + token // 32, mask=inside, other=0)
    return ((words >> (token % 32)) & 1) != 0


@triton.jit
def _bias(  # type: ignore[no-untyped-def]
    x, token, first, ids_ptr, values_ptr,
    BIASES: tl.constexpr, B_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits with biases added; most blocks hold no biased token, and skip the loop."""
    place = tl.arange(0, B_PAD)
    ids = tl.load(ids_ptr + place, mask=place < BIASES, other=-1)
    in_block = (ids >= first) & (ids < first + BLOCK)
    if tl.sum(in_block.to(tl.int32)) > 0:
        for b in range(BIASES):
            x = tl.where(token == tl.load(ids_ptr + b), x + tl.load(values_ptr + b), x)
    return x


@triton.jit
def _penalise(x, counts, seen, floats_ptr):  # type: ignore[no-untyped-def]
    """Repetition, then frequency and presence: one rounding each, as in mtpc/ops/sampling.py."""
    repetition = tl.load(floats_ptr + _REPETITION)
    x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
    x = x - tl.load(floats_ptr + _FREQUENCY) * counts
    return x - tl.load(floats_ptr + _PRESENCE) * (counts > 0).to(tl.float64)


@triton.jit
def adjust_logits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, ids_ptr, positions_ptr, slots_ptr, floats_ptr, ints_ptr, bias_ids_ptr,
    bias_values_ptr, allowed_ptr, prompt_ptr, counts_ptr, stops_ptr, mask_ptr,
    places_ptr, scores_ptr, raw_peaks_ptr, peaks_ptr, vocab, words, logits_row,
    ROWS: tl.constexpr, BIASES: tl.constexpr, B_PAD: tl.constexpr, STOPS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scores float64 [N, V]; raw_peaks, of logits as they are (inf where one is NaN), and peaks,
    of scores: float64 [N, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // ROWS
    slot, position = tl.load(slots_ptr + request), tl.load(positions_ptr + row)
    if (slot == SCRATCH) | (position < 0):
        return
    first = block * BLOCK
    token = first + tl.arange(0, BLOCK)
    inside = token < vocab
    place = tl.load(places_ptr + row) if HAS_PLACES else row
    x = tl.load(logits_ptr + place * logits_row + token, mask=inside, other=float("-inf"))
    x = x.to(tl.float64)
    raw = tl.max(tl.where(x == x, x, float("inf")), 0)
    floats_ptr += slot * NUM_FLOATS
    ints_ptr += slot * NUM_INTS

    x = _bias(x, token, first, bias_ids_ptr + slot * BIASES, bias_values_ptr + slot * BIASES,
              BIASES, B_PAD, BLOCK)  # fmt: skip
    if tl.load(ints_ptr + _PENALISED) != 0:
        counts = tl.load(counts_ptr + slot * vocab + token, mask=inside, other=0)
        for j in range(1, ROWS):
            fed = tl.load(ids_ptr + request * ROWS + j)
            counts += ((token == fed) & (request * ROWS + j <= row)).to(tl.int32)
        seen = (counts > 0) | _bits(prompt_ptr + slot * words, token, inside)
        x = _penalise(x, counts, seen, floats_ptr)

    if tl.load(ints_ptr + _MASKED) != 0:
        x = tl.where(_bits(allowed_ptr + slot * words, token, inside), x, float("-inf"))
    if HAS_MASK:
        x = tl.where(_bits(mask_ptr + row * words, token, inside), x, float("-inf"))
    if position < tl.load(ints_ptr + _FIRST_STOP):
        for e in range(STOPS):
            x = tl.where(token == tl.load(stops_ptr + slot * STOPS + e), float("-inf"), x)
    temperature = tl.load(floats_ptr + TEMPERATURE)
    if temperature != 0:
        x = x / temperature

    tl.store(scores_ptr + row * vocab + token, x, mask=inside)
    at = row * tl.num_programs(1) + block
    tl.store(raw_peaks_ptr + at, raw)
    tl.store(peaks_ptr + at, tl.max(tl.where(inside, x, float("-inf")), 0))


@triton.jit
def _noise(seed, position, token):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise, float64, as in mtpc/ops/philox.py: two tokens share a call."""
    zero = tl.zeros_like(token).to(tl.uint32)
    pair, place = (token // 2).to(tl.uint32), zero + position.to(tl.uint32)
    a, b, c, d = tl.philox(seed, pair, place, zero, zero)
    is_second = token % 2 == 1
    high, low = tl.where(is_second, c, a).to(tl.uint64), tl.where(is_second, d, b).to(tl.uint64)
    steps = ((high << 20) | (low >> 12)).to(tl.float64)
    return -tl.log(-tl.log((steps + 0.5) * 2.220446049250313e-16))


@triton.jit
def draw_token_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, raw_peaks_ptr, peaks_ptr, positions_ptr, slots_ptr, floats_ptr, ints_ptr, cuts_ptr,
    bests_ptr, tokens_ptr, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a block of a row that is sampled: the greatest kept logit with noise, bests float64 and
    tokens int32 [N, BLOCKS]; of equals the first."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots_ptr + row // ROWS), tl.load(positions_ptr + row)
    if (slot == SCRATCH) | (position < 0):
        return
    if tl.load(floats_ptr + slot * NUM_FLOATS + TEMPERATURE) == 0:
        return
    if row_peak(raw_peaks_ptr, peaks_ptr, row, BLOCKS, BLOCKS_PAD) == float("-inf"):
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scores_ptr + row * vocab + token, mask=token < vocab, other=float("-inf"))
    seed = tl.load(ints_ptr + slot * NUM_INTS + _SEED)
    kept = (x >= tl.load(cuts_ptr + row)) & (token < vocab)
    at = row * BLOCKS + block
    if tl.max(kept.to(tl.int32), 0) == 0:  # Most blocks keep no token, and noise is expensive.
        tl.store(bests_ptr + at, float("-inf"))
        return
    x = tl.where(kept, x + _noise(seed, position, token), float("-inf"))
    tl.store(bests_ptr + at, tl.max(x, 0))
    best = block * BLOCK + tl.argmax(x, 0, tie_break_left=True)
    tl.store(tokens_ptr + at, best.to(tl.int32))


@triton.jit
def choose_token_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, raw_peaks_ptr, peaks_ptr, positions_ptr, slots_ptr, floats_ptr, bests_ptr,
    tokens_ptr, out_ptr, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out int64 [N], full of -1."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots_ptr + row // ROWS), tl.load(positions_ptr + row)
    if (slot == SCRATCH) | (position < 0):
        return
    if row_peak(raw_peaks_ptr, peaks_ptr, row, BLOCKS, BLOCKS_PAD) == float("-inf"):
        return
    block = tl.arange(0, BLOCKS_PAD)
    at, there = row * BLOCKS + block, block < BLOCKS
    if tl.load(floats_ptr + slot * NUM_FLOATS + TEMPERATURE) == 0:
        peaks = tl.load(peaks_ptr + at, mask=there, other=float("-inf"))
        best = tl.argmax(peaks, 0, tie_break_left=True) * BLOCK
        token = best + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(scores_ptr + row * vocab + token, mask=inside, other=float("-inf"))
        chosen = best + tl.argmax(x, 0, tie_break_left=True)
        tl.store(out_ptr + row, chosen.to(tl.int64))
        return
    # The peak is kept, whatever the filters, so that there is a best.
    bests = tl.load(bests_ptr + at, mask=there, other=float("-inf"))
    first = tl.argmax(bests, 0, tie_break_left=True)
    tl.store(out_ptr + row, tl.load(tokens_ptr + row * BLOCKS + first).to(tl.int64))


@operator(any_element=True)
def sample(
    logits: Tensor, ids: Tensor, positions: Tensor, state_slots: Tensor, floats: Tensor,
    ints: Tensor, bias_ids: Tensor, bias_values: Tensor, allowed_tokens: Tensor,
    prompt_tokens: Tensor, output_counts: Tensor, stop_ids: Tensor, token_mask: Tensor | None,
    places: Tensor | None = None,
) -> Plan:  # fmt: skip
    """Logits adjusted, then the choice.

    Raises:
        BackendError: a shape or dtype is not the reference's.
    """
    out = ids.new_full((len(ids),), -1)
    if len(ids) == 0:
        return [], out
    state = (floats, ints, bias_ids, bias_values, allowed_tokens, prompt_tokens, output_counts,
             stop_ids)  # fmt: skip
    _check(logits, ids, state_slots, state, token_mask, places)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids, positions, slots = (t.contiguous() for t in (ids, positions, state_slots))
    floats, ints, bias_ids, bias_values, allowed, prompt, counts, stops = (
        t.contiguous() for t in state
    )
    count, vocab = len(ids), logits.shape[1]
    rows, blocks = count // slots.shape[0], -(-vocab // _BLOCK)
    scores, raw_peaks, peaks = (
        torch.empty((count, width), dtype=torch.float64, device=logits.device)
        for width in (vocab, blocks, blocks)
    )
    mask = allowed if token_mask is None else _aligned(token_mask)  # Without one, none is read.
    shared = dict(
        scores_ptr=scores, raw_peaks_ptr=raw_peaks, peaks_ptr=peaks, positions_ptr=positions,
        slots_ptr=slots, floats_ptr=floats, ints_ptr=ints, vocab=vocab, ROWS=rows, BLOCKS=blocks,
        BLOCK=_BLOCK,
    )  # fmt: skip
    adjusted = shared | dict(
        logits_ptr=logits, ids_ptr=ids, bias_ids_ptr=bias_ids, bias_values_ptr=bias_values,
        allowed_ptr=allowed, prompt_ptr=prompt, counts_ptr=counts, stops_ptr=stops, mask_ptr=mask,
        words=allowed.shape[1], logits_row=logits.stride(0),
        places_ptr=positions if places is None else places.contiguous(),
        BIASES=bias_ids.shape[1], B_PAD=power_of_two(bias_ids.shape[1]), STOPS=stops.shape[1],
        HAS_MASK=token_mask is not None, HAS_PLACES=places is not None,
    )  # fmt: skip
    chosen = shared | dict(
        cuts_ptr=scores.new_empty(count), bests_ptr=scores.new_empty((count, blocks)),
        tokens_ptr=slots.new_empty((count, blocks), dtype=torch.int32), out_ptr=out,
        BLOCKS_PAD=power_of_two(blocks),
    )  # fmt: skip
    each, whole = (count, blocks, 1), (count, 1, 1)
    launches = [
        Launch(adjust_logits_kernel, each, adjusted),
        *filter_launches(chosen, count),
        Launch(draw_token_kernel, each, chosen),
        Launch(choose_token_kernel, whole, chosen),
    ]
    return launches, out


def _aligned(mask: Tensor) -> Tensor:
    """The mask, contiguous and at an address that compiled code expects: one draft's slice of all
    drafts' masks may begin at any word."""
    dense = mask.contiguous()
    offset = dense.storage_offset() * dense.itemsize
    return dense.clone() if offset % ALIGNMENT else dense


def _check(
    logits: Tensor, ids: Tensor, state_slots: Tensor, state: tuple[Tensor, ...],
    token_mask: Tensor | None, places: Tensor | None,
) -> None:  # fmt: skip
    """Check what keeps the kernels within the tensors.

    Raises:
        BackendError: shapes or dtypes are not those of `mtpc::sample`.
    """
    floats, ints, bias_ids, bias_values, allowed, prompt, counts, stops = state
    count, vocab = len(ids), logits.shape[1]
    slots, words = floats.shape[0], -(-vocab // 32)
    expected = {
        "floats": (floats, (slots, len(FLOATS)), torch.float64),
        "ints": (ints, (slots, len(INTS)), torch.int64),
        "bias_ids": (bias_ids, (slots, bias_ids.shape[-1]), torch.int64),
        "bias_values": (bias_values, tuple(bias_ids.shape), torch.float64),
        "allowed_tokens": (allowed, (slots, words), torch.int32),
        "prompt_tokens": (prompt, (slots, words), torch.int32),
        "output_counts": (counts, (slots, vocab), torch.int32),
        "stop_ids": (stops, (slots, stops.shape[-1]), torch.int64),
    }
    if token_mask is not None:
        expected["token_mask"] = (token_mask, (count, words), torch.int32)
    if places is not None:
        expected["places"] = (places, (count,), torch.int64)
    elif len(logits) != count:
        raise BackendError(f"mtpc::sample: {len(logits)} rows of logits; expected {count}")
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise BackendError(
                f"mtpc::sample: {name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} "
                f"{shape}"
            )
    if count % len(state_slots):
        raise BackendError(
            f"mtpc::sample: {count} rows for {len(state_slots)} requests; expected as many for each"
        )
