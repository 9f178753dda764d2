"""The gated delta rule (Gated DeltaNet) for several rows a request, with state that rolls back.

Yang et al., Gated Delta Networks (arXiv:2412.06464), as transformers computes it for Qwen3-Next.
Rows and requests are as in `mtpc.ops.attention`; row j of a request stands at position
L + j, L = seq_lens - query_len, the committed length.

A request has one row of each of three state tensors, the row `state_slots`:

- `recurrent`: the state matrices after `standing` positions, all of which are certain.
- `history`: the inputs of the last B positions, with position p at p % B. The convolution looks
  back at them, and they are replayed. B = W - 1 + (the most rows of a step that are uncertain).
- `standing`: the number of positions that `recurrent` has seen.

A step first replays positions standing..L-1, which are the accepted drafts of the step before. Then
it runs its rows. `recurrent` keeps the state after the certain rows, and `history` takes all rows.
Rejected rows need no undoing: they never reach `recurrent`, and `history` overwrites them before
anything reads them. L = 0 is a fresh request: its state is zero, whatever the slot holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.ragged import request_of

_EPSILON = 1e-6
"""Epsilon of the norms of queries and keys, as in the flash-linear-attention library."""


class _Weights(NamedTuple):
    """The weights of a layer, and its head dims."""

    conv: Tensor  # [C, W]
    a_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    key_dim: int
    value_dim: int


class _Terms(NamedTuple):
    """The inputs of the recurrence: query, key [..., HV, Dk], value, decay, beta [..., HV]."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    def rows(self, index: tuple[slice | int, ...]) -> _Terms:
        return _Terms(*(part[index] for part in self))


@torch.library.custom_op(
    "mtpc::gated_delta_rule", mutates_args=("recurrent", "history", "standing")
)
def gated_delta_rule(
    rows: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    recurrent: Tensor,
    history: Tensor,
    standing: Tensor,
    state_slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    certain_lens: Tensor,
) -> Tensor:
    """Causal convolution with SiLU, then the gated delta rule, over flat rows with state.

    Per value head, with q, k of length 1 (q / sqrt(Dk)), beta = sigmoid(b) and
    decay = exp(-exp(a_log) softplus(a + dt_bias)):
    S <- decay S; S <- S + k (beta (v - k S))^T; out = q S.

    Args:
        rows: [T, C + 2 HV]: queries [HK Dk], keys [HK Dk], values [HV Dv] before the convolution
            (C in all), then b and a, each [HV]. Value head h uses key head h // (HV / HK).
        conv_weight: [C, W]; its last column multiplies the row itself.
        a_log: [HV].
        dt_bias: [HV].
        recurrent: [S, HV, Dk, Dv], float32, or float64 for float64 rows; written.
        history: [S, B, C + 2 HV], of rows' dtype; written.
        standing: int32 [S]; written.
        state_slots: int64 [R]; 0 where seq_lens is 0, else distinct and above 0.
        seq_lens: int32 [R]; 0: the request is off, and its state stays as it is.
        query_start_loc: int32 [R+1].
        certain_lens: int32 [R], the number of first rows that no later step rolls back.

    Returns:
        [T, HV, Dv], dtype of rows; zeros for rows that belong to no request that is on.
    """
    weights = _Weights(conv_weight, a_log, dt_bias, recurrent.shape[2], recurrent.shape[3])
    starts, lens = query_start_loc[:-1].long(), query_start_loc.diff().long()
    on, committed = seq_lens > 0, seq_lens.long() - lens
    stood = torch.where(on & (committed > 0), standing[state_slots].long(), 0)
    zero = (~on | (stood == 0))[:, None, None, None]
    state = torch.where(zero, 0, recurrent[state_slots])
    past = history[state_slots]

    token = torch.arange(rows.shape[0], device=rows.device)
    request = request_of(token, query_start_loc).clamp(max=len(lens) - 1)
    index = token - starts[request]  # Row of its request.
    live = (index >= 0) & (index < lens[request]) & on[request]
    position = committed[request] + index

    state = _replay(state, past, weights, stood, torch.where(on, committed, 0))
    inputs = rows[:, : conv_weight.shape[0]]
    taps = _taps(inputs, past, request, index, position, conv_weight.shape[1])
    terms = _terms(taps, rows, weights)
    certain = live & (index < certain_lens[request])
    out, state = _run(state, terms, request, live, certain)

    kept = on[:, None, None, None]
    recurrent.index_copy_(0, state_slots, torch.where(kept, state, recurrent[state_slots]))
    seen = committed + torch.minimum(certain_lens.long(), lens)
    seen = torch.where(on, seen, standing[state_slots]).to(standing.dtype)
    standing.index_copy_(0, state_slots, seen)
    remembered = live & (position >= seq_lens[request] - history.shape[1])
    _remember(history, rows, state_slots[request], position, remembered)
    return out.to(rows.dtype)


