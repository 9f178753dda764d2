"""The buffers every step has, with their sizes as symbols."""

from __future__ import annotations

import sympy
import torch

from mtpc.layout import NO_SLOT, NULL_PAGE, SCRATCH_SLOT, BufferSpec, Phase, StepKey
from mtpc.sampling_params import FLOATS, INTS

R, Q, K, M, P, N, S, E = sympy.symbols("R Q K M P N S E", integer=True, nonnegative=True)
"""num_reqs, query_len, drafts, blocks a request, page size, pages, request slots, stop ids."""
K_MAX = sympy.Symbol("K_max", integer=True, nonnegative=True)
"""The largest K of a program: state rows are wide enough for it."""
C = sympy.Symbol("C", integer=True, nonnegative=True)
"""Most rows of one request that a step may write to a layer: a prefill chunk or K_max + 1, and what
true chaining computes again."""
T = R * Q
"""Flat tokens of a bucket: num_reqs * query_len."""
V, B, L = sympy.symbols("V B L", integer=True, nonnegative=True)
"""Vocabulary, entries of a logit bias, most probable tokens that can be reported."""
W = (V + 31) // 32
"""Words of a mask with a bit a token."""


def ring_pages(window: int) -> sympy.Expr:
    """Pages of one request's ring in a layer that attends to its last `window` positions.

    A position lives at its remainder by the ring's length, so what must not share a place is what
    is alive at once: the up to C rows of a step, and the window - 1 rows that the first of them
    attends to. Drafts of the round before reach no further than the step does (docs/design.md).
    No more pages are needed than a request has.

    Args:
        window: positions attended to, own included.
    """
    return sympy.Min(M, sympy.ceiling((window - 1 + C) / P))


def state_specs() -> tuple[BufferSpec, ...]:
    """Per-request rows that live on the device between steps, indexed by request slot."""
    return (
        BufferSpec("state.block_table", (S, M), torch.int32, NULL_PAGE, "host"),
        BufferSpec("state.committed_lens", (S,), torch.int32, 0, "both"),
        BufferSpec("state.token_ids", (S, K_MAX + 1), torch.int64, 0, "both"),
        BufferSpec("state.remaining_tokens", (S,), torch.int32, 0, "both"),
        BufferSpec("state.stop_ids", (S, E), torch.int64, -1, "host"),
    )


def chain_specs(
    window: int, features: tuple[int, ...], dtype: torch.dtype
) -> tuple[BufferSpec, ...]:
    """What true chaining keeps by request slot: the last rows that the next round starts from.

    Args:
        window: rows, one less than MTP layers are used.
        features: shape of a row of the target's features.
        dtype: of the features.
    """
    if window < 1:
        return ()
    return (
        BufferSpec("state.chain_ids", (S, window), torch.int64),
        BufferSpec("state.chain_features", (S, window, *features), dtype),
    )


def batch_specs(phase: Phase) -> tuple[BufferSpec, ...]:
    """Per-bucket buffers, with metadata sized as PLAIN DECODING has it: one token a request.

    The pass `resize-metadata` grows what a multi-token step needs to num_reqs * query_len.
    """
    common = (
        BufferSpec("batch.state_indices", (R,), torch.int64, SCRATCH_SLOT, "host"),
        BufferSpec("batch.positions", (R,), torch.int64, 0),
        BufferSpec("batch.slot_mapping", (R,), torch.int64, NO_SLOT),
        BufferSpec("batch.seq_lens", (R,), torch.int32, 0),
        BufferSpec("batch.query_start_loc", (R + 1,), torch.int32, 0),
        BufferSpec("batch.out_token_ids", (R, K + 1), torch.int64, 0),
        BufferSpec("batch.num_emitted", (R,), torch.int32, 0),
        BufferSpec("batch.num_accepted", (R,), torch.int32, 0),
        BufferSpec("batch.stop_reason", (R,), torch.int32, 0),
    )
    if phase == "decode":
        return common
    return (
        *common,
        BufferSpec("batch.prompt_ids", (T,), torch.int64, 0, "host"),
        BufferSpec("batch.num_input", (R,), torch.int32, 0, "host"),
        BufferSpec("batch.next_prompt_id", (R,), torch.int64, -1, "host"),
        BufferSpec("batch.is_decoding", (R,), torch.int32, 0, "host"),
        BufferSpec("batch.logits_start_loc", (R + 1,), torch.int32, 0),
    )


def sampling_specs(key: StepKey, token_mask: bool) -> tuple[BufferSpec, ...]:
    """What sampling adds; the rows by request slot are described in `ops.sampling`.

    Args:
        key: of the step.
        token_mask: whether the host may mask tokens row by row, the target's and drafts.
    """
    specs = (
        BufferSpec("state.sampling_floats", (S, len(FLOATS)), torch.float64, 0, "host"),
        BufferSpec("state.sampling_ints", (S, len(INTS)), torch.int64, 0, "host"),
        BufferSpec("state.bias_ids", (S, B), torch.int64, -1, "host"),
        BufferSpec("state.bias_values", (S, B), torch.float64, 0, "host"),
        BufferSpec("state.allowed_tokens", (S, W), torch.int32, -1, "host"),
        BufferSpec("state.prompt_tokens", (S, W), torch.int32, 0, "host"),
        BufferSpec("state.output_counts", (S, V), torch.int32, 0, "both"),
        BufferSpec("batch.out_logprobs", (R, K + 1), torch.float64, 0),
        BufferSpec("batch.out_top_ids", (R, K + 1, L), torch.int64, 0),
        BufferSpec("batch.out_top_logprobs", (R, K + 1, L), torch.float64, 0),
    )
    if not token_mask:
        return specs
    rows = R * (K + 1)  # Rows that choose: of a prompt its last one, as the first of them.
    mask = BufferSpec("batch.token_mask", (rows, W), torch.int32, -1, "host")
    if not key.spec_tokens:
        return (*specs, mask)
    return (*specs, mask, BufferSpec("batch.draft_mask", (rows, K, W), torch.int32, -1, "host"))
