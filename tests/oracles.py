"""Independent oracles: plain transformers decoding, and drafts computed without any cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import (
    family_of,
    logits_of,
    num_layers,
    rotate,
    run_mtp_uncached,
    target_features,
    text_config,
)

from mtpc.models.hf import model_class
from mtpc.models.mtp_layers import load_mtp_layer
from mtpc.weights.checkpoint import Checkpoint

MIN_MARGIN = 1e-6
"""Least top-1 margin of a logit row that a test may rest on: far above float64 rounding, so a
different order of summation cannot excuse a different token."""


FLOAT32_INSIDE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose recurrence transformers computes in float32, whatever the model's dtype."""
MIN_MARGIN_FLOAT32 = 1e-4
"""Theirs: logits of the tiny models differ from float64's by some 4e-6."""


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
        """What the target feeds to the draft, [1, L, ...]."""
        return target_features(self.model, torch.tensor([ids]))

    @torch.no_grad()
    def next_token(self, features: torch.Tensor, layer: Any = None) -> int:
        """Argmax of the last row's logits, its margin asserted; of an MTP layer's, if given."""
        top = logits_of(self.model, features[:, -1:], layer)[0, 0].topk(2)
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
    """What the MTP layers draft after a committed sequence, from the wiring alone, uncached."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle
        stored = Checkpoint(oracle.directory)
        self.layers: list[Any] = [
            load_mtp_layer(stored, oracle.family, oracle.model, index)
            for index in range(num_layers(oracle.name))
        ]

    def run(self, index: int, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        """Features of MTP layer `index` over all rows, [1, L, H]."""
        layer, rows = self.layers[index], torch.tensor([ids])
        return run_mtp_uncached(self.oracle.name, self.oracle.model, layer, rows, features)

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[int]:
        """`count` drafts after `committed`, whose last token is the bonus token.

        Row t of MTP layer i pairs what layer i - 1 gave there (the first: the target's hidden)
        with token t + i + 1, the last ones drafts; everything is computed anew. Beyond the last
        layer each step appends a row to it, of the last draft and its own last output.
        """
        ids, features = committed[1:], self.oracle.hidden(committed[:-1])
        drafts: list[int] = []
        for step in range(count):
            index = min(step, len(self.layers) - 1)
            out = self.run(index, ids, features)
            drafts.append(self.oracle.next_token(out, self.layers[index]))
            if step + 1 < len(self.layers):
                ids, features = [*ids[1:], drafts[-1]], out
            else:
                ids, features = [*ids, drafts[-1]], torch.cat([features, out[:, -1:]], 1)
        return drafts


class QwenDraftOracle(DraftOracle):
    """The same for Qwen3-Next and Qwen3.5, from the stored tensors by their released names."""

    def __init__(self, oracle: Oracle):
        self.oracle, model = oracle, oracle.model
        stored = load_file(oracle.directory / "model.safetensors")
        self.mtp = {n[4:]: t.double() for n, t in stored.items() if n.startswith("mtp.")}
        config = copy.deepcopy(model.config)
        config.layer_types = [*config.layer_types, "full_attention"]
        last = len(model.get_decoder().layers)
        self.block = type(model.get_decoder().layers[0])(config, last).double().eval()
        names = [n for n in self.mtp if n.startswith("layers.0.") and ".experts." not in n]
        state = {n.removeprefix("layers.0."): self.mtp[n] for n in names}
        if any(".experts." in n for n in self.mtp):
            expert = "layers.0.mlp.experts.{}.{}_proj.weight".format
            each = range(config.num_experts)
            state["mlp.experts.gate_up_proj"] = torch.stack(
                [torch.cat([self.mtp[expert(i, part)] for part in ("gate", "up")]) for i in each]
            )
            state["mlp.experts.down_proj"] = torch.stack(
                [self.mtp[expert(i, "down")] for i in each]
            )
        self.block.load_state_dict(state)
        self.layers = [self.block]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm times 1 + weight."""
        eps = self.oracle.model.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + self.mtp[name])

    def run(self, index: int, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        model, positions = self.oracle.model, torch.arange(len(ids))[None]
        embedding = model.get_input_embeddings()(torch.tensor([ids]))
        parts = [
            self.norm(embedding, "pre_fc_norm_embedding.weight"),
            self.norm(features, "pre_fc_norm_hidden.weight"),
        ]
        hidden = torch.cat(parts, -1) @ self.mtp["fc.weight"].t()
        mask = torch.full((len(ids), len(ids)), float("-inf"), dtype=hidden.dtype).triu(1)
        hidden = self.block(
            hidden,
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=rotate(model, hidden, positions),
        )
        return self.norm(hidden, "norm.weight")


class TransformersDraftOracle(DraftOracle):
    """The same, computed by transformers' own `MtpModel`."""

    def __init__(self, oracle: Oracle):
        super().__init__(oracle)
        from transformers.modeling_layers import MtpModel

        count, config = len(self.layers), text_config(oracle.model)
        if getattr(config, "num_sliding_attention_heads", None):  # What get_mtp_config forgets.
            heads = {"num_attention_heads": config.num_sliding_attention_heads}
            kinds = enumerate(config.mtp_layer_types)
            config.mtp_per_layer_config = {i: heads for i, k in kinds if k == "sliding_attention"}
        self.mtp = MtpModel(oracle.model, count).to(oracle.model.dtype).eval()
        names = {
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "projection": "eh_proj",
            "block": "mtp_block",
            "final_norm": "post_norm",
        }
        for mtp_layer, layer in zip(self.mtp.layers, self.layers, strict=True):
            state = {}
            for name, tensor in layer.state_dict().items():
                stem, rest = name.split(".", 1)
                state[f"{names[stem]}.{rest}"] = tensor
            mtp_layer.load_state_dict(state)
        self.mtp.config._attn_implementation = "eager"
        self.mtp.config._experts_implementation = "eager"

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
            past_key_values=None,
            **masks,
        )
        return self.mtp.shared_post_norm(features) if self.mtp.use_shared_post_norm else features
