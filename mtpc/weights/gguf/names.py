"""Names of tensors in GGUF files, and their names in transformers.

They are those of `gguf.constants` and `gguf.tensor_mapping`; `tests/weights/test_gguf.py`
compares them. conversion/*.py of llama.cpp has what the converter does to values.
"""

from __future__ import annotations

from collections.abc import Mapping

ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
"""Modules outside of the blocks."""
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
STACKS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Stacks of experts -> the projection of one."""
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""Parts of an MTP layer, by GLM-4 MoE's and DeepSeek-V3's names."""
GATED_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
PLAIN = {**ATTENTION, **PRE_NORM, **DENSE}
"""A dense layer, as Llama has it."""
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Qwen's shared expert, which has a gate."""

NORMS = (
    "output_norm",
    "attn_norm",
    "ffn_norm",
    "post_attention_norm",
    "attn_q_norm",
    "attn_k_norm",
    "nextn.enorm",
    "nextn.hnorm",
    "nextn.shared_head_norm",
)
"""Norms to whose weights the converter adds one, in families that multiply by 1 + weight."""

Names = Mapping[str, str]
