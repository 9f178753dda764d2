"""GGUF files of models that transformers has and mtpc has no family file for.

Each row is a class of transformers, the names of its modules, and what the converter did to values.
`tests/weights/test_gguf_derived.py` compares the names with gguf's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from mtpc.weights.gguf import names
from mtpc.weights.gguf.configs import Metadata, dense, layer_kinds
from mtpc.weights.gguf.family import Family, llama_changes
from mtpc.weights.gguf.file import Change

_WINDOW = "attention.sliding_window"
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}


def named(kind: str, *reads: str, **more: Any) -> Callable[[Metadata], dict[str, Any]]:
    """The config of a dense model of a type of transformers', with entries of its own."""

    def config(of: Metadata) -> dict[str, Any]:
        biased = {"attention_bias": of.has(0, "attn_q.bias"), "mlp_bias": of.has(0, "ffn_up.bias")}
        own = {name: read(of) if callable(read) else read for name, read in more.items()}
        return {**dense(of, *reads), **biased, "model_type": kind, **own}

    return config


def _score_width(of: Metadata, by_heads: int) -> int:
    """What scores are divided by the root of: the width of a head, but H / heads in the model of
    so many layers, as llama.cpp has it."""
    width = of.size("attention.key_length")
    is_other = of.layers == by_heads
    return of.size("embedding_length") // of.size("attention.head_count") if is_other else width


def _gemma2(of: Metadata) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **dense(of, _WINDOW, *caps),
        **_GELU,
        "model_type": "gemma2",
        "attn_logit_softcapping": of.number(caps[0], 50.0),
        "final_logit_softcapping": of.number(caps[1], 30.0),
        "sliding_window": of.size(_WINDOW),
        "query_pre_attn_scalar": _score_width(of, 46),
        "layer_types": layer_kinds(of, 2),
    }


def _gemma3(of: Metadata) -> dict[str, Any]:
    found = dense(of, _WINDOW, "final_logit_softcapping")
    near = {"rope_type": "default", "rope_theta": of.number("rope.freq_base_swa", 1e4)}
    return {
        **found,
        **_GELU,
        "model_type": "gemma3_text",
        "final_logit_softcapping": of.get("final_logit_softcapping")
        and of.number("final_logit_softcapping"),
        "sliding_window": of.size(_WINDOW, 0) or None,
        "query_pre_attn_scalar": _score_width(of, 62),
        "layer_types": layer_kinds(of, 6 if of.get(_WINDOW) else 1),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": near},
    }


def _phi3(of: Metadata) -> dict[str, Any]:
    found = dense(of, _WINDOW, "rope.scaling.attn_factor", is_partial=True)
    rope, length = found["rope_parameters"], of.size("rope.scaling.original_context_length", 0)
    half = of.size("rope.dimension_count", found["head_dim"]) // 2
    long, short = (of.factors(f"rope_factors_{each}.weight", half) for each in ("long", "short"))
    if long:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope["original_max_position_embeddings"] = length or of.size("context_length")
    return {
        **found,
        "model_type": "phi3",
        "original_max_position_embeddings": length or of.size("context_length"),
        "sliding_window": of.size(_WINDOW, 0) or None,
    }


def _glm4(of: Metadata) -> dict[str, Any]:
    found = dense(of, is_partial=True)
    return {**found, "model_type": "glm4", "attention_bias": of.has(0, "attn_q.bias")}


def _qwen_moe(kind: str, normed: bool) -> Callable[[Metadata], dict[str, Any]]:
    def config(of: Metadata) -> dict[str, Any]:
        width = of.size("expert_feed_forward_length")
        shared = of.size("expert_shared_feed_forward_length", 0)
        return {
            **dense(of, "expert_count"),
            "model_type": kind,
            "intermediate_size": of.size("feed_forward_length", width),
            "num_experts": of.size("expert_count"),
            "num_experts_per_tok": of.size("expert_used_count"),
            "moe_intermediate_size": width,
            "norm_topk_prob": normed,
            **({"shared_expert_intermediate_size": shared} if shared else {}),
        }

    return config


