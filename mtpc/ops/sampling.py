"""Choosing tokens from logits by the parameters of each request; see docs/sampling.md.

Per-request rows, shared by these ops (S request slots, V tokens, W = ceil(V / 32)):

- floats float64 [S, len(FLOATS)], ints int64 [S, len(INTS)]: `sampling_params` names the columns
- bias_ids int64 [S, B] (-1: unused), bias_values float64 [S, B]
- allowed_tokens, prompt_tokens int32 [S, W]: a bit a token, v is bit v mod 32 of word v / 32;
  read only where the column `masked`, or `penalised`, says so
- output_counts int32 [S, V]: how often each token was emitted; read only where `penalised`
- stop_ids int64 [S, E] (-1: unused)

References compute in float64. They read from the device whether any request asks for more than the
largest logit, and do no more if none does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.layout import SCRATCH_SLOT
from mtpc.ops.philox import gumbel
from mtpc.ops.traits import Traits, operator
from mtpc.sampling_params import FLOATS, INTS


@operator(
    Traits(
        "earlier",
        "sums",
        rows="logits ids positions token_mask",
        requests="state_slots",
        slots="floats ints bias_ids bias_values allowed_tokens prompt_tokens output_counts "
        "stop_ids",
        skips_idle=True,
        chooses=True,
    ),
    lambda ids: ids.new_empty(ids.shape[0]),
)
def sample(
    logits: Tensor,
    ids: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    floats: Tensor,
    ints: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    allowed_tokens: Tensor,
    prompt_tokens: Tensor,
    output_counts: Tensor,
    stop_ids: Tensor,
    token_mask: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """One token for each row: the argmax of the logits that the filters keep, plus Gumbel noise if
    the request samples.

    In this order: masks (the request's own, `token_mask`, stop tokens before `first_stop`), bias,
    penalties, temperature, min-p, top-k, top-p, noise. Ties at the edge of a filter stay.

    Logits are [N, V], N = R * Q: Q rows a request; with `places` int64 [N], [M, V], and places are
    the rows to choose from. `ids` int64 [N] are input tokens: row j of a request has seen those of
    its rows 1..j in addition to those that output_counts counts: they are drafts. `positions` int64
    [N] are those of the chosen tokens in their sequences, below 0 in a row that chooses no token.
    `state_slots` int64 [R] has SCRATCH_SLOT where a request is off. `token_mask` int32 [N, W] is
    one more mask. Other arguments have one row a slot: see above.

    Returns:
        int64 [N]; -1 where the request is off, the row chooses no token, a logit is NaN, the
        greatest logit is not finite, or no token is allowed.
    """
    rows_each = ids.shape[0] // state_slots.shape[0]
    slots = state_slots.repeat_interleave(rows_each)
    number, flag = _columns(floats[slots], FLOATS), _columns(ints[slots], INTS)
    x = (logits if places is None else logits[places]).double()
    usable = torch.isfinite(x.amax(-1)) & (slots != SCRATCH_SLOT) & (positions >= 0)

    if not _is_plain(number, flag, bias_ids[slots], positions, token_mask, usable):
        allowed = _bits(allowed_tokens[slots], x.shape[1]) | (flag["masked"] == 0)
        if token_mask is not None:
            allowed &= _bits(token_mask, x.shape[1])
        stops = stop_ids[slots]
        early = (positions[:, None] < flag["first_stop"]) & (stops >= 0) & (stops < x.shape[1])
        allowed &= ~_marked(stops, early, x.shape[1])
        # The contents of the scratch slot must not index the vocabulary.
        biased = (bias_ids[slots] >= 0) & (bias_ids[slots] < x.shape[1])
        bias = torch.where(biased, bias_values[slots], 0)
        x = x.scatter_add(1, torch.where(biased, bias_ids[slots], 0), bias)
        counts = output_counts[slots] + _drafts_before(ids.view(-1, rows_each), x.shape[1])
        seen = (counts > 0) | _bits(prompt_tokens[slots], x.shape[1])
        x = torch.where(flag["penalised"] != 0, _penalise(x, counts, seen, number), x)

        x = torch.where(allowed, x, float("-inf"))
        greedy = number["temperature"] == 0
        x = x / torch.where(greedy, 1, number["temperature"])
        kept = x >= _cut(x, flag["top_k"], number["top_p"], number["min_p"])
        noise = gumbel(flag["seed"][:, 0], positions, x.shape[1])
        x = torch.where(greedy, x, torch.where(kept, x + noise, float("-inf")))
    best, token = x.max(-1)
    return torch.where(usable & torch.isfinite(best), token, -1)


def _is_plain(
    number: dict[str, Tensor],
    flag: dict[str, Tensor],
    bias_ids: Tensor,
    positions: Tensor,
    token_mask: Tensor | None,
    usable: Tensor,
) -> bool:
    """Whether the largest logit is the choice of every usable row."""
    greedy = (number["temperature"] == 0) & (flag["masked"] == 0) & (flag["penalised"] == 0)
    plain = greedy & (positions[:, None] >= flag["first_stop"]) & (bias_ids < 0)
    if token_mask is not None:
        plain = plain & (token_mask == -1).all(-1, keepdim=True)
    return bool((plain.all(-1) | ~usable).all())


def _columns(rows: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Each [N, 1] column by name."""
    return {name: rows[:, i : i + 1] for i, name in enumerate(names)}


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """bool [N, V] from int32 [N, W]."""
    shift = torch.arange(32, device=words.device, dtype=words.dtype)
    return ((words[:, :, None] >> shift) & 1).flatten(1)[:, :vocab_size].bool()


def _marked(ids: Tensor, on: Tensor, vocab_size: int) -> Tensor:
    """bool [N, V]: the ids [N, E] for which `on` [N, E] holds."""
    hits = torch.zeros(ids.shape[0], vocab_size, dtype=torch.int32, device=ids.device)
    return hits.scatter_add(1, torch.where(on, ids, 0), on.int()) > 0


def _drafts_before(ids: Tensor, vocab_size: int) -> Tensor:
    """int32 [R * Q, V]: for each row j, how often each token is among ids 1..j of its request.

    An id of `vocab_size` or more is a row of an image.
    """
    requests, rows = ids.shape
    one_hot = torch.zeros(requests, rows, vocab_size, dtype=torch.int32, device=ids.device)
    fed = ids < vocab_size
    fed[:, 0] = False
    one_hot.scatter_(2, torch.where(fed, ids, 0)[:, :, None], fed[:, :, None].int())
    return one_hot.cumsum(1, dtype=torch.int32).flatten(0, 1)


def _penalise(x: Tensor, counts: Tensor, seen: Tensor, number: dict[str, Tensor]) -> Tensor:
    """Repetition (Keskar et al. 2019, CTRL), then frequency and presence (OpenAI's API)."""
    repetition = number["repetition_penalty"]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - number["frequency_penalty"] * counts
    return x - number["presence_penalty"] * (counts > 0)


def _cut(x: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that all three filters keep, [N, 1]: each filter is a threshold."""
    falling = x.sort(-1, descending=True).values
    # In this order: top-p applies to the tokens that the first two filters keep.
    cut = falling[:, :1] + min_p.log()
    last = (top_k.clamp(1, x.shape[1]) - 1).clamp(min=0)
    kth = falling.gather(1, last)
    cut = torch.where(top_k > 0, torch.maximum(cut, kth), cut)
    weight = torch.where(falling >= cut, (falling - falling[:, :1]).exp(), 0)
    total = weight.cumsum(-1)
    before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], -1)
    inside = (before < top_p * total[:, -1:]) & (falling >= cut)
    edge = torch.where(inside, falling, float("inf")).amin(-1, keepdim=True)
    return torch.where(top_p < 1, torch.maximum(cut, edge), cut)


@operator(
    Traits("request", "elements", requests="ids num_emitted state_slots", slots="output_counts"),
    mutates_args=("output_counts",),
)
def count_tokens(
    output_counts: Tensor, ids: Tensor, num_emitted: Tensor, state_slots: Tensor
) -> None:
    """Add emitted tokens to their requests' counts.

    Args:
        output_counts: int32 [S, V].
        ids: int64 [R, W]; the first num_emitted are counted.
        num_emitted: int32 [R].
        state_slots: int64 [R], distinct; a request that is off changes nothing.
    """
    column = torch.arange(ids.shape[1], device=ids.device)
    live = (column < num_emitted[:, None]) & (state_slots[:, None] != SCRATCH_SLOT)
    flat = state_slots[:, None] * output_counts.shape[1] + torch.where(live, ids, 0)
    output_counts.view(-1).index_add_(0, flat.flatten(), live.flatten().to(output_counts.dtype))


@operator(
    Traits(
        "request",
        "sums",
        rows="logits",
        requests="logprobs top_ids top_logprobs ids num_emitted state_slots",
        slots="ints",
        skips_idle=True,
    ),
    mutates_args=("logprobs", "top_ids", "top_logprobs"),
)
def write_logprobs(
    logprobs: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    logits: Tensor,
    ids: Tensor,
    num_emitted: Tensor,
    state_slots: Tensor,
    ints: Tensor,
    places: Tensor | None = None,
) -> None:
    """Log-probabilities of emitted tokens and of the most probable tokens, by unadjusted logits.

    Rows of requests that ask for none, and rows of tokens that are not emitted, stay as they are.

    Args:
        logprobs: float64 [R, W'], W' >= W.
        top_ids: int64 [R, W', n].
        top_logprobs: float64 [R, W', n], falling.
        logits: [R * W, V]. With `places` [M, V].
        ids: int64 [R, W]; the first num_emitted are recorded.
        num_emitted: int32 [R].
        state_slots: int64 [R].
        ints: int64 [S, len(INTS)].
        places: int64 [R * W], the row of `logits` of each token; None: its own.
    """
    requests, width = ids.shape
    asked = ints[state_slots][:, INTS.index("logprobs")]
    live = (state_slots != SCRATCH_SLOT) & (asked >= 0)
    rows = live[:, None] & (torch.arange(width, device=ids.device) < num_emitted[:, None])
    if not rows.any():
        return
    chosen_from = logits if places is None else logits[places]
    all_logprobs = chosen_from.double().log_softmax(-1).view(requests, width, -1)
    chosen = all_logprobs.gather(2, ids[:, :, None])[:, :, 0]
    top = all_logprobs.sort(stable=True, dim=-1, descending=True)
    count = top_ids.shape[2]
    for target, value, wanted in (
        (logprobs, chosen, rows),
        (top_ids, top.indices[:, :, :count], rows[:, :, None]),
        (top_logprobs, top.values[:, :, :count], rows[:, :, None]),
    ):
        held = target[:, :width]
        held.copy_(torch.where(wanted, value, held))
