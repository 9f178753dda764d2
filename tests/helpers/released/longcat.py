"""LongCat-Flash, as vLLM's longcat_flash_mtp.py and SGLang's longcat_flash_nextn.py run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP


class Longcat(ReleasedMTP):
    """Features from after both norms; one attention and one feed-forward, without experts."""

    def prefix(self, index: int) -> str:
        return "model.mtp."

    def block(self, index: int) -> Any:
        layer = type(self.decoder.layers[0])(self.private_config(), self.config.num_layers)
        parts = torch.nn.ModuleDict({"self_attn": layer.self_attn[0], "mlp": layer.mlps[0]})
        names = ("layers.0.self_attn.", "layers.0.transformer_layer.mlp.")
        state = self.state(index, names)
        strip = ("layers.0.", "transformer_layer.")
        for prefix in strip:
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        parts.load_state_dict(state)
        return parts

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        table = self.stored.get("model.mtp.embed_tokens.weight", self.stored[self.embedding_name])
        token = self.norm("layers.0.enorm.m", table[torch.tensor(ids)])
        hidden = self.norm("layers.0.hnorm.m", fed)
        x = torch.cat([token, hidden], -1) @ self.tensor(0, "layers.0.eh_proj.weight").t()
        x = x + self.attend(self.norm("layers.0.input_layernorm", x))
        x = x + self.blocks[0]["mlp"](self.norm("layers.0.post_attention_layernorm", x))
        return self.norm("norm", x)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.rms(x, self.tensor(0, f"{name}.weight"))

    def attend(self, x: Tensor) -> Tensor:
        """Over rows x [L, H], each of those up to its own."""
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).double().triu(1)
        return self.blocks[0]["self_attn"](
            hidden_states=x[None],
            attention_mask=mask[None, None],
            position_embeddings=self.rotate(x[None], positions),
        )[0][0]
