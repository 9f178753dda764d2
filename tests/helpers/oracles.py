"""Independent oracles: plain transformers decoding, and drafts computed without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from helpers.released import PAGES
from helpers.tiny import family_of, num_layers, text_config
from helpers.uncached import logits_of, target_features
from mtpc.models.hf import model_class
from mtpc.models.seams import CACHE

MIN_MARGIN = 1e-6
"""The least top-1 margin of a logit row in a test. It is far above float64 rounding, so that
another order of summation does not change a token."""


FLOAT32_INSIDE = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "qwen4_exp")
"""Families whose recurrence transformers computes in float32, whatever the model's dtype."""
MIN_MARGIN_FLOAT32 = 1e-4
"""Their margin: logits of the tiny models differ from float64's by about 4e-6."""


class Oracle:
    """Plain greedy decoding of one checkpoint with transformers' eager code, uncached, memoised."""

    def __init__(self, family: str, directory: Path, dtype: torch.dtype = torch.float64):
        self.name, self.family, self.directory = family, family_of(family), directory
        self.model: Any = model_class(self.family).from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        inexact = self.family.name in FLOAT32_INSIDE
        self.min_margin = MIN_MARGIN_FLOAT32 if inexact else MIN_MARGIN
        self.stop_ids = {text_config(self.model).eos_token_id}
        self._continuations: dict[tuple[int, ...], list[int]] = {}

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        """The target's hidden states, [1, L, ...]: after its final norm, or all streams."""
        return target_features(self.model, torch.tensor([ids]))

    @torch.no_grad()
    def next_token(self, features: torch.Tensor) -> int:
        """The argmax of the last row's logits; asserts its margin."""
        top = logits_of(self.model, features[:, -1:])[0, 0].topk(2)
        margin = float(top.values[0] - top.values[1])
        assert margin > self.min_margin, f"top-1 margin {margin} is too small to prove anything"
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
    """The drafts of the MTP layers after a committed sequence, in a page of plain uncached code."""

    def __init__(self, oracle: Oracle, page: Any = None):
        self.oracle = oracle
        self.page = page or PAGES[oracle.family.name](
            oracle.model, oracle.directory, num_layers(oracle.name)
        )

    def drafts(self, committed: list[int], count: int) -> list[int]:
        """`count` drafts after `committed`, whose last token is the bonus token."""
        return [self._choose(logits) for logits in self.page.drafts(committed, count)]

    def _choose(self, logits: torch.Tensor) -> int:
        top = logits.topk(2)
        margin = float(top.values[0] - top.values[1])
        least = self.oracle.min_margin
        assert margin > least, f"top-1 margin {margin} is too small to prove anything"
        return int(top.indices[0])


class TransformersDraftOracle(DraftOracle):
    """The same, computed by transformers' own `MtpModel`, which feeds features after both norms."""

    FINAL: ClassVar[dict[str, str]] = {"step3p7": "transformer.shared_head.norm.weight"}

    def __init__(self, oracle: Oracle):
        super().__init__(oracle)
        from transformers.modeling_layers import MtpModel

        page, config = self.page, text_config(oracle.model)
        # get_mtp_config does not copy these.
        if getattr(config, "num_sliding_attention_heads", None):
            heads = {"num_attention_heads": config.num_sliding_attention_heads}
            kinds = enumerate(config.mtp_layer_types)
            config.mtp_per_layer_config = {i: heads for i, k in kinds if k == "sliding_attention"}
        self.mtp = MtpModel(oracle.model, page.count).to(oracle.model.dtype).eval()
        final = self.FINAL.get(oracle.family.name, "shared_head.norm.weight")
        names = {"enorm": "enorm.weight", "hnorm": "hnorm.weight", "eh_proj": "eh_proj.weight"}
        for index, (layer, block) in enumerate(zip(self.mtp.layers, page.blocks, strict=True)):
            state = {f"mtp_block.{name}": tensor for name, tensor in block.state_dict().items()}
            for name, stored in {**names, "post_norm": final}.items():
                state[f"{name}.weight"] = page.tensor(index, stored)
            layer.load_state_dict(state)
        self.mtp.config._attn_implementation = "eager"
        self.mtp.config._experts_implementation = "eager"

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[int]:
        """The chain of `ReleasedMTP.drafts`, with the target's head."""
        ids, fed, found = committed[1:], self.oracle.hidden(committed[:-1]), []
        for step in range(count):
            index = min(step, self.page.count - 1)
            out = self.run(index, ids, fed)
            found.append(self.oracle.next_token(out))
            if step + 1 < self.page.count:
                ids, fed = [*ids[1:], found[-1]], out
            else:
                ids, fed = [*ids, found[-1]], torch.cat([fed, out[:, -1:]], 1)
        return found

    def run(self, index: int, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        """transformers numbers draft positions one higher than we do; rotary cannot tell."""
        positions, token_ids = torch.arange(1, len(ids) + 1)[None], torch.tensor([ids])
        if hasattr(self.mtp, "forward_layer"):
            return self.mtp.forward_layer(index, features, positions, None, input_ids=token_ids)
        # Up to transformers 5.17 or so a layer's call stands in `forward` only, with the sampling.
        embeds = self.mtp.embed_tokens(token_ids)
        masks = self.mtp.create_masks_for_mtp_layer(index, embeds, None, positions)
        features = self.mtp.layers[index](
            embeds,
            features,
            position_embeddings=self.mtp.rotary_emb(embeds, position_ids=positions),
            position_ids=positions,
            **{CACHE: None},
            **masks,
        )
        return self.mtp.shared_post_norm(features) if self.mtp.use_shared_post_norm else features
