"""DeepSeek-V4, as SGLang's deepseek_v4_nextn.py and vLLM's predictor run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP, stack_experts

_LINEARS = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
_STREAMS = [(site, part) for site in ("attn", "ffn") for part in ("fn", "base", "scale")]


class DeepseekV4(ReleasedMTP):
    """All residual streams are fed; two projections; a stream head and a norm of its own."""

    embedding_name, head_name = "model.embed_tokens.weight", "head.weight"

    def prefix(self, index: int) -> str:
        return f"mtp.{index}."

    def block(self, index: int) -> Any:
        config = self.private_config()
        config.layer_types = [*config.layer_types, "sliding_attention"]
        config.mlp_layer_types = [*config.mlp_layer_types, "moe"]
        block = type(self.decoder.layers[0])(config, config.num_hidden_layers + index)
        state = {
            f"{ours}.weight": self.tensor(index, f"{n}.weight") for n, ours in _LINEARS.items()
        }
        state["self_attn.sinks"] = self.tensor(index, "attn.attn_sink")
        state["mlp.gate.e_score_correction_bias"] = self.tensor(index, "ffn.gate.bias")
        for site, part in _STREAMS:
            state[f"{site}_hc.{part}"] = self.tensor(index, f"hc_{site}_{part}")
        experts = {
            name.replace("ffn.", "mlp."): tensor
            for name, tensor in self.state(index, ("ffn.experts.",)).items()
        }
        block.load_state_dict({**state, **stack_experts(experts, ("w1", "w3", "w2"))})
        return block

    def first(self, ids: list[int]) -> Tensor:
        seen: list[Tensor] = []
        hook = self.decoder.hc_head.register_forward_pre_hook(lambda module, x: seen.append(x[0]))
        self.decoder(input_ids=torch.tensor([ids]), use_cache=False)
        hook.remove()
        return seen[-1][0]

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "enorm.weight"))
        hidden = self.rms(fed, self.tensor(index, "hnorm.weight"))
        x = (token @ self.tensor(index, "e_proj.weight").t())[:, None]
        x = x + hidden @ self.tensor(index, "h_proj.weight").t()
        positions = torch.arange(len(ids))[None]
        distance = positions.t() - positions
        seen = (distance >= 0) & (distance < self.config.sliding_window)
        mask = torch.zeros(len(ids), len(ids)).double().masked_fill(~seen, float("-inf"))
        return self.blocks[index](
            x[None],
            input_ids=torch.tensor([ids]),
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings={"main": self.rotate(x[None, :, 0], positions, "main")},
        )[0]

    def logits(self, index: int, given: Tensor) -> Tensor:
        head = type(self.decoder.hc_head)(self.config).double()
        parts = ("fn", "base", "scale")
        head.load_state_dict({f"hc_{p}": self.tensor(index, f"hc_head_{p}") for p in parts})
        normed = self.rms(head(given[None])[0], self.tensor(index, "norm.weight"))
        return normed @ self.stored[self.head_name].t()
