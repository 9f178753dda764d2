"""The buffers every step has, with their sizes as symbols."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from mtpc.layout import (
    CHAIN_EMBEDS,
    HOST,
    NO_SLOT,
    NULL_PAGE,
    PROMPT_EMBEDS,
    PROPOSE,
    ROPE_OFFSETS,
    SCRATCH_SLOT,
    STEP,
    VERIFY,
    BufferSpec,
    StepKey,
    Writer,
)
from mtpc.layout.open_sizes import Size
from mtpc.layout.specs import NUM_SOURCES, Dim
from mtpc.sampling_params import FLOATS, INTS

R, Q, K, M, P, N, S, E = sympy.symbols("R Q K M P N S E", integer=True, nonnegative=True)
"""num_reqs, query_len, drafts, blocks a request, page size, pages, request slots, stop ids."""
K_MAX = sympy.Symbol("K_max", integer=True, nonnegative=True)
"""The largest K of a program: state rows are wide enough for it."""
C = sympy.Symbol("C", integer=True, nonnegative=True)
"""The most rows of one request that a step writes to a layer: the larger of a prefill chunk and
K_max + 1, plus the rows that true chaining computes again."""
OPEN_SIZES = (M, N, S)
"""Sizes that shape shared state only. A step may leave them open: see `mtpc.layout.open_sizes`."""
T = R * Q
"""Flat tokens of a bucket: num_reqs * query_len."""
V, B, L = sympy.symbols("V B L", integer=True, nonnegative=True)
"""Vocabulary size, entries of a logit bias, most probable tokens that can be reported."""
W = (V + 31) // 32
"""int32 words of a mask that has one bit per token."""


def text_of(dim: Dim) -> Size:
    """A dimension as a number or, with open sizes in it, as `open_sizes` writes it."""
    if isinstance(dim, int) or not dim.free_symbols:
        return int(dim)
    terms = sympy.Poly(dim, *OPEN_SIZES).terms()
    factors = [
        (int(number), *(s for s, n in zip(OPEN_SIZES, powers, strict=True) for _ in range(n)))
        for powers, number in terms
    ]
    return "+".join("*".join(map(str, term)) for term in factors)


def ring_pages(window: int) -> sympy.Expr:
    """Pages of one request's ring in a layer that attends to its last `window` positions. The
    window counts a row's own position.

    Position p is stored at p modulo the ring's length. Rows that are needed at the same time must
    not share a place. These are the up to C rows that a step writes, and the window - 1 rows before
    the first of them. Drafts of the previous step lie within this step's rows (docs/design.md). A
    ring is never longer than a request's pages.
    """
    return sympy.Min(M, sympy.ceiling((window - 1 + C) / P))


def state_specs() -> tuple[BufferSpec, ...]:
    """Per-request rows that live on the device between steps, indexed by request slot."""
    moved = HOST + PROPOSE  # The host writes the row at join, `propose` moves it on.
    return (
        _state("block_table", (S, M), torch.int32, NULL_PAGE,
               "pages of a request in order; 0 after its last page. Written at join, and "
               "one entry when the request gets a page"),
        _state("committed_lens", (S,), torch.int32, 0,
               "number of tokens whose cache rows are final. Written at join: 0", moved),
        _state("token_ids", (S, K_MAX + 1), torch.int64, 0,
               "the last emitted token, then the drafts to verify next. The last prefill "
               "chunk fills it; the host may write other drafts to columns 1 to K", moved),
        _state("remaining_tokens", (S,), torch.int32, 0,
               "number of tokens that the request may still emit; 0: its row is inactive. "
               "Written at join", moved),
        _state("stop_ids", (S, E), torch.int64, -1,
               "token ids that end the request; -1: unused. Written at join"),
    )  # fmt: skip


def _state(
    name: str,
    dims: tuple[Dim, ...],
    dtype: torch.dtype,
    pad: int,
    meaning: str,
    writers: tuple[Writer, ...] = HOST,
) -> BufferSpec:
    """Rows that the host writes when a request joins."""
    return BufferSpec(f"state.{name}", dims, dtype, pad, writers, meaning, is_rebuilt=True)


def chain_specs(
    window: int, features: tuple[int, ...], dtype: torch.dtype
) -> tuple[BufferSpec, ...]:
    """What true chaining keeps by request slot: the last rows, which the next step computes again.
    `window` is one less than the number of MTP layers that are used, and `features` the shape of a
    row of the target's features."""
    if window < 1:
        return ()
    meaning = "with several MTP layers: what they keep of the last rows"
    return (
        BufferSpec("state.chain_ids", (S, window), torch.int64, 0, PROPOSE, meaning, False),
        BufferSpec(
            "state.chain_features", (S, window, *features), dtype, 0, PROPOSE, meaning, False
        ),
    )


