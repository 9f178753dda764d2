"""Step-3.5 and Step-3.7, as the authors' vLLM runs them.

Sources: github.com/stepfun-ai/vllm, step3p5_mtp.py and multi_layer_eagle.py; SGLang's pull request
18564, which chains the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP

_SLIDING = "sliding_attention"


class Step(ReleasedMTP):
    """Features from before both norms; each layer has a head of its own."""

    adds_one = True

    def prefix(self, index: int) -> str:
        return f"model.layers.{self.config.num_hidden_layers + index}."

    def kind(self, index: int) -> str:
        return self.config.mtp_layer_types[index]

    def block(self, index: int) -> Any:
        config, count = self.private_config(), self.count
        config.num_hidden_layers += count
        config.layer_types = [*config.layer_types, *config.mtp_layer_types]
        config.mlp_layer_types = [*config.mlp_layer_types, *config.mtp_mlp_layer_types]
        config.swiglu_limits = [*config.swiglu_limits, *[0.0] * count]
        config.swiglu_limits_shared = [*config.swiglu_limits_shared, *[0.0] * count]
        wide = {"num_attention_heads": config.num_sliding_attention_heads}
        kinds = enumerate(config.layer_types)
        config.per_layer_config = {layer: wide for layer, kind in kinds if kind == _SLIDING}
        last = self.config.num_hidden_layers + index
        block = type(self.decoder.layers[0])(config, last)
        names = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        state = self.state(index, names)
        moe = self.state(index, ("moe.", "share_expert."))
        if moe:
            gate_up = [moe[f"moe.{part}_proj.weight"] for part in ("gate", "up")]
            state["mlp.experts.gate_up_proj"] = torch.cat(gate_up, 1)
            state["mlp.experts.down_proj"] = moe["moe.down_proj.weight"]
            state["mlp.gate.weight"] = moe["moe.gate.weight"]
            state["mlp.gate.e_score_correction_bias"] = moe["moe.router_bias"]
            for part in ("gate_proj", "up_proj", "down_proj"):
                state[f"mlp.shared_experts.{part}.weight"] = moe[f"share_expert.{part}.weight"]
        block.load_state_dict(state)
        return block

    def first(self, ids: list[int]) -> Tensor:
        return self.before_norm(ids)

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "enorm.weight"))
        hidden = self.rms(fed, self.tensor(index, "hnorm.weight"))
        x = torch.cat([token, hidden], -1) @ self.tensor(index, "eh_proj.weight").t()
        kind = self.kind(index)
        window = self.config.sliding_window if kind == _SLIDING else 0
        return self.run_block(index, x, kind, window)

    def logits(self, index: int, given: Tensor) -> Tensor:
        norm = self.tensor(index, "transformer.shared_head.norm.weight")
        head = self.tensor(index, "transformer.shared_head.output.weight")
        return self.rms(given, norm) @ head.t()
