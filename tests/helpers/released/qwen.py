"""Qwen3-Next and Qwen3.5, as vLLM's qwen3_next_mtp.py and SGLang's qwen3_next_mtp.py run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP, stack_experts


class Qwen(ReleasedMTP):
    """Features from after both norms; the block is a full-attention layer."""

    adds_one = True
    kind = "full_attention"
    """Layer type of the block."""

    def prefix(self, index: int) -> str:
        return "mtp."

    def block(self, index: int) -> Any:
        config = self.private_config()
        config.layer_types = [*config.layer_types, self.kind]
        block = type(self.decoder.layers[0])(config, config.num_hidden_layers)
        state = self.state(index, ("layers.0.",))
        state = {name.removeprefix("layers.0."): tensor for name, tensor in state.items()}
        block.load_state_dict(stack_experts(state, ("gate_proj", "up_proj", "down_proj")))
        return block

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "pre_fc_norm_embedding.weight"))
        hidden = self.rms(fed, self.tensor(index, "pre_fc_norm_hidden.weight"))
        x = torch.cat([token, hidden], -1) @ self.tensor(index, "fc.weight").t()
        return self.rms(self.run_block(index, x), self.tensor(index, "norm.weight"))

    def rotate(self, x: Tensor, positions: Tensor, kind: str | None = None) -> Any:
        rotary = self.decoder.rotary_emb
        grids = hasattr(rotary, "mrope_section")  # Qwen3.5 has three coordinates, of images.
        return rotary(x, positions.expand(3, 1, -1) if grids else positions)


class Exaone(Qwen):
    """K-EXAONE, as vLLM's exaone_moe_mtp.py runs it: a dense block that slides."""

    adds_one = False

    def private_config(self) -> Any:
        config = super().private_config()
        config.layer_types = [*config.layer_types, "sliding_attention"]
        config.mlp_layer_types = [*config.mlp_layer_types, "dense"]
        return config

    def block(self, index: int) -> Any:
        block = type(self.decoder.layers[0])(self.private_config(), self.config.num_hidden_layers)
        state = self.state(index, ("layers.0.",))
        block.load_state_dict({n.removeprefix("layers.0."): t for n, t in state.items()})
        return block

    def run_block(self, index: int, x: Tensor, kind: str | None = None, window: int = 0) -> Tensor:
        return super().run_block(index, x, kind, self.config.sliding_window)
