"""Metadata of GGUF files, checked as they are read; and entries of transformers' configs."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nextafter
from typing import Any

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.weights.gguf.file import GgufFile
from mtpc.weights.gguf.header import Header, shortest
from mtpc.weights.json_file import LARGEST


class Metadata:
    """Metadata of a model by their names in gguf's `Keys`, without the architecture.

    A file may come from a stranger, so each method checks type and range. All but `get` raise a
    CheckpointError that names the entry and its value.

    The header, of the first file, has the tensors of all. `read` names those that are part of the
    config.
    """

    def __init__(self, header: Header, files: Iterable[GgufFile]):
        self.header, self._files, self.read = header, files, set[str]()
        self.arch = str(header.metadata.get("general.architecture"))
        self.tensors = header.tensors

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.arch}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number, or the default."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not (value == default or 0 < value < inf):
            raise self.error(name, "a positive number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive size, or the default."""
        value = self.get(name, default)
        if type(value) is not int or not (value == default or 0 < value <= LARGEST):
            raise self.error(name, f"a positive size of at most {LARGEST}")
        return value

    def flag(self, name: str) -> bool:
        """A flag, which is off by default."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "a flag")
        return value

    def row(self, name: str) -> list[int]:
        """Positive sizes, one for each block; the file may have one for all."""
        value = self.get(name)
        if not isinstance(value, list):
            return [self.size(name)] * self.blocks
        if not all(type(one) is int and 0 < one <= LARGEST for one in value):
            raise self.error(name, "positive sizes")
        return self._of_blocks(name, value)

    def limits(self, name: str) -> list[float]:
        """Numbers of 0 or more, one for each layer of the target at least; 0 by default."""
        value = self.get(name, [0.0] * self.blocks)
        is_row = isinstance(value, list) and len(value) >= self.layers
        if not is_row or not all(type(one) in (int, float) and 0 <= one < inf for one in value):
            raise self.error(name, f"{self.layers} or more numbers of 0 or more")
        return list(value)

    def flags(self, name: str) -> list[bool]:
        """Flags, one for each block."""
        value = self.get(name)
        if not isinstance(value, list) or {*value} - {0, 1}:
            raise self.error(name, f"{self.blocks} flags")
        return [bool(one) for one in self._of_blocks(name, value)]

    def _of_blocks(self, name: str, row: list[Any]) -> list[Any]:
        if len(row) != self.blocks:
            raise self.error(name, f"{self.blocks} values, one for each block")
        return row

    def token(self, name: str) -> int | None:
        """The id of a token of the tokenizer's, which is None if the model has no such token."""
        key, vocabulary = f"tokenizer.ggml.{name}_token_id", self.rows("token_embd.weight")
        value = self.header.metadata.get(key)
        if value is not None and type(value) is not int:
            raise self._error(key, value, "a token id")
        return value if value is not None and 0 <= value < vocabulary else None

    def factors(self, name: str, count: int) -> list[float]:
        """So many positive numbers of a tensor, which is then no weight; [] if there is none."""
        stored, found = self.tensors.get(name), list[float]()
        if stored is None:
            return found
        if (stored.block.name, stored.shape) == ("F32", (count,)):
            file = next(f for f in self._files if name in f.header.tensors)
            found = file.plain(name).tolist()
        if not found or not all(0 < one < inf for one in found):
            raise CheckpointError(
                f"{self.header.path}: {name} is {stored.block.name}{list(stored.shape)}; expected "
                f"{count} positive numbers, F32"
            )
        self.read.add(name)
        return [*map(shortest, found)]

    def error(self, name: str, expected: str) -> CheckpointError:
        return self._error(f"{self.arch}.{name}", self.get(name), expected)

    def _error(self, key: str, value: Any, expected: str) -> CheckpointError:
        found = "missing" if value is None else f"{value!r:.200}"
        return CheckpointError(
            f"{self.header.path}: {key} is {found}; expected {expected}: convert the model again "
            "with a newer llama.cpp"
        )

    @property
    def mtp_layers(self) -> int:
        return self.size("nextn_predict_layers", 0)

    @property
    def blocks(self) -> int:
        """Layers of the target, and MTP layers."""
        count = self.size("block_count")
        if not self.mtp_layers < count <= len(self.tensors):
            raise CheckpointError(
                f"{self.header.path}: {self.arch}.block_count is {count} and nextn_predict_layers "
                f"{self.mtp_layers}, and the file has {len(self.tensors)} tensors; expected a "
                "tensor or more for each block"
            )
        return count

    @property
    def layers(self) -> int:
        """Layers of the target; the file counts MTP layers as blocks."""
        return self.blocks - self.mtp_layers

    def has(self, layer: int, leaf: str) -> bool:
        return f"blk.{layer}.{leaf}" in self.tensors

    def rows(self, name: str) -> int:
        """Rows of a tensor that must be there."""
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"{self.header.path} has no {name}; expected the tensors of one whole model"
            )
        return stored.shape[0]


_YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
"""Entries of YaRN's that a file may lack -> their names in files."""
_UNKNOWN = (
    *("expert_count", "attention.scale", "attention.clamp_kqv", "attention.sliding_window"),
    *("attention.temperature_scale", "rope.scaling.attn_factor", "rope.scaling.alpha"),
    *("logit_scale", "embedding_scale", "residual_scale", "final_logit_softcapping"),
)
"""Metadata that change what a dense model computes, and that its family in transformers lacks."""


def _rope(of: Metadata) -> dict[str, Any]:
    """Rotary embedding of all layers. Raises CheckpointError: it is scaled in a way that mtpc does
    not know."""
    theta = of.number("rope.freq_base", 1e4)  # llama.cpp's own default.
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = of.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{of.header.path}: {of.arch}.rope.scaling.type is {kind!r}; expected none, linear or "
            "yarn"
        )
    if kind == "none":
        return found
    found |= {"rope_type": kind, "factor": of.number("rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = of.size("rope.scaling.original_context_length")
        for ours, theirs in _YARN.items():
            if of.get(f"rope.scaling.{theirs}") is not None:
                found[ours] = of.number(f"rope.scaling.{theirs}")
    return found


def _partial_rope(of: Metadata, width: int) -> dict[str, Any]:
    return {**_rope(of), "partial_rotary_factor": _share(of, width)}


def _share(of: Metadata, width: int) -> float:
    """The share of a head's width that is rotated, which transformers multiplies and rounds
    down."""
    count = of.size("rope.dimension_count", width)
    if count > width:
        raise of.error("rope.dimension_count", f"at most {width}, the width of a head")
    share = count / width
    return share if int(width * share) == count else nextafter(share, 1)


def head_width(of: Metadata) -> int:
    """The width of a head, which dense models' keys and values share."""
    heads = of.size("attention.head_count")
    width = of.size("attention.key_length", 0) or of.size("embedding_length") // heads
    if width % 2 or not width:
        raise of.error("attention.head_count", "heads of an even width")
    return width


def dense(of: Metadata, *reads: str, is_partial: bool = False) -> dict[str, Any]:
    """Dense models, whose names in transformers are those of files. Entries that the caller `reads`
    are its own; any other that changes the model is refused. With `is_partial`, a part of a head
    may be rotated.

    Files have the factors by which Llama 3 scales angles, and not their rule. transformers divides
    angles by such factors in the type longrope.

    Raises:
        UnsupportedModelError: the model computes something else as well.
        CheckpointError: a value is wrong.
    """
    for name in _UNKNOWN:
        if name not in reads and of.get(name):
            raise UnsupportedModelError(
                f"{of.header.path}: {of.arch}.{name} is {of.get(name)!r:.200}; expected none: "
                f"mtpc computes {of.arch} as transformers' class of that name does, without it"
            )
    width, rope = head_width(of), _rope(of)
    for name in ("attention.value_length", *(() if is_partial else ("rope.dimension_count",))):
        if of.size(name, width) != width:
            raise of.error(name, f"{width}, the width of a head")
    if is_partial:
        rope["partial_rotary_factor"] = _share(of, width)
    if factors := of.factors("rope_freqs.weight", width // 2):
        if rope["rope_type"] != "default":
            raise of.error("rope.scaling.type", "none beside rope_freqs.weight")
        length = of.size("context_length")
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": length}
    return {
        "model_type": of.arch,
        "intermediate_size": of.size("feed_forward_length"),
        "num_key_value_heads": of.size("attention.head_count_kv", of.size("attention.head_count")),
        "head_dim": width,
        "rope_parameters": rope,
    }


def layer_kinds(of: Metadata, period: int) -> list[str]:
    """Types of layers: every so many-th attends to the whole text, the others to a window.

    A file may say which do, or after how many layers that repeats.
    """
    name = "attention.sliding_window_pattern"
    found = of.get(name)
    if isinstance(found, list):
        slides = of.flags(name)
    else:
        period = of.size(name, period)
        slides = [(layer + 1) % period != 0 for layer in range(of.layers)]
    return [("full_attention", "sliding_attention")[each] for each in slides]


def _experts(of: Metadata) -> dict[str, Any]:
    """Experts, named as in DeepSeek-V3 and the families after it. Raises CheckpointError: the
    router is of another kind."""
    if of.get("expert_gating_func", 2) != 2:
        raise CheckpointError(
            f"{of.header.path}: {of.arch}.expert_gating_func is {of.get('expert_gating_func')}; "
            "expected 2, sigmoid"
        )
    return {
        "n_routed_experts": of.size("expert_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
        "n_group": of.size("expert_group_count", 1),
        "topk_group": of.size("expert_group_used_count", 1),
        "moe_intermediate_size": of.size("expert_feed_forward_length"),
        "n_shared_experts": of.size("expert_shared_count", 0),
        "first_k_dense_replace": of.size("leading_dense_block_count", 0),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "norm_topk_prob": of.flag("expert_weights_norm"),
        "num_nextn_predict_layers": of.mtp_layers,
    }


def qwen35(of: Metadata) -> dict[str, Any]:
    width, values = of.size("attention.key_length"), of.size("ssm.time_step_rank")
    kinds = ("full_attention", "linear_attention")
    rope = _partial_rope(of, width)
    sections = of.get("rope.dimension_sections")
    if not isinstance(sections, list) or not all(type(one) is int and one >= 0 for one in sections):
        raise of.error("rope.dimension_sections", "sizes")
    return {
        "model_type": "qwen3_5_text",
        "intermediate_size": of.size("feed_forward_length", 0) or None,
        "num_key_value_heads": of.size("attention.head_count_kv"),
        "head_dim": width,
        "layer_types": [kinds[of.has(i, "ssm_out.weight")] for i in range(of.layers)],
        "linear_conv_kernel_dim": of.size("ssm.conv_kernel"),
        "linear_key_head_dim": of.size("ssm.state_size"),
        "linear_num_key_heads": of.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": of.size("ssm.inner_size") // values,
        "rope_parameters": {
            **rope,
            "mrope_section": [*filter(None, sections)],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": of.mtp_layers,
    }


def qwen35moe(of: Metadata) -> dict[str, Any]:
    return {
        **qwen35(of),
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": of.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": of.size("expert_shared_feed_forward_length"),
        "num_experts": of.size("expert_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
    }


def glm4moe(of: Metadata) -> dict[str, Any]:
    width = of.size("attention.key_length")
    return {
        **_experts(of),
        "model_type": "glm4_moe",
        "intermediate_size": of.size("feed_forward_length"),
        "num_key_value_heads": of.size("attention.head_count_kv"),
        "head_dim": width,
        "attention_bias": of.has(0, "attn_q.bias"),
        "use_qk_norm": of.has(0, "attn_q_norm.weight"),
        "rope_parameters": _partial_rope(of, width),
    }


def deepseek2(of: Metadata) -> dict[str, Any]:
    rope_width, rope = of.size("rope.dimension_count"), _rope(of)
    keys = of.size("attention.key_length_mla", 0) or of.size("attention.key_length")
    values = of.size("attention.value_length_mla", 0) or of.size("attention.value_length")
    if keys <= rope_width:
        raise of.error("rope.dimension_count", f"fewer than {keys}, the width of a key")
    # The file has a tenth of one factor, and not the other: in all releases both are equal.
    mscale = 10 * of.number("rope.scaling.yarn_log_multiplier", 0.0)
    if mscale:
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        **_experts(of),
        "model_type": "deepseek_v3",
        "intermediate_size": of.size("feed_forward_length"),
        "num_key_value_heads": of.size("attention.head_count"),
        "kv_lora_rank": of.size("attention.kv_lora_rank"),
        "q_lora_rank": of.size("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rope_width,
        "qk_nope_head_dim": keys - rope_width,
        "v_head_dim": values,
        "rope_parameters": rope,
    }


def mimo2(of: Metadata) -> dict[str, Any]:
    """Released entries, as the checkpoints have them."""
    slides = of.flags("attention.sliding_window_pattern")
    keys = of.row("attention.head_count_kv")
    full, sliding = ({n for n, s in zip(keys, slides, strict=True) if s == k} for k in (0, 1))
    if len(full) != 1 or len(sliding) != 1:
        raise of.error("attention.head_count_kv", "one number for each kind of layer")
    width = of.size("attention.key_length")
    layers = range(of.layers)
    return {
        **_experts(of),
        "model_type": "mimo_v2_flash",
        "intermediate_size": of.size("feed_forward_length"),
        "num_key_value_heads": full.pop(),
        "swa_num_key_value_heads": sliding.pop(),
        "head_dim": width,
        "v_head_dim": of.size("attention.value_length"),
        "sliding_window": of.size("attention.sliding_window"),
        "hybrid_layer_pattern": [int(slides[i]) for i in layers],
        "moe_layer_freq": [int(of.has(i, "ffn_gate_inp.weight")) for i in layers],
        "attention_value_scale": of.number("attention.value_scale", 1.0),
        "norm_topk_prob": True,  # The converter writes none, and llama.cpp always divides.
        "rope_theta": of.number("rope.freq_base"),
        "swa_rope_theta": of.number("rope.freq_base_swa"),
        "partial_rotary_factor": _share(of, width),
    }


def step35(of: Metadata) -> dict[str, Any]:
    """Released entries, as the checkpoints have them.

    Raises:
        CheckpointError: rotary angles are scaled; the file has the factors, but not their rule.
    """
    if "rope_freqs.weight" in of.tensors:
        raise CheckpointError(
            f"{of.header.path} scales rotary angles by rope_freqs.weight, which mtpc does not "
            "read; expected a checkpoint in transformers' format"
        )
    slides = of.flags("attention.sliding_window_pattern")
    heads, keys = of.row("attention.head_count"), of.row("attention.head_count_kv")
    full = [n for n, s in zip(heads, slides, strict=True) if not s]
    other = [n for n, s in zip(heads, slides, strict=True) if s]
    if len(set(keys)) != 1 or len(set(full)) != 1 or len(set(other)) > 1:
        raise of.error("attention.head_count", "one number for each kind of layer")
    sparse = [i for i in range(len(slides)) if of.has(i, "ffn_gate_inp.weight")]
    thetas = of.number("rope.freq_base"), of.number("rope.freq_base_swa")
    return {
        "model_type": "step3p5",
        "intermediate_size": of.size("feed_forward_length"),
        "num_attention_heads": full[0],
        "num_attention_groups": keys[0],
        "attention_other_setting": {"num_attention_heads": (other or full)[0]},
        "head_dim": of.size("attention.key_length"),
        "layer_types": [("full_attention", "sliding_attention")[s] for s in slides],
        "sliding_window": of.size("attention.sliding_window"),
        "rope_theta": [thetas[s] for s in slides],
        "partial_rotary_factors": [(0.5, 1.0)[s] for s in slides],  # The converter asserts it.
        "swiglu_limits": of.limits("swiglu_clamp_exp"),
        "swiglu_limits_shared": of.limits("swiglu_clamp_shexp"),
        "moe_num_experts": of.size("expert_count"),
        "moe_top_k": of.size("expert_used_count"),
        "moe_intermediate_size": of.size("expert_feed_forward_length"),
        "share_expert_dim": of.size("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": of.number("expert_weights_scale", 1.0),
        "moe_layers_enum": ",".join(map(str, sparse)),
        "num_nextn_predict_layers": of.mtp_layers,
    }
