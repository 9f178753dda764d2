"""Independent oracles: plain transformers decoding, and drafts computed without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import family_of, logits_of, run_mtp_uncached, target_features

from mtpc.checkpoint import Checkpoint
from mtpc.models.mtp_layers import load_mtp_layer

MIN_MARGIN = 1e-6
"""Least top-1 margin of a logit row that a test may rest on: far above float64 rounding, so a
different order of summation cannot excuse a different token."""


class Oracle:
    """Plain greedy decoding of one checkpoint with transformers' eager code, uncached, memoised."""

    def __init__(self, family: str, directory: Path, dtype: torch.dtype = torch.float64):
        self.family, self.directory = family_of(family), directory
        self.model: Any = getattr(transformers, self.family.hf_class).from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        self.stop_ids = {self.model.config.eos_token_id}
        self._continuations: dict[tuple[int, ...], list[int]] = {}

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        """What the target feeds to the draft, [1, L, ...]."""
        return target_features(self.model, torch.tensor([ids]))

    @torch.no_grad()
    def next_token(self, features: torch.Tensor, layer: Any = None) -> int:
        """Argmax of the last row's logits, its margin asserted; of an MTP layer's, if given."""
        top = logits_of(self.model, features[:, -1:], layer)[0, 0].topk(2)
        margin = float(top.values[0] - top.values[1])
        assert margin > MIN_MARGIN, f"top-1 margin {margin} is too small to prove anything"
        return int(top.indices[0])

    def generate(self, prompt: list[int], max_new_tokens: int, stop: bool = True) -> list[int]:
        """Greedy continuation; ends after a stop token."""
        known = self._continuations.setdefault(tuple(prompt), [])
        while len(known) < max_new_tokens:
            known.append(self.next_token(self.hidden([*prompt, *known])))
        out = known[:max_new_tokens]
        ends = [i for i, token in enumerate(out) if token in self.stop_ids] if stop else []
        return out[: ends[0] + 1] if ends else out


class DraftOracle:
    """What the MTP layer drafts after a committed sequence, from the wiring alone, uncached."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle
        self.layer = load_mtp_layer(Checkpoint(oracle.directory), oracle.family, oracle.model, 0)

    def run(self, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        """Draft features over all rows, [1, L, H]."""
        return run_mtp_uncached(self.oracle.model, self.layer, torch.tensor([ids]), features)

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[int]:
        """`count` drafts after `committed`, whose last token is the bonus token.

        Row t pairs hidden t with token t + 1; each further step appends a row made of the last
        draft and the draft layer's own last output, and recomputes everything.
        """
        ids, features = committed[1:], self.oracle.hidden(committed[:-1])
        drafts: list[int] = []
        for _ in range(count):
            out = self.run(ids, features)
            drafts.append(self.oracle.next_token(out, self.layer))
            ids, features = [*ids, drafts[-1]], torch.cat([features, out[:, -1:]], 1)
        return drafts


class TransformersDraftOracle(DraftOracle):
    """The same, computed by transformers' own `MtpModel` (glm4_moe and deepseek_v3)."""

    def __init__(self, oracle: Oracle):
        super().__init__(oracle)
        from transformers.modeling_layers import MtpModel

        self.mtp = MtpModel(oracle.model, 1).to(oracle.model.dtype).eval()
        names = {
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "projection": "eh_proj",
            "block": "mtp_block",
            "final_norm": "post_norm",
        }
        state = {}
        for name, tensor in self.layer.state_dict().items():
            stem, rest = name.split(".", 1)
            state[f"{names[stem]}.{rest}"] = tensor
        self.mtp.layers[0].load_state_dict(state)
        self.mtp.config._attn_implementation = "eager"
        self.mtp.config._experts_implementation = "eager"

    def run(self, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        """transformers numbers draft positions one higher than we do; rotary cannot tell."""
        positions = torch.arange(1, len(ids) + 1)[None]
        return self.mtp.forward_layer(0, features, positions, None, input_ids=torch.tensor([ids]))
