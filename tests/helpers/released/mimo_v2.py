"""MiMo-V2, as SGLang runs it, which its authors helped to write and recommend.

Sources: SGLang's mimo_v2_nextn.py and multi_layer_eagle_worker_v2.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP

_SLIDING = "sliding_attention"


def released_config(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of MiMo-V2.5 as it was released: other names, and some that are redundant."""
    slides = [kind == "sliding_attention" for kind in config.pop("layer_types")]
    sparse = [kind == "sparse" for kind in config.pop("mlp_layer_types")]
    rope = config.pop("rope_parameters")
    config |= {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "hybrid_layer_pattern": [int(flag) for flag in slides],
        "moe_layer_freq": [int(flag) for flag in sparse],
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "sliding_window_size": config["sliding_window"] - 1,
        "routed_scaling_factor": None,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    return {**config, **changes}


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
