"""The shapes that benchmarks.gpu measures. Their weights are made on the device.

With these weights every draft is accepted (benchmarks/harness/models.py explains how), so that all
engines have the same acceptance, and only times are compared. Unlike there, attention and
feed-forward write values, too, together about as large as the embedding, which still decides the
token. So a kernel that writes garbage lowers the acceptance. The part gate checks the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.harness.models import INITIALIZER_RANGE, make_successor_model, split_off_mtp_layer
from mtpc.models import FAMILIES
from mtpc.models.load import LoadedModel
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.seams import share_model, stand_in

_DENSE_GLM4 = dict(
    first_k_dense_replace=1_000, n_routed_experts=2, num_experts_per_tok=2, n_shared_experts=2,
    n_group=1, topk_group=1,
)  # fmt: skip
"""GLM-4 without experts in the target; transformers builds its MTP layer with them regardless, and
all of them are chosen: they hold as much as a dense layer's feed-forward."""


@dataclass(frozen=True)
class Shape:
    """A family and the config of a model in it, without the MTP layer."""

    family: str
    config: dict[str, Any]


SHAPES = {
    "glm4-8b": Shape(
        "glm4_moe",
        _DENSE_GLM4
        | dict(
            hidden_size=4096, num_hidden_layers=32, intermediate_size=13_696, vocab_size=151_552,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            moe_intermediate_size=13_696 // 4,
        ),
    ),
    "mla-moe-16b": Shape(
        "deepseek_v3",
        dict(
            hidden_size=2048, num_hidden_layers=27, intermediate_size=10_944, vocab_size=102_400,
            num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=1408,
            n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        ),
    ),
    "glm4-0.5b": Shape(
        "glm4_moe",
        _DENSE_GLM4
        | dict(
            hidden_size=1024, num_hidden_layers=28, intermediate_size=4096, vocab_size=32_768,
            num_attention_heads=16, num_key_value_heads=4, head_dim=64, moe_intermediate_size=1024,
        ),
    ),
    "glm4.5-air": Shape(
        "glm4_moe",
        dict(
            hidden_size=4096, num_hidden_layers=46, intermediate_size=10_944, vocab_size=151_552,
            num_attention_heads=96, num_key_value_heads=8, head_dim=128, moe_intermediate_size=1408,
            n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        ),
    ),
    "deepseek-v3": Shape(
        "deepseek_v3",
        dict(
            hidden_size=7168, num_hidden_layers=61, intermediate_size=18_432, vocab_size=129_280,
            num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=2048,
            n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, n_group=8,
            topk_group=4, first_k_dense_replace=3,
        ),
    ),
    "tiny-glm4": Shape(
        "glm4_moe",
        _DENSE_GLM4
        | dict(
            hidden_size=64, num_hidden_layers=2, intermediate_size=128, vocab_size=96,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32,
        ),
    ),
    "tiny-mla-moe": Shape(
        "deepseek_v3",
        dict(
            hidden_size=64, num_hidden_layers=2, intermediate_size=96, vocab_size=96,
            num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32,
            qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, moe_intermediate_size=32,
            n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
            topk_group=1, first_k_dense_replace=1,
        ),
    ),
}  # fmt: skip
"""An 8B dense GLM-4, and a mixture with latent attention of DeepSeek-V2-Lite's sizes; a small GLM-4
and two released shapes, for benchmarks.gpu_model; tiny ones, for dry runs."""
MEASURED = ("glm4-0.5b", "glm4-8b", "mla-moe-16b")
"""Those that benchmarks.gpu measures, unless it is told which."""


def build(
    name: str, device: str, layers: int | None = None, accepting: bool = True
) -> tuple[LoadedModel, Any]:
    """A model of a shape on a device, in bfloat16.

    Args:
        name: of SHAPES.
        device: where its weights are made.
        layers: instead of the shape's own number of decoder layers.
        accepting: weights of which every greedy draft is accepted, instead of random ones.

    Returns:
        What mtpc compiles, and transformers' model, which has the same tensors.
    """
    shape = SHAPES[name]
    family = next(f for f in FAMILIES if f.name == shape.family)
    depth = layers or shape.config["num_hidden_layers"]
    sizes = shape.config | dict(num_hidden_layers=depth + 1)
    sizes["first_k_dense_replace"] = min(sizes["first_k_dense_replace"], depth)
    config = getattr(transformers, family.hf_config_class)(
        **sizes, initializer_range=INITIALIZER_RANGE, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        if accepting:
            make_successor_model(model)
            _stir(model, depth)
        cut_off = split_off_mtp_layer(model, family, accepting)
        target = share_model(model, family.canonical)
        layer = build_mtp_layer(family, target, 0).eval()
    layer.load_state_dict(cut_off.state_dict(), assign=True)
    stand_in(layer, family.canonical)
    return LoadedModel(family, target, (layer,), (), name, None, owned=True), model


@torch.no_grad()
def _stir(model: Any, depth: int) -> None:
    """Make attention and feed-forward write values, together about as large as the embedding."""
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            inputs = parameter.shape[-1]
            parameter.normal_(std=INITIALIZER_RANGE / (2 * depth * inputs) ** 0.5)


@dataclass(frozen=True)
class Bytes:
    """Bytes of the weights that a step must read, with chosen experts only."""

    target: int
    head: int
    draft: int

    def step(self, spec_tokens: int) -> int:
        """Bytes of a step: the target once, the draft K times, the head for each."""
        return self.target + self.head + spec_tokens * (self.draft + self.head)


def weigh(loaded: LoadedModel, rows: int) -> Bytes:
    """What is read for a target pass of that many rows, and for a draft of as many.

    Of experts, as many as the rows choose, should they all choose others.
    """
    config = loaded.config
    experts = getattr(config, "n_routed_experts", 1)
    share = min(1.0, rows * getattr(config, "num_experts_per_tok", 1) / experts)

    def total(module: Any) -> int:
        return int(sum(_read(name, t, share) for name, t in module.named_parameters()))

    return Bytes(
        total(loaded.target.get_decoder()) - loaded.target.get_input_embeddings().weight.nbytes,
        loaded.target.get_output_embeddings().weight.nbytes,
        total(loaded.mtp_layers[0]),
    )


def _read(name: str, tensor: Tensor, share: float) -> float:
    is_stack = ".experts." in name and "shared" not in name
    return tensor.nbytes * (share if is_stack else 1.0)