def batch_specs(key: StepKey, packs_drafts: bool = False) -> tuple[BufferSpec, ...]:
    """Per-bucket buffers, with metadata sized as PLAIN DECODING has it: one token a request.

    The pass `resize-metadata` grows what a multi-token step needs to num_reqs * query_len.

    With `packs_drafts`, decode steps have rows for those drafts alone that exist.
    """
    common = (
        _batch("state_indices", (R,), torch.int64, SCRATCH_SLOT, HOST,
               "request slot of each row of the batch, each slot at most once; 0: the row "
               "is inactive. Written before a replay if it changed"),
        _batch("positions", (R,), torch.int64, 0, STEP,
               "attention metadata, from lengths"),
        _batch("slot_mapping", (R,), torch.int64, NO_SLOT, STEP,
               "attention metadata, from lengths"),
        _batch("seq_lens", (R,), torch.int32, 0, STEP,
               "attention metadata, from lengths"),
        _batch("query_start_loc", (R + 1,), torch.int32, 0, STEP,
               "attention metadata, from lengths"),
        _result("out_token_ids", (R, K + 1), torch.int64,
               "result: emitted tokens, the first num_emitted of each row"),
        _result("num_emitted", (R,), torch.int32,
               "result: number of emitted tokens, 1 to K+1. 0 for an inactive row, and for "
               "a chunk that is not the last of its prompt. Tokens from the first "
               "non-finite logits on do not count"),
        _result("num_accepted", (R,), torch.int32,
               "result: number of accepted drafts"),
        _result("stop_reason", (R,), torch.int32,
               "result: 0 the request goes on, 1 length, 2 stop token, 3 non-finite logits"),
    )  # fmt: skip
    if key.phase == "decode":
        is_ragged = key.spec_tokens and (packs_drafts or key.bucket.query_len < key.max_emitted)
        return (*common, *_logits_starts()) if is_ragged else common
    return (
        *common,
        _batch("prompt_ids", (T,), torch.int64, 0, HOST,
               "prefill: tokens of the chunks, packed; the rest may be anything"),
        _batch("num_input", (R,), torch.int32, 0, HOST,
               "prefill: number of tokens in each request's chunk"),
        _batch("next_prompt_id", (R,), torch.int64, -1, HOST,
               "prefill: the prompt's token after the chunk; -1 after the last chunk"),
        _batch("is_decoding", (R,), torch.int32, 0, HOST,
               "prefill: 1 if the request decodes in this step. It then has the K + 1 "
               "tokens of a decode step, and its num_input is ignored"),
        *_logits_starts(),
    )  # fmt: skip


def _logits_starts() -> tuple[BufferSpec, ...]:
    meaning = "ragged steps: where each request's rows of logits begin, and their total"
    return (_batch("logits_start_loc", (R + 1,), torch.int32, 0, VERIFY, meaning),)


def _batch(
    name: str,
    dims: tuple[Dim, ...],
    dtype: torch.dtype,
    pad: int,
    writers: tuple[Writer, ...],
    meaning: str,
) -> BufferSpec:
    return BufferSpec(f"batch.{name}", dims, dtype, pad, writers, meaning)


def _result(name: str, dims: tuple[Dim, ...], dtype: torch.dtype, meaning: str) -> BufferSpec:
    return BufferSpec(f"batch.{name}", dims, dtype, 0, VERIFY, meaning, is_result=True)


