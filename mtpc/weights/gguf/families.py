"""Families of GGUF files: transformers' config and names, from the file's metadata and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.weights.gguf import configs, names
from mtpc.weights.gguf.configs import Metadata
from mtpc.weights.gguf.derived import DERIVED, MIXTRAL, named
from mtpc.weights.gguf.family import Family, llama_changes
from mtpc.weights.gguf.file import Change, GgufFile, Heads
from mtpc.weights.gguf.header import Header

_BLOCK = re.compile(r"blk\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<leaf>.+?)(\.(?P<end>weight|bias))?")


def describe(header: Header, files: Iterable[GgufFile]) -> dict[str, Any]:
    """Name the tensors of files as transformers does; returns the config that the metadata
    describe. The header has metadata of the first file, and tensors of all.

    Raises:
        UnsupportedModelError: mtpc has no such family.
        CheckpointError: metadata are missing, or a tensor is unknown.
    """
    files = [*files]
    metadata = Metadata(header, files)
    family = FAMILIES.get(metadata.arch)
    if family is None:
        raise UnsupportedModelError(
            f"{header.path} has the architecture {metadata.arch!r}; expected one of "
            f"{', '.join(FAMILIES)}, or a checkpoint in transformers' format"
        )
    if family.of_experts is not None and metadata.get("expert_count"):
        family = family.of_experts
    config = {**_common(metadata, family), **family.config(metadata)}
    changes = family.changes(metadata)
    for file in files:
        for source in (one for one in file.header.tensors if one not in metadata.read):
            _name(file, source, metadata, family, changes)
    return config


def _name(
    file: GgufFile, source: str, metadata: Metadata, family: Family, changes: Mapping[str, Change]
) -> None:
    """Give a tensor its name in transformers."""
    stem, _, end = source.rpartition(".")
    if stem in family.ends:
        file.add(f"{family.ends[stem]}.{end}", source, changes.get(stem, Change()))
        return
    match = _BLOCK.fullmatch(source)
    layer, leaf = (int(match["layer"]), match["leaf"]) if match else (0, "")
    index = layer - metadata.layers
    is_mtp = 0 <= index < metadata.mtp_layers
    if match is None or index >= metadata.mtp_layers:
        raise _unknown(file, source, metadata)
    prefix = family.mtp_prefix(metadata.layers, index) if is_mtp else f"model.layers.{layer}."
    block = prefix + (family.mtp_block if is_mtp else "")
    stack = family.projections.get(leaf)
    if stack is not None and family.stacked and match["end"]:
        end = family.stack_ends[match["end"]]
        file.add(f"{block}{family.stacked}{stack}{end}", source, Change())
        return
    if stack is not None and not family.stacked:
        file.add_stack(f"{block}{family.experts.format('{}', stack)}.weight", source)
        return
    module = family.modules.get(leaf)
    joint = family.mtp_modules.get(leaf) if is_mtp else None
    name = f"{block}{module}" if joint is None else f"{prefix}{joint}"
    last = name.rpartition(".")[2]
    is_whole = last in ("A_log", "dt_bias", "e_score_correction_bias", "attention_sink_bias",
                        "router_bias", "sinks", "D", "weight")  # fmt: skip
    if (joint is None and module is None) or not (is_whole or match["end"]):
        raise _unknown(file, source, metadata)
    shape = family.shapes.get(leaf, lambda sizes: sizes)(file.header.tensors[source].shape)
    file.add(name if is_whole else f"{name}.{match['end']}", source,
             changes.get(leaf, Change()), shape)  # fmt: skip


def _unknown(file: GgufFile, source: str, metadata: Metadata) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: {source} is no tensor of {metadata.arch} that mtpc knows; expected those "
        "that llama.cpp's convert_hf_to_gguf.py writes"
    )


def _common(of: Metadata, family: Family) -> dict[str, Any]:
    """The entries of every family's config."""
    kinds = {stored.block.name for stored in of.tensors.values()}
    plain = "float32" if kinds == {"F32"} else "float16"
    dtype = plain if kinds <= {"F32", "F16"} else "bfloat16"
    # The end of a sequence, and the end of a turn if that is another id.
    found = dict.fromkeys(i for i in (of.token("eos"), of.token("eot")) if i is not None)
    ends = [*found] if len(found) > 1 else next(iter(found), None)
    tokens = {"bos_token_id": of.token("bos"), "eos_token_id": ends}
    tokens["pad_token_id"] = of.token("padding")
    epsilons: dict[str, float]
    if of.get("attention.layer_norm_epsilon") is None:
        epsilons = {"rms_norm_eps": of.number("attention.layer_norm_rms_epsilon")}
    else:  # By transformers' names of it.
        epsilon = of.number("attention.layer_norm_epsilon")
        epsilons = dict.fromkeys(("norm_epsilon", "layer_norm_eps"), epsilon)
    return {
        "architectures": [family.architecture],
        "dtype": dtype,
        "quantization_config": {"quant_method": "gguf"},
        "vocab_size": of.rows("token_embd.weight"),
        "hidden_size": of.size("embedding_length"),
        "num_hidden_layers": of.layers,
        "max_position_embeddings": of.size("context_length"),
        **epsilons,
        "num_attention_heads": of.row("attention.head_count")[0],
        "tie_word_embeddings": "output.weight" not in of.tensors,
        **{name: value for name, value in tokens.items() if value is not None},
    }


