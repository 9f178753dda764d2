"""MiMo-7B, as its authors' vLLM runs it (github.com/XiaomiMiMo/vllm, mimo.py and mimo_mtp.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP


class Mimo(ReleasedMTP):
    """The hidden state before the final norm comes first; position 0 has no embedding."""

    def prefix(self, index: int) -> str:
        return f"model.mtp_layers.{index}."

    def block(self, index: int) -> Any:
        config = self.private_config()
        config.layer_types = ["full_attention"] * 9
        block = type(self.decoder.layers[0])(config, config.num_hidden_layers + index)
        names = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        block.load_state_dict(self.state(index, names))
        return block

    def first(self, ids: list[int]) -> Tensor:
        return self.before_norm(ids)

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        embedding = self.embed(ids)
        embedding[0] = 0
        token = self.rms(embedding, self.tensor(index, "token_layernorm.weight"))
        hidden = self.rms(fed, self.tensor(index, "hidden_layernorm.weight"))
        x = torch.cat([hidden, token], -1) @ self.tensor(index, "input_proj.weight").t()
        return self.rms(self.run_block(index, x), self.tensor(index, "final_layernorm.weight"))
