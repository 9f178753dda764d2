"""Acceptance of drafts, and stops: one launch, with a program for each request."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch, adjacent, await_launches, power_of_two
from mtpc.backends.triton_kernels.operator import Plan, operator
from mtpc.layout import RUNNING, STOPPED_BY_LENGTH, STOPPED_BY_NONFINITE, STOPPED_BY_TOKEN
from mtpc.ops.accept import empty_outcome

_RUNNING: tl.constexpr = tl.constexpr(RUNNING)
_LENGTH: tl.constexpr = tl.constexpr(STOPPED_BY_LENGTH)
_TOKEN: tl.constexpr = tl.constexpr(STOPPED_BY_TOKEN)
_NONFINITE: tl.constexpr = tl.constexpr(STOPPED_BY_NONFINITE)


@triton.jit
def _stop(token, finite, candidates, limit, stops, W: tl.constexpr, column):  # type: ignore[no-untyped-def]
    """How many of the candidates are emitted, how many more may be, and the stop reason."""
    is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) != 0
    first_stop = tl.min(tl.where(is_stop, column, W), 0)
    first_bad = tl.min(tl.where(finite, W, column), 0)
    wanted = tl.minimum(candidates, limit)
    count = tl.minimum(tl.minimum(wanted, first_stop + 1), first_bad)
    reason = tl.where(count == limit, _LENGTH, _RUNNING)
    reason = tl.where(first_bad < wanted, _NONFINITE, reason)
    reason = tl.where(first_stop < count, _TOKEN, reason)
    return count, tl.where(reason == _RUNNING, limit - count, 0), reason


@triton.jit
def accept_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr, finite_ptr, ids_ptr, starts_ptr, context_ptr, active_ptr, remaining_ptr, stops_ptr,
    slots_ptr, prompts_ptr, going_ptr,
    out_ids_ptr, accepted_ptr, emitted_ptr, reason_ptr, anchors_ptr, left_ptr, lens_ptr,
    out_row, tokens,
    W: tl.constexpr, W_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    HAS_PROMPTS: tl.constexpr, GOES_ON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """chosen int64, finite bool [R, W]; stops int64 [S, E]; out_ids int64 [R, out_row]; all else
    [R], except ids [tokens], starts [R+1] and remaining [S]."""
    await_launches(EARLY)
    request = tl.program_id(0)
    active = tl.load(active_ptr + request)
    decodes, emits = active, active
    if HAS_PROMPTS:
        decodes = active & (tl.load(prompts_ptr + request) == 0)
    if GOES_ON:
        emits = active & (tl.load(going_ptr + request) == 0)
    start = tl.load(starts_ptr + request).to(tl.int32)
    end = tl.load(starts_ptr + request + 1).to(tl.int32)
    column = tl.arange(0, W_PAD)
    there = column < W
    token = tl.load(chosen_ptr + request * W + column, mask=there, other=-1)
    is_draft = column < W - 1
    at = tl.minimum(start + 1 + column, tokens - 1)
    wrong = is_draft & (tl.load(ids_ptr + at, mask=is_draft, other=-1) != token)
    accepted = tl.where(decodes, tl.min(tl.where(wrong, column, W - 1), 0), 0)

    slot = tl.load(slots_ptr + request)
    before = tl.load(remaining_ptr + slot)
    which = tl.arange(0, E_PAD)
    # Padding of tokens equals unused stop tokens, -1, but is beyond W, where no stop counts.
    stops = tl.load(stops_ptr + slot * E + which, mask=which < E, other=-2)
    finite = tl.load(finite_ptr + request * W + column, mask=there, other=1) != 0
    count, left, reason = _stop(token, finite, accepted + 1, before, stops, W, column)
    tl.store(out_ids_ptr + request * out_row + column, token, mask=there)
    tl.store(emitted_ptr + request, tl.where(emits, count, 0))
    tl.store(reason_ptr + request, tl.where(emits, reason, _RUNNING))
    left = tl.where(emits, left, tl.where(active, before, 0))
    tl.store(left_ptr + request, left)
    tl.store(accepted_ptr + request, accepted)
    prompt = active & (decodes == 0)
    anchor = tl.where(prompt, end - 1, start + accepted)
    anchor = tl.minimum(tl.maximum(anchor, 0), tokens - 1)
    tl.store(anchors_ptr + request, anchor.to(tl.int64))
    certain = tl.where(prompt, end - start, tl.where(active, accepted + 1, 0))
    tl.store(lens_ptr + request, tl.load(context_ptr + request) + certain)


@operator()
def accept(
    out_token_ids: Tensor, num_accepted: Tensor, num_emitted: Tensor, stop_reason: Tensor,
    chosen: Tensor, finite: Tensor, ids: Tensor, query_start_loc: Tensor, context_lens: Tensor,
    active: Tensor, remaining_tokens: Tensor, stop_ids: Tensor, state_indices: Tensor,
    is_prompt: Tensor | None, goes_on: Tensor | None,
) -> Plan:  # fmt: skip
    """One launch.

    Raises:
        BackendError: elements of a written argument, or of a row of it, are not adjacent in memory.
    """
    reports = (out_token_ids, num_accepted, num_emitted, stop_reason)
    out_ids, accepted, emitted, reason = (adjacent(t, "a report of a step") for t in reports)
    stop_ids, active = stop_ids.contiguous(), active.contiguous()
    anchors, left, lens = out = empty_outcome(context_lens)
    requests, stops = len(context_lens), stop_ids.shape[1]
    width = len(chosen) // requests
    values = dict(
        chosen_ptr=chosen.contiguous(), finite_ptr=finite.contiguous(), ids_ptr=ids.contiguous(),
        starts_ptr=query_start_loc.contiguous(), context_ptr=context_lens.contiguous(),
        active_ptr=active, remaining_ptr=remaining_tokens.contiguous(), stops_ptr=stop_ids,
        slots_ptr=state_indices.contiguous(),
        prompts_ptr=active if is_prompt is None else is_prompt.contiguous(),
        going_ptr=active if goes_on is None else goes_on.contiguous(),
        out_ids_ptr=out_ids, accepted_ptr=accepted, emitted_ptr=emitted,
        reason_ptr=reason, anchors_ptr=anchors, left_ptr=left, lens_ptr=lens,
        out_row=out_ids.stride(0), tokens=len(ids),
        W=width, W_PAD=power_of_two(width), E=stops, E_PAD=power_of_two(stops),
        HAS_PROMPTS=is_prompt is not None, GOES_ON=goes_on is not None,
    )  # fmt: skip
    return [Launch(accept_kernel, (requests, 1, 1), values, threads=64)], out
