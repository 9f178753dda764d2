"""gpt-oss as OpenAI released it: experts in MXFP4 codes, as tensors of blocks and exponents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Codes: TypeAlias = dict[str, Tensor]
"""Blocks and exponents by their released names."""
SAYS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""As openai/gpt-oss-20b has it."""
STACKS = ("experts.gate_up_proj", "experts.down_proj")
"""What is stored in codes."""


def stack(experts: int, inputs: int, features: int) -> tuple[Tensor, Tensor]:
    """Random codes and exponents; the model has the stack as [experts, inputs, features]."""
    blocks = (experts, features, inputs // 32)
    codes = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
    return codes, torch.randint(120, 125, blocks, dtype=torch.uint8)


@torch.no_grad()
def with_codes(model: Any) -> Codes:
    """Give a model's experts the values of random codes; returns the codes."""
    found: Codes = {}
    for name, parameter in model.named_parameters():
        if name.endswith(STACKS):
            codes, exponents = stack(*parameter.shape)
            parameter.copy_(convert_moe_packed_tensors(codes, exponents))
            found |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
    return found


def save_released(model: Any, codes: Codes, directory: Path, dtype: torch.dtype) -> Path:
    """A checkpoint of a model whose experts have the values of these codes; the rest in a dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    rest = ((n, p) for n, p in model.named_parameters() if not n.endswith(STACKS))
    plain = {name: parameter.detach().to(dtype) for name, parameter in rest}
    save_file(plain | codes, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    config.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": SAYS}))
    return directory
