"""GGUF files of derived families, written by gguf's own writer under gguf's own names.

What the converter does to values is written here from llama.cpp's conversion/*.py, so that the
files do not depend on mtpc's tables. The oracle is the model that they were written from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import derived
from torch import Tensor

from mtpc.models.load import load

gguf = pytest.importorskip("gguf")

ARCHS: dict[str, str] = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "qwen3moe": "qwen3_moe",
    "qwen2moe": "qwen2_moe",
    "llama": "mixtral",
    "phi3": "phi3",
    "glm4": "glm4",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "seed_oss": "seed_oss",
    "starcoder2": "starcoder2",
    "falcon-h1": "falcon_h1",
}
"""Architecture of files -> transformers' type."""
BY_DEFAULT = ("gemma3", "llama", "qwen2moe", "phi3", "falcon-h1")
PLUS_ONE = ("gemma", "gemma2", "gemma3")
PERMUTED = ("llama", "granite", "smollm3")
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "llama": {"sliding_window": None},
    "phi3": {"original_max_position_embeddings": 128},
    "starcoder2": {"sliding_window": None},
    "qwen2moe": {"layer_types": None, "norm_topk_prob": False},
    "qwen3moe": {"norm_topk_prob": True},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
}
OWN["falcon-h1"] = {
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_n_groups": 2,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.9, 1.3],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.7,
    "ssm_out_multiplier": 1.2,
}
_EXPERT = re.compile(r"(model\.layers\.(\d+)\..*experts)\.(\d+)\.(\w+)\.weight")
_MERGED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of a head's rows, in which those that rotate together are neighbours."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def of_falcon_h1(name: str, tensor: Tensor, config: Any) -> tuple[str, Tensor]:
    """Multipliers are in the weights; conversion/falcon_h1.py and mamba.py."""
    inside, outside = config.attention_in_multiplier, config.attention_out_multiplier
    factors: dict[str, Any] = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * inside,
        "q_proj": inside,
        "v_proj": inside,
        "o_proj": outside,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "in_proj":
        states = config.mamba_n_groups * config.mamba_d_state
        parts = [config.mamba_d_ssm] * 2 + [states] * 2 + [config.mamba_n_heads]
        sizes = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor(parts))
        return name, tensor * config.ssm_in_multiplier * sizes[:, None]
    if module == "conv1d":
        tensor = tensor.squeeze()
    if module in ("A_log", "D"):
        tensor = (-tensor.exp() if module == "A_log" else tensor)[:, None]
    if name.endswith("mamba.norm.weight"):
        tensor = tensor.reshape(config.mamba_n_groups, -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor * factors.get(module, 1.0)


def write(model: Any, arch: str, directory: Path) -> Path:
    """A file of a model's checkpoint, in float32."""
    from safetensors.torch import load_file

    model.save_pretrained(directory / "hf")
    config, path = model.config, directory / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, config, arch)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in load_file(directory / "hf" / "model.safetensors").items():
        tensor = tensor.float()
        if arch in PLUS_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch in PERMUTED and re.search(r"[qk]_proj\.(weight|bias)$", name):
            is_query = "q_proj" in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            tensor = permuted(tensor, heads)
        if arch == "falcon-h1":
            name, tensor = of_falcon_h1(name, tensor, config)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            whole = f"model.layers.{expert[2]}.mlp.experts.{_MERGED.get(expert[4], expert[4])}"
            stacks.setdefault(f"{whole}.weight", []).append(tensor)
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "shared_expert_gate" in name:
            tensor = tensor.squeeze(0)
        writer.add_tensor(table.get_name(name, (".weight", ".bias")), tensor.numpy())
    for name, parts in stacks.items():
        writer.add_tensor(table.get_name(name, (".weight",)), torch.stack(parts).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: Any, config: Any, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if arch == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        writer.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
    if arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if arch == "falcon-h1":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_d_ssm)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_d_ssm // config.mamba_d_head)
        writer.add_ssm_group_count(config.mamba_n_groups)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_pad_token_id(0)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch != "llama":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[pytest.mark.slow] * (a not in BY_DEFAULT)) for a in ARCHS]
)
def test_a_file_is_the_model_it_was_written_from(arch: str, tmp_path: Path) -> None:
    """All logits of three texts: so names, values and config are right."""
    kind = derived.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ARCHS[arch]]
    model = derived.tiny_model(kind, **OWN.get(arch, {})).float()
    loaded = load(write(model, arch, tmp_path), "float64", needs_mtp=False)
    model = model.double()
    model.config._experts_implementation = "eager"
    for text, found in zip(
        derived.PROMPTS, derived.stepped_logits(loaded, derived.PROMPTS), strict=True
    ):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