def _mixtral(of: Metadata) -> dict[str, Any]:
    return {
        **dense(of, "expert_count"),
        "model_type": "mixtral",
        "num_local_experts": of.size("expert_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
        "sliding_window": None,
    }


def _gpt_oss(of: Metadata) -> dict[str, Any]:
    found = dense(of, "expert_count", _WINDOW)
    found["rope_parameters"] |= {"truncate": False}  # Of the model; files do not say it.
    return {
        **found,
        "model_type": "gpt_oss",
        "intermediate_size": of.size("expert_feed_forward_length"),
        "num_local_experts": of.size("expert_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
        "sliding_window": of.size(_WINDOW),
        "layer_types": layer_kinds(of, 2),
        "attention_bias": of.has(0, "attn_q.bias"),
    }


def _falcon_h1(of: Metadata) -> dict[str, Any]:
    """The converter multiplies weights by the config's multipliers, which are 1 then."""
    inner, heads = of.size("ssm.inner_size"), of.size("ssm.time_step_rank")
    return {
        **named("falcon_h1")(of),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": of.size("ssm.group_count"),
        "mamba_d_state": of.size("ssm.state_size"),
        "mamba_d_conv": of.size("ssm.conv_kernel"),
        "mamba_conv_bias": of.has(0, "ssm_conv1d.bias"),
        "mamba_proj_bias": of.has(0, "ssm_in.bias"),
        "projectors_bias": of.has(0, "ssm_out.bias"),
        "mamba_rms_norm": of.has(0, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _plus_one(of: Metadata) -> Mapping[str, Change]:
    return dict.fromkeys((*names.NORMS, "post_ffw_norm"), Change("plus_one"))


_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and behind attention and feed-forward, as Gemma has them."""
_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    modules={**names.ATTENTION, **_AROUND, **names.DENSE},
    config=_gemma3,
    changes=_plus_one,
)
_QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    modules={**names.PLAIN, "ffn_gate_inp": "mlp.gate"},
    config=_qwen_moe("qwen3_moe", normed=True),
)
_SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    modules=names.PLAIN,
    config=named("smollm3", no_rope_layer_interval=4),
    changes=llama_changes,
)
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    modules={**names.PLAIN, "ffn_gate_inp": "block_sparse_moe.gate"},
    config=_mixtral,
    changes=llama_changes,
    experts="block_sparse_moe.experts.{}.{}",
    projections={"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"},
)
"""Files of Llama's architecture with experts."""
DERIVED: Mapping[str, Family] = {
    "gemma": Family(
        architecture="GemmaForCausalLM",
        modules=names.PLAIN,
        config=named("gemma", **_GELU),
        changes=_plus_one,
    ),
    "gemma2": replace(_GEMMA3, architecture="Gemma2ForCausalLM", config=_gemma2),
    "gemma3": _GEMMA3,
    "qwen3moe": _QWEN3_MOE,
    "qwen2moe": replace(
        _QWEN3_MOE,
        architecture="Qwen2MoeForCausalLM",
        modules={**_QWEN3_MOE.modules, **names.SHARED},
        config=_qwen_moe("qwen2_moe", normed=False),
        shapes={"ffn_gate_inp_shexp": lambda sizes: (1, sizes[-1])},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        modules={**names.PLAIN, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=_phi3,
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        modules={
            **names.ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        config=_glm4,
    ),
    "granite": replace(
        _SMOLLM3,
        architecture="GraniteForCausalLM",
        config=named(
            "granite",
            *("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
            attention_multiplier=lambda of: of.number("attention.scale", 1.0),
            embedding_multiplier=lambda of: of.number("embedding_scale", 1.0),
            residual_multiplier=lambda of: of.number("residual_scale", 1.0),
            logits_scaling=lambda of: of.number("logit_scale", 1.0),
        ),
    ),
    "smollm3": _SMOLLM3,
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        modules={
            **names.ATTENTION,
            **names.DENSE,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=named("olmo2"),
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        modules={**names.ATTENTION, **names.POST_NORM, **names.DENSE},
        config=named("seed_oss", attention_out_bias=lambda of: of.has(0, "attn_output.bias")),
    ),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        modules={
            **names.ATTENTION,
            **names.POST_NORM,
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        config=_gpt_oss,
        stacked="mlp.experts.",
        stack_ends={"weight": "", "bias": "_bias"},
    ),
    "falcon-h1": Family(
        architecture="FalconH1ForCausalLM",
        modules={
            **names.ATTENTION,
            **names.MAMBA2,
            **{leaf: f"feed_forward.{leaf.removeprefix('ffn_')}_proj" for leaf in names.DENSE},
            "ffn_norm": "pre_ff_layernorm.weight",  # Files leave the end of its name out.
        },
        config=_falcon_h1,
        changes=lambda of: {"ssm_a": Change("negative_exp")},
        shapes={
            "ssm_conv1d": lambda sizes: sizes if len(sizes) == 1 else (sizes[0], 1, sizes[-1]),
            **dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm"), lambda sizes: (prod(sizes),)),
        },
        ends={**names.ENDS, "output_norm": "model.final_layernorm"},
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        modules={**names.PLAIN, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        config=named("starcoder2", use_bias=lambda of: of.has(0, "attn_q.bias")),
    ),
}
"""`general.architecture` -> its family."""
