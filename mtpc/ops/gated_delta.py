"""The gated delta rule (Gated DeltaNet) for several rows a request, with state that rolls back.

Yang et al., Gated Delta Networks (arXiv:2412.06464), as transformers computes it for Qwen3-Next.
`mtpc.ops.recurrence` says what the state holds, and why nothing is rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtpc.ops.recurrence import RECURS, STATE, RequestState, Rule, by_head, run_recurrence
from mtpc.ops.traits import operator

_EPSILON = 1e-6
"""Epsilon of the norms of queries and keys, as in the flash-linear-attention library."""


class _Terms(NamedTuple):
    query: Tensor  # [..., HV, Dk]
    key: Tensor  # [..., HV, Dk]
    value: Tensor  # [..., HV, Dv]
    decay: Tensor  # [..., HV]
    beta: Tensor  # [..., HV]


@dataclass(frozen=True)
class _GatedDelta(Rule):
    a_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    key_dim: int
    value_dim: int

    def terms(self, taps: Tensor, rows: Tensor) -> _Terms:
        acc = torch.promote_types(rows.dtype, torch.float32)
        heads = self.a_log.shape[0]
        mixed = (taps.to(acc) * self.conv.to(acc).t()).sum(-2).to(rows.dtype)
        mixed = F.silu(mixed).to(acc)  # Rounded before and after, as a convolution of its own is.
        values = heads * self.value_dim
        keys = (self.channels - values) // 2
        query, key, value = mixed.split([keys, keys, values], -1)
        query, key = (_unit(x.unflatten(-1, (-1, self.key_dim)), heads) for x in (query, key))
        b, a = rows[..., self.channels :].chunk(2, -1)
        rate = self.a_log.to(acc).exp() * F.softplus(a.to(acc) + self.dt_bias.to(acc))
        value = value.unflatten(-1, (heads, -1))
        return _Terms(query * self.key_dim**-0.5, key, value, (-rate).exp(), b.sigmoid().to(acc))

    def update(self, state: Tensor, terms: _Terms) -> Tensor:
        state = state * terms.decay[..., None, None]
        found = (state * terms.key[..., None]).sum(-2)
        delta = (terms.value - found) * terms.beta[..., None]
        return state + terms.key[..., None] * delta[..., None, :]

    def read(self, state: Tensor, terms: _Terms) -> Tensor:
        return (state * terms.query[..., None]).sum(-2)


def _unit(x: Tensor, heads: int) -> Tensor:
    """Vectors of length 1, repeated for the value heads they serve."""
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
    return x.repeat_interleave(heads // x.shape[-2], -2)


@operator(RECURS, by_head, mutates_args=STATE)
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
    rule = _GatedDelta(conv_weight, a_log, dt_bias, recurrent.shape[2], recurrent.shape[3])
    at = (state_slots, seq_lens, query_start_loc, certain_lens)
    return run_recurrence(rule, rows, RequestState(recurrent, history, standing, *at))