def image_specs(hidden: int, grids: int, window: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """The buffers that images add: embeddings of their tokens, and positions within images.

    The token id V + i, with V the size of the vocabulary, names row i of `prompt_embeds`. That
    buffer has 2C rows: a prefill step has at most C token rows, and the next token of each request.
    The id V + 2C + j names row j of `chain_embeds`, which the step before left in the request slot.

    For `grids` see `ModelFamily.position_grids`: with one, positions are those of text. For
    `window` see `chain_specs`.
    """
    specs = [
        BufferSpec(PROMPT_EMBEDS, (2 * C, hidden), dtype, 0, HOST,
                   "with images: rows of embeddings, which the ids from the vocabulary's end on "
                   "name. Written before a prefill step that has such ids",
                   needs_pad=False, is_rebuilt=True),
    ]  # fmt: skip
    if grids > 1:
        name = ROPE_OFFSETS.removeprefix("state.")
        specs += [
            _state(name, (S, M * P, grids), torch.int32, 0,
               "with images: what to add to a position for the rotary embedding, by position and "
               "grid. Written at join"),
        ]  # fmt: skip
    if window > 0:
        specs += [
            BufferSpec(CHAIN_EMBEDS, (S, window, hidden), dtype, 0, PROPOSE,
                   "with images and several MTP layers: the embeddings of the tokens in "
                   "`chain_ids` that are of images. A prefill step writes it", False),
        ]  # fmt: skip
    return tuple(specs)


def copy_specs(beside: bool) -> tuple[BufferSpec, ...]:
    """What drafts that are copies of a request's own text add, alone or beside another drafter."""
    moved = HOST + PROPOSE
    counts = (
        _state("copy_counts", (S, NUM_SOURCES, 2), torch.int32, 0,
               "with copies beside a drafter: accepted drafts, and steps that verified some, by "
               "their source. Written at join: 0", moved),
        _state("draft_source", (S,), torch.int32, 0,
               "with copies beside a drafter: the source of the drafts to verify next. Written at "
               "join: 0", moved),
    )  # fmt: skip
    return (
        *counts[: 2 * beside],
        _state("text_ids", (S, M * P), torch.int32, 0,
               "with copies: the request's tokens by position, up to the last emitted one. Written "
               "at join: those of the pages that are reused", HOST + PROPOSE),
        replace(_result("num_drafts", (R,), torch.int32,
               "result, with copies: number of drafts to verify next, 0 where nothing is copied"),
               writers=PROPOSE),
    )  # fmt: skip


def budget_specs() -> tuple[BufferSpec, ...]:
    return (
        _state("draft_counts", (S, K_MAX, 2), torch.float32, 0,
               "with a budget of rows: how many drafts were judged at each position, and how many "
               "of them were accepted; old ones count less. Written at join: 0", HOST + PROPOSE),
        _result("num_verified", (R,), torch.int32,
               "result, with a budget of rows: number of drafts that this step verified"),
        replace(_result("draft_chances", (R, K_MAX), torch.float32,
               "result, with a budget of rows: the chance that the next draft of a position and "
               "all before it are accepted; 0 in an inactive row"), writers=PROPOSE),
    )  # fmt: skip


SYNTHETIC_PERIOD = 4096
"""Entries of `state.synthetic_draws`."""


def synthetic_specs() -> tuple[BufferSpec, ...]:
    meaning = (
        "with synthetic acceptance: how many drafts a step accepts, by committed length modulo "
        "the number of entries. Written when the rates change"
    )
    return (_state("synthetic_draws", (SYNTHETIC_PERIOD,), torch.int64, 0, meaning),)


def sampling_specs(key: StepKey, token_mask: bool) -> tuple[BufferSpec, ...]:
    """What sampling adds; the rows by request slot are described in `ops.sampling`. With
    `token_mask`, the host may mask tokens for each row of logits and for each draft."""
    specs = (
        _state("sampling_floats", (S, len(FLOATS)), torch.float64, 0,
               "with sampling: the columns `mtpc.sampling_params.FLOATS`. Written at join"),
        _state("sampling_ints", (S, len(INTS)), torch.int64, 0,
               "with sampling: the columns `mtpc.sampling_params.INTS`. Written at join"),
        _state("bias_ids", (S, B), torch.int64, -1,
               "with sampling: token ids with a bias; -1: unused. Written at join"),
        _state("bias_values", (S, B), torch.float64, 0,
               "with sampling: the biases of `bias_ids`. Written at join"),
        _state("allowed_tokens", (S, W), torch.int32, -1,
               "with sampling: one bit per token, set if it is allowed; read only where "
               "the column `masked` is 1. Written at join"),
        _state("prompt_tokens", (S, W), torch.int32, 0,
               "with sampling: one bit per token, set if it is in the prompt; read only "
               "where the column `penalised` is 1. Written at join"),
        _state("output_counts", (S, V), torch.int32, 0,
               "with sampling: how often each token was emitted; read only where the "
               "column `penalised` is 1. Written at join: 0, or the counts so far", HOST + PROPOSE),
        _result("out_logprobs", (R, K + 1), torch.float64,
               "with sampling: log-probabilities of the emitted tokens"),
        _result("out_top_ids", (R, K + 1, L), torch.int64,
               "with sampling: the most probable tokens"),
        _result("out_top_logprobs", (R, K + 1, L), torch.float64,
               "with sampling: log-probabilities of the most probable tokens"),
    )  # fmt: skip
    if not token_mask:
        return specs
    rows = R * (K + 1)  # Rows that choose a token; a prompt's is the first of its K + 1.
    mask = _batch("token_mask", (rows, W), torch.int32, -1, HOST,
               "with token_mask: one bit per token for each row of logits; a prompt has "
               "the first of its K + 1 rows. Written before each replay")  # fmt: skip
    if not key.spec_tokens:
        return (*specs, mask)
    draft_mask = _batch("draft_mask", (rows, K, W), torch.int32, -1, HOST,
               "with token_mask: one bit per token for each draft. A request reads the row "
               "of its last accepted token, a prompt its first row. Written before "
               "`propose`")  # fmt: skip
    return (*specs, mask, draft_mask)
