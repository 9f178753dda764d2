"""Nemotron 3, as vLLM's nemotron_h_mtp.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP


class Nemotron(ReleasedMTP):
    """Features from after both norms; a layer that attends, and one of experts."""

    embedding_name = "backbone.embeddings.weight"

    def __init__(self, model: Any, directory: Path, count: int):
        # vLLM has no least time step; transformers has one for prompts alone.
        for layer in model.get_decoder().layers:
            if hasattr(layer.mixer, "time_step_limit"):
                layer.mixer.time_step_limit = (0.0, float("inf"))
        super().__init__(model, directory, count)

    def prefix(self, index: int) -> str:
        return "mtp."

    def block(self, index: int) -> Any:
        config, count = self.private_config(), self.config.num_hidden_layers
        config.layer_types = [*config.layer_types, "full_attention", "moe"]
        blocks = torch.nn.ModuleList()
        for place in range(2):
            block = type(self.decoder.layers[0])(config, count + place)
            prefix = f"layers.{place}."
            parts = (f"{prefix}norm.", f"{prefix}mixer.")
            state = {n.removeprefix(prefix): t for n, t in self.state(index, parts).items()}
            for name in ("up_proj", "down_proj") if place else ():
                rows = [
                    state.pop(f"mixer.experts.{i}.{name}.weight")
                    for i in range(config.n_routed_experts)
                ]
                state[f"mixer.experts.{name}"] = torch.stack(rows)
            block.load_state_dict(state)
            if place:  # transformers adds the experts up in the dtype of their weights, float32.
                block.mixer.gate.register_forward_hook(
                    lambda _, x, out: (*out[:1], out[1].double(), out[2])
                )
            blocks.append(block)
        return blocks

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "layers.0.enorm.weight"))
        hidden = self.rms(fed, self.tensor(index, "layers.0.hnorm.weight"))
        x = torch.cat([token, hidden], -1) @ self.tensor(index, "layers.0.eh_proj.weight").t()
        mask = torch.full((len(x), len(x)), float("-inf")).double().triu(1)
        for block in self.blocks[index]:
            x = block(x[None], attention_mask=mask[None, None])[0]
        return self.rms(x, self.tensor(index, "layers.1.final_layernorm.weight"))

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product with the weight is in float32, too."""
        single = x.float()
        eps = self.config.layer_norm_epsilon
        single = single * torch.rsqrt(single.pow(2).mean(-1, True) + eps)
        return (weight.float() * single).double()
