"""Mamba-2's selective scan for several rows a request, with state that rolls back.

Dao and Gu, Transformers are SSMs (arXiv:2405.21060), as transformers computes it for Nemotron-H.
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


class _Terms(NamedTuple):
    decay: Tensor  # [..., HV]
    b: Tensor  # [..., HV, N]
    c: Tensor  # [..., HV, N]
    added: Tensor  # dt x, [..., HV, P]
    skipped: Tensor  # D x, [..., HV, P]


@dataclass(frozen=True)
class _SelectiveScan(Rule):
    bias: Tensor | None  # [C]
    a_log: Tensor  # [HV]
    skip: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    state_dim: int
    groups: int

    def terms(self, taps: Tensor, rows: Tensor) -> _Terms:
        wide = torch.promote_types(rows.dtype, torch.float32)
        mixed = (taps.to(wide) * self.conv.to(wide).t()).sum(-2)
        if self.bias is not None:
            mixed = mixed + self.bias.to(wide)
        mixed = F.silu(mixed.to(rows.dtype)).to(wide)  # Rounded as a convolution of its own is.
        keys = self.groups * self.state_dim
        x, b, c = mixed.split([self.channels - 2 * keys, keys, keys], -1)
        b, c = (self._by_head(part) for part in (b, c))
        x = x.unflatten(-1, (len(self.a_log), -1))
        dt = F.softplus(rows[..., self.channels :].to(wide) + self.dt_bias.to(wide))
        decay = (-self.a_log.to(wide).exp() * dt).exp()
        return _Terms(decay, b, c, x * dt[..., None], x * self.skip.to(wide)[:, None])

    def _by_head(self, x: Tensor) -> Tensor:
        """Rows [..., G N] -> [..., HV, N], repeated for the heads of a group."""
        times = len(self.a_log) // self.groups
        return x.unflatten(-1, (self.groups, -1)).repeat_interleave(times, -2)

    def update(self, state: Tensor, terms: _Terms) -> Tensor:
        added = terms.b[..., None] * terms.added[..., None, :]
        return state * terms.decay[..., None, None] + added

    def read(self, state: Tensor, terms: _Terms) -> Tensor:
        return (state * terms.c[..., None]).sum(-2) + terms.skipped


@operator(RECURS, by_head, mutates_args=STATE)
def mamba2_scan(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    recurrent: Tensor,
    history: Tensor,
    standing: Tensor,
    state_slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    certain_lens: Tensor,
    groups: int,
) -> Tensor:
    """Causal convolution with SiLU, then the selective scan, over flat rows with state.

    Per head, with dt = softplus(dt + dt_bias):
    S <- exp(-exp(a_log) dt) S + b (dt x)^T; out = c S + skip x.

    Rows [T, C + HV] are x [HV P], b [G N], c [G N] before the convolution (C in all), then dt [HV].
    Head h uses group h // (HV / G); `groups` is G. `conv_bias` is [C], or None; `skip` [HV] is D in
    the paper. The state is `recurrent` [S, HV, N, P] and `history` [S, B, C + HV]. Other arguments,
    and dtypes, are those of `mtpc::gated_delta_rule`. Returns [T, HV, P], dtype of rows; zeros for
    rows that belong to no request that is on.
    """
    weights = (conv_weight, conv_bias, a_log, skip, dt_bias)
    rule = _SelectiveScan(*weights, recurrent.shape[2], groups)
    at = (state_slots, seq_lens, query_start_loc, certain_lens)
    return run_recurrence(rule, rows, RequestState(recurrent, history, standing, *at))