@gated_delta_rule.register_fake
def _(
    rows: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor, recurrent: Tensor,
    *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    return rows.new_empty((rows.shape[0], recurrent.shape[1], recurrent.shape[3]))


def _terms(taps: Tensor, rows: Tensor, weights: _Weights) -> _Terms:
    """Convolution, gates and norms; taps [..., W, C], rows [..., C + 2 HV]."""
    acc = torch.promote_types(rows.dtype, torch.float32)
    channels, heads = weights.conv.shape[0], weights.a_log.shape[0]
    mixed = (taps.to(acc) * weights.conv.to(acc).t()).sum(-2).to(rows.dtype)
    mixed = F.silu(mixed).to(acc)  # Rounded before and after, as a convolution of its own is.
    values = heads * weights.value_dim
    query, key, value = mixed.split(
        [(channels - values) // 2, (channels - values) // 2, values], -1
    )
    query, key = (_unit(x.unflatten(-1, (-1, weights.key_dim)), heads) for x in (query, key))
    b, a = rows[..., channels:].chunk(2, -1)
    rate = weights.a_log.to(acc).exp() * F.softplus(a.to(acc) + weights.dt_bias.to(acc))
    value = value.unflatten(-1, (heads, -1))
    return _Terms(query * weights.key_dim**-0.5, key, value, (-rate).exp(), b.sigmoid().to(acc))


def _unit(x: Tensor, heads: int) -> Tensor:
    """Vectors of length 1, repeated for the value heads they serve."""
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _update(state: Tensor, terms: _Terms) -> Tensor:
    """One position: state [..., HV, Dk, Dv]."""
    state = state * terms.decay[..., None, None]
    found = (state * terms.key[..., None]).sum(-2)
    delta = (terms.value - found) * terms.beta[..., None]
    return state + terms.key[..., None] * delta[..., None, :]


def _replay(state: Tensor, past: Tensor, weights: _Weights, stood: Tensor, until: Tensor) -> Tensor:
    """State [R, ...] after positions stood..until-1, from the inputs that were kept."""
    length, width = past.shape[1], weights.conv.shape[1]
    if length < width:  # Every row is certain: there is never anything to replay.
        return state
    offset = torch.arange(length, device=past.device) - (width - 1)
    position = stood[:, None] + offset
    rows = past.gather(1, (position % length)[..., None].expand_as(past))
    known = (position >= 0) & (position < until[:, None])
    rows = torch.where(known[..., None], rows, 0)
    windows = rows[..., : weights.conv.shape[0]].unfold(1, width, 1).transpose(-1, -2)
    terms = _terms(windows, rows[:, width - 1 :], weights)
    for step in range(length - width + 1):
        live = (stood + step < until)[:, None, None, None]
        state = torch.where(live, _update(state, terms.rows((slice(None), step))), state)
    return state


def _taps(
    inputs: Tensor, past: Tensor, request: Tensor, index: Tensor, position: Tensor, width: int
) -> Tensor:
    """The inputs of the convolution at each row: W positions, its own the last, [T, W, C]."""
    channels, taps = inputs.shape[1], []
    for back in range(width - 1, -1, -1):
        there = position - back
        older = past[request, there % past.shape[1], :channels]
        older = torch.where((there >= 0)[:, None], older, 0)
        taps.append(torch.where((index >= back)[:, None], inputs.roll(back, 0), older))
    return torch.stack(taps, 1)


def _run(
    state: Tensor, terms: _Terms, request: Tensor, live: Tensor, certain: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, Dv], zeros where not live, and the state after the certain rows."""
    kept, out = state, []
    for row in range(request.shape[0]):
        of = request[row : row + 1]
        before = state[of]
        after = _update(before, terms.rows((slice(row, row + 1),)))
        out.append((after * terms.query[row, :, :, None]).sum(-2))
        state = state.index_copy(0, of, torch.where(live[row], after, before))
        kept = kept.index_copy(0, of, torch.where(certain[row], after, kept[of]))
    return torch.where(live[:, None, None], torch.cat(out), 0), kept


def _remember(
    history: Tensor, rows: Tensor, slots: Tensor, position: Tensor, wanted: Tensor
) -> None:
    """Keep inputs where `wanted`; all others write the first entry of slot 0 back."""
    flat = history.view(-1, history.shape[2])
    target = torch.where(wanted, slots * history.shape[1] + position % history.shape[1], 0)
    flat.index_copy_(0, target, torch.where(wanted[:, None], rows, flat[0]))
