"""MiMo-V2, as SGLang runs it, which its authors helped to write and recommend.

Sources: SGLang's mimo_v2_nextn.py and multi_layer_eagle_worker_v2.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP

_SLIDING = "sliding_attention"


class MimoV2(ReleasedMTP):
    """Every layer is fed the target's hidden state, from after its final norm."""

    def prefix(self, index: int) -> str:
        return f"model.mtp.layers.{index}."

    def block(self, index: int) -> Any:
        config = self.private_config()
        config.layer_types = [*config.layer_types, *[_SLIDING] * self.count]
        config.mlp_layer_types = [*config.mlp_layer_types, *["dense"] * self.count]
        block = type(self.decoder.layers[0])(config, config.num_hidden_layers + index)
        state = self.state(index, ("self_attn.", "mlp.", "input_layernorm."))
        state["self_attn.sinks"] = state.pop("self_attn.attention_sink_bias")
        name = "post_attention_layernorm.weight"
        state[name] = self.tensor(index, "pre_mlp_layernorm.weight")
        block.load_state_dict(state)
        return block

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "enorm.weight"))
        hidden = self.rms(fed, self.tensor(index, "hnorm.weight"))
        x = torch.cat([token, hidden], -1) @ self.tensor(index, "eh_proj.weight").t()
        out = self.run_block(index, x, _SLIDING, self.config.sliding_window)
        return self.rms(out, self.tensor(index, "final_layernorm.weight"))

    def fed_next(self, target: Tensor, given: Tensor) -> Tensor:
        return target