def _qwen_changes(of: Metadata) -> dict[str, Change]:
    keys, values = of.size("ssm.group_count"), of.size("ssm.time_step_rank")
    width, skip = of.size("ssm.inner_size") // values, 2 * keys * of.size("ssm.state_size")
    if values % keys:
        raise CheckpointError(
            f"{of.header.path}: {values} value heads are no multiple of {keys} key heads"
        )
    one, wide = Heads(keys, values // keys), Heads(keys, values // keys, width)
    after = Heads(keys, values // keys, width, skip)
    return {
        **dict.fromkeys(names.NORMS, Change("plus_one")),
        "ssm_a": Change("negative_exp", one),
        "ssm_dt": Change(rows=one),
        "ssm_alpha": Change(rows=one),
        "ssm_beta": Change(rows=one),
        "attn_gate": Change(rows=wide),
        "attn_qkv": Change(rows=after),
        "ssm_conv1d": Change(rows=after),
        "ssm_out": Change(columns=wide),
    }


_QWEN = Family(
    architecture="Qwen3_5ForCausalLM",
    modules={
        **names.ATTENTION,
        **names.POST_NORM,
        **names.DENSE,
        **names.GATED_DELTA,
        "ssm_a": "linear_attn.A_log",
        "ssm_dt": "linear_attn.dt_bias",
    },
    config=configs.qwen35,
    changes=_qwen_changes,
    shapes={"ssm_conv1d": lambda sizes: (sizes[0], 1, sizes[-1])},
    mtp_prefix=lambda layers, index: "mtp.",
    mtp_block="layers.0.",
    mtp_modules={
        "nextn.eh_proj": "fc",
        "nextn.enorm": "pre_fc_norm_embedding",
        "nextn.hnorm": "pre_fc_norm_hidden",
        "nextn.shared_head_norm": "norm",
    },
)
_QWEN_MOE = replace(
    _QWEN,
    architecture="Qwen3_5MoeForCausalLM",
    modules={**_QWEN.modules, "ffn_gate_inp": "mlp.gate", **names.SHARED},
    config=configs.qwen35moe,
    shapes={**_QWEN.shapes, "ffn_gate_inp_shexp": lambda sizes: (1, sizes[-1])},
)
_DENSE = Family(architecture="Qwen3ForCausalLM", modules=names.PLAIN, config=configs.dense)
FAMILIES: Mapping[str, Family] = {
    "qwen3": _DENSE,
    "qwen2": replace(_DENSE, architecture="Qwen2ForCausalLM"),
    "llama": replace(
        _DENSE,
        architecture="LlamaForCausalLM",
        config=named("llama"),
        changes=llama_changes,
        of_experts=MIXTRAL,
    ),
    **DERIVED,
    "qwen35": _QWEN,
    "qwen35moe": _QWEN_MOE,
    "glm4moe": Family(
        architecture="Glm4MoeForCausalLM",
        modules={**names.ATTENTION, **names.POST_NORM, **names.DENSE, **names.ROUTED},
        config=configs.glm4moe,
    ),
    "deepseek2": Family(
        architecture="DeepseekV3ForCausalLM",
        modules={**names.PLAIN, **names.ROUTED, **names.LATENT},
        config=configs.deepseek2,
    ),
    "mimo2": Family(
        architecture="MiMoV2FlashForCausalLM",
        modules={**names.PLAIN, **names.ROUTED, "attn_sinks": "self_attn.attention_sink_bias"},
        config=configs.mimo2,
        mtp_prefix=lambda layers, index: f"model.mtp.layers.{index}.",
        mtp_modules={
            **names.NEXTN,
            "ffn_norm": "pre_mlp_layernorm",
            "layer_output_norm": "final_layernorm",
        },
    ),
    "step35": Family(
        architecture="Step3p5ForCausalLM",
        modules={
            **names.PLAIN,
            "attn_gate": "self_attn.g_proj",
            "ffn_gate_inp": "moe.gate",
            "exp_probs_b": "moe.router_bias",
            "ffn_gate_shexp": "share_expert.gate_proj",
            "ffn_up_shexp": "share_expert.up_proj",
            "ffn_down_shexp": "share_expert.down_proj",
        },
        config=configs.step35,
        changes=lambda metadata: dict.fromkeys(names.NORMS, Change("plus_one")),
        mtp_modules={
            **names.NEXTN,
            "nextn.shared_head_head": "transformer.shared_head.output",
            "nextn.shared_head_norm": "transformer.shared_head.norm",
        },
        stacked="moe.",
    ),
}
"""`general.architecture` -> its family."""
