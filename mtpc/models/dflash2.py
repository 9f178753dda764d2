"""What DFlash2 adds to DFlash: convolutions within a block, and a choice among candidates.

Before and after attention and MLP of each layer, a row is mixed with the rows before it in its
block, by weights that follow from the row itself. The drafts of a block are chosen in order: each
is one of the tokens with the largest logits, and how it follows the token before it counts, too.

Source: speculators 0.9 (models/dflash2), which has it from the authors (github.com/z-lab/dflash, at
07ebd93), and vLLM's qwen3_dflash2.py and SGLang's models/dflash.py for entries of `dflash_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from mtpc.errors import CheckpointError


@dataclass(frozen=True)
class DFlash2Config:
    """What a DFlash2 drafter's config.json says beside DFlash's entries.

    Attributes:
        taps: rows that a convolution mixes, a row's own included.
        group: channels that share a convolution's weights of a row.
        rank: width of the selector's tables.
        candidates: tokens that a draft is chosen from.
        multiplier: of logits.
        softcap: bounds logits, after `multiplier`; 0: nothing does.
    """

    taps: int
    group: int
    rank: int
    candidates: int
    multiplier: float
    softcap: float

    @classmethod
    def read(cls, entries: Mapping[str, Any], hidden: int, size: int, where: Any) -> DFlash2Config:
        """From the entries of a drafter of width `hidden` with `size` tokens.

        Raises:
            CheckpointError: an entry is missing, or does not fit.
        """
        bounds = {"conv_kernel_size": None, "conv_group_size": hidden}
        bounds |= {"selector_rank": None, "selector_top_k": size}
        for name, bound in bounds.items():
            found = entries.get(name)
            if type(found) is not int or found < 1 or (bound and found > bound):
                most = f" of at most {bound}" if bound else ""
                raise CheckpointError(
                    f"{where}: {name} is {found}; expected a number{most}: set it in "
                    "dflash_config, as the drafter was trained"
                )
        group, rows = entries["conv_group_size"], entries.get("draft_vocab_size") or size
        if hidden % group or rows != size:
            raise CheckpointError(
                f"{where}: conv_group_size is {group} and draft_vocab_size {rows}; expected a "
                f"divisor of hidden_size {hidden}, and a head for all {size} tokens"
            )
        scales = (entries.get("output_multiplier") or 1.0, entries.get("final_logit_softcapping"))
        taps, group, rank, candidates = (entries[name] for name in bounds)
        return cls(taps, group, rank, candidates, float(scales[0]), float(scales[1] or 0))


class BlockConvolution(nn.Module):
    """Mixes rows with those before them in a block, before and after a part of a layer."""

    def __init__(self, hidden: int, config: DFlash2Config):
        super().__init__()
        self.taps, self.group = config.taps, config.group
        self.base_kernel = nn.Parameter(torch.zeros(2, config.taps, hidden))
        groups = hidden // config.group
        self.kernel_projection = nn.Linear(hidden, 2 * config.taps * groups, bias=False)

    def forward(self, rows: Tensor, place: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """rows [1, T, H], of places [T] in their blocks -> what `part` makes of them, [1, T, H]."""
        shape = (2, self.taps, rows.shape[-1] // self.group, 1)
        own = self.kernel_projection(rows).unflatten(-1, shape)
        before, after = (own.select(2, side) for side in (0, 1))
        return self._mixed(part(self._mixed(rows, place, before, 0)), place, after, 1)

    def _mixed(self, rows: Tensor, place: Tensor, own: Tensor, side: int) -> Tensor:
        """The convolution by the weights of this side and each row's `own`, [1, T, taps, G, 1]."""
        base = self.base_kernel[side].unflatten(-1, (-1, self.group))
        grouped = rows.unflatten(-1, (-1, self.group))
        mixed = grouped * (base[0] + own[:, :, 0])
        token = torch.arange(place.shape[0], device=place.device)
        for tap in range(1, self.taps):
            within = (place >= tap)[:, None, None]
            earlier = grouped.index_select(1, (token - tap).clamp(min=0))
            earlier = torch.where(within, earlier, 0)
            mixed = mixed + earlier * (base[tap] + own[:, :, tap])
        return mixed.flatten(-2)


class ConvolvedLayer(qwen3.Qwen3DecoderLayer):
    """Qwen3's layer with convolutions around attention and MLP."""

    def __init__(self, layers: Any, index: int, config: DFlash2Config):
        super().__init__(layers, index)
        self.attention_conv = BlockConvolution(layers.hidden_size, config)
        self.mlp_conv = BlockConvolution(layers.hidden_size, config)

    def forward(self, hidden: Tensor, place: Tensor, **given: Any) -> Tensor:
        """Rows [1, T, H] of places [T] in their blocks -> [1, T, H]."""

        def attend(rows: Tensor) -> Tensor:
            found: Tensor = self.self_attn(hidden_states=rows, **given)[0]
            return found

        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), place, attend)
        normed = self.post_attention_layernorm(hidden)
        mixed: Tensor = hidden + self.mlp_conv(normed, place, self.mlp)
        return mixed


class CandidateSelector(nn.Module):
    """Adds to the largest logits what the token before a draft says, and leaves no others."""

    def __init__(self, hidden: int, size: int, config: DFlash2Config):
        super().__init__()
        self.config = config
        self.predecessor_codebook = nn.Parameter(torch.zeros(size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(size, config.rank))
        self.hidden_projection = nn.Linear(hidden, config.rank, bias=False)

    def forward(self, logits: Tensor, features: Tensor, before: Tensor) -> Tensor:
        """Logits [R, V], normed features [R, H], the tokens before [R] -> logits [R, V]."""
        found, ids = logits.topk(self.config.candidates)
        if self.config.multiplier != 1:
            found = found * self.config.multiplier
        if self.config.softcap:
            found = torch.tanh(found / self.config.softcap) * self.config.softcap
        context = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(features)
        follows = (context[:, None] * F.embedding(ids, self.successor_codebook)).sum(-1)
        none = torch.full_like(logits, float("-inf"))
        return none.scatter(1, ids, found + follows)


class Selection(nn.Module):
    """The piece `draft_bias` of a drafter: (logits [R, V], features [R, H], tokens [R]) -> logits.

    Features come as the last layer gives them, before the norm.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.norm, self.selector = layer.final_norm, layer.candidate_selector

    def forward(self, logits: Tensor, features: Tensor, before: Tensor) -> Tensor:
        found: Tensor = self.selector(logits, self.norm(features), before)
        return found
