"""Released models by their sizes and by how their files store weights, without the weights.

Layers are cut to one of each kind. Sizes of DeepSeek-V3 and Qwen3-Next are those of the released
config.json files. DeepSeek-V4's, GLM-4.7-Flash's and gpt-oss's are the defaults of transformers'
config classes: of gpt-oss-120b, and V4-Flash. GLM-4.5's are those of slime, the framework that
trained it (scripts/models/glm4.5-355B-A32B.sh).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.harness.large import write_tensors
from benchmarks.scale import CONFIGS
from mtpc.models.from_config import load_config
from mtpc.models.load import LoadedModel
from mtpc.models.mtp_layers import stored_tensors
from mtpc.weights.json_file import CONFIG

Stored = Iterator[tuple[str, Tensor]]
Store = Callable[[str, Tensor], Stored]
"""(name, tensor of 16 or 32 bits) -> the tensors that a checkpoint has for it, by name."""
_BLOCK, _GROUP = 128, 32
_KEPT = ("embed", "head", "norm", "gate.", "router", "eh_proj", "hc_", "compressor.w", "weights_pr")
"""Parts of names of matrices that FP8 checkpoints keep in 16 or 32 bits. (DeepSeek-V3's README for
weights; V4's as ATOM reads them: atom/models/deepseek_v4.py, 524.)"""


@dataclass(frozen=True)
class Released:
    """A released model, cut.

    Attributes:
        config: entries of config.json.
        says: its `quantization_config`, if it has one.
        form: how the files store weights, in words.
        store: the same for each tensor.
        has_drafts: whether it has an MTP layer.
        ranks: on how many it may be shared.
    """

    config: Mapping[str, Any]
    form: str
    store: Store
    says: Mapping[str, Any] | None = None
    has_drafts: bool = True
    ranks: tuple[int, ...] = (1,)

    def write(self, directory: Path) -> None:
        """Write config.json, and files of weights that are headers without data."""
        entries = dict(self.config)
        (directory / CONFIG).write_text(json.dumps(entries))
        loaded = load_config(directory, None, self.has_drafts)
        tensors = dict(
            made for name, tensor in _as_released(loaded) for made in self.store(name, tensor)
        )
        write_tensors(directory, tensors)
        if self.says is not None:
            entries["quantization_config"] = dict(self.says)
            (directory / CONFIG).write_text(json.dumps(entries))


def _as_released(loaded: LoadedModel) -> Stored:
    """A model's tensors by the names of released checkpoints."""
    family, layers = loaded.family, loaded.config.num_hidden_layers
    yield from revert_weight_conversion(loaded.target, loaded.target.state_dict()).items()
    for index, layer in enumerate(loaded.mtp_layers):
        prefix = family.layer_prefix(layers, index)
        for name, tensor in stored_tensors(layer, family):
            yield family.common_tensors.get(name, prefix + name), tensor


def _plain(name: str, tensor: Tensor) -> Stored:
    yield name, tensor


def _is_kept(name: str, tensor: Tensor) -> bool:
    return tensor.dim() != 2 or any(part in name for part in _KEPT) or ".ape" in name


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _fp8_blocks(name: str, tensor: Tensor) -> Stored:
    """DeepSeek-V3's: a scale for each block of 128 x 128."""
    if _is_kept(name, tensor):
        yield name, tensor
        return
    blocks = [-(-size // _BLOCK) for size in tensor.shape]
    yield name, _meta(*tensor.shape, dtype=torch.float8_e4m3fn)
    yield f"{name}_scale_inv", _meta(*blocks, dtype=torch.float32)


def _fp8_and_fp4(name: str, tensor: Tensor) -> Stored:
    """DeepSeek-V4's: experts in MXFP4, other linears in FP8; scales are exponents."""
    if _is_kept(name, tensor) or not name.endswith(".weight"):
        yield name, tensor
        return
    (rows, inputs), scale = tensor.shape, f"{name.removesuffix('.weight')}.scale"
    if ".experts." in name:
        yield name, _meta(rows, inputs // 2, dtype=torch.int8)
        yield scale, _meta(rows, inputs // _GROUP, dtype=torch.float8_e8m0fnu)
        return
    blocks = [-(-size // _BLOCK) for size in (rows, inputs)]
    yield name, _meta(rows, inputs, dtype=torch.float8_e4m3fn)
    yield scale, _meta(*blocks, dtype=torch.float8_e8m0fnu)


def _mxfp4_stacks(name: str, tensor: Tensor) -> Stored:
    """gpt-oss's: stacks of experts [E, K, N] in MXFP4, with inputs last."""
    if tensor.dim() != 3:
        yield name, tensor
        return
    experts, inputs, features = tensor.shape
    blocks = (experts, features, inputs // _GROUP)
    yield f"{name}_blocks", _meta(*blocks, _GROUP // 2, dtype=torch.uint8)
    yield f"{name}_scales", _meta(*blocks, dtype=torch.uint8)


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]}
_V3 = CONFIGS["DeepSeek-V3"] | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
_V3.pop("quantization_config")
_QWEN = CONFIGS["Qwen3-Next-80B-A3B"]
_GLM = dict(
    architectures=["Glm4MoeForCausalLM"], dtype="bfloat16", vocab_size=151_552, hidden_size=5120,
    intermediate_size=12_288, num_hidden_layers=2, first_k_dense_replace=1,
    num_attention_heads=96, num_key_value_heads=8, head_dim=128, moe_intermediate_size=1536,
    n_routed_experts=160, num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1,
    use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5,
    max_position_embeddings=131_072, num_nextn_predict_layers=1,
)  # fmt: skip
_FLASH = dict(
    architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", dtype="bfloat16",
    num_hidden_layers=2, mlp_layer_types=["dense", "sparse"], num_nextn_predict_layers=1,
)  # fmt: skip
_V4 = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", dtype="bfloat16",
    num_hidden_layers=3, num_nextn_predict_layers=1,
    layer_types=["sliding_attention", "heavily_compressed_attention",
                 "compressed_sparse_attention"],
    mlp_layer_types=["hash_moe", "moe", "moe"],
)  # fmt: skip
_OSS = dict(
    architectures=["GptOssForCausalLM"], model_type="gpt_oss", dtype="bfloat16",
    num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
    num_local_experts=4,
)  # fmt: skip
"""With 4 of 128 experts: mtpc copies stacks whose inputs are not last, and their memory is real."""
RELEASED: Mapping[str, Released] = {
    "DeepSeek-V3": Released(_V3, "FP8 in blocks", _fp8_blocks, _FP8),
    "DeepSeek-V3, bfloat16": Released(_V3, "bfloat16", _plain),
    "DeepSeek-V4-Flash": Released(
        _V4, "FP8 in blocks, experts MXFP4", _fp8_and_fp4,
        _FP8 | {"scale_fmt": "ue8m0"},
    ),
    "Qwen3-Next-80B": Released(
        _QWEN | {"num_hidden_layers": 4, "layer_types": _QWEN["layer_types"][:4],
                 "num_nextn_predict_layers": 1},
        "bfloat16", _plain,
    ),
    "GLM-4.5": Released(_GLM, "bfloat16", _plain),
    "GLM-4.7-Flash": Released(_FLASH, "bfloat16", _plain, ranks=(1, 2)),
    "gpt-oss-120b": Released(
        _OSS, "experts MXFP4", _mxfp4_stacks, {"quant_method": "mxfp4"},
        has_drafts=False,
    ),
}  # fmt: skip
"""By name."""
