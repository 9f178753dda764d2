"""gpt-oss as released: experts in MXFP4 with inputs last, which its class has first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import derived
from helpers.derived import NEW, OPTIONS, PROMPTS
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import mtpc
from mtpc.models.load import load

SAYS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""As openai/gpt-oss-20b has it."""
WIDTH = 64
"""Of the hidden state and of an expert, as of the released ones: a stack of down is square."""
STACKS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory, and transformers' model of the values that its codes stand for, in float64."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    sizes = dict(hidden_size=WIDTH, intermediate_size=WIDTH)
    model = derived.tiny_model("GptOssForCausalLM", **sizes)
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(STACKS):
                codes, exponents = stack(*parameter.shape)
                parameter.copy_(convert_moe_packed_tensors(codes, exponents))
                stored |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
            else:
                stored[name] = parameter.bfloat16()
                parameter.copy_(stored[name])
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    config.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": SAYS}))
    model.config._experts_implementation = "eager"
    return directory, model


def stack(experts: int, inputs: int, features: int) -> tuple[Tensor, Tensor]:
    """Random codes and exponents; the model has the stack as [experts, inputs, features]."""
    blocks = (experts, features, inputs // 32)
    codes = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
    return codes, torch.randint(120, 125, blocks, dtype=torch.uint8)


def test_logits_are_those_of_the_dequantised_weights(released: tuple[Path, Any]) -> None:
    directory, model = released
    loaded = load(directory, "float64", needs_mtp=False)
    for text, found in zip(PROMPTS, derived.stepped_logits(loaded, PROMPTS), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        assert wanted.std() > 0.1
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_text_is_transformers_own(released: tuple[Path, Any]) -> None:
    """And a note says that no kernel reads the codes."""
    directory, model = released
    options = OPTIONS | {"backend": "cpu", "dtype": "float32"}
    spec = mtpc.compile(directory, spec_tokens=0, **options)
    wanted = [derived.continued(model, prompt, 1e-4) for prompt in PROMPTS]
    assert spec.generate([*PROMPTS], NEW, ignore_eos=True) == wanted
    assert any(
        "4 of 4 quantised weight(s) are dequantised" in line for line in spec.stats.fallbacks
    )
