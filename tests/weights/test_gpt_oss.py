"""gpt-oss as released: experts in MXFP4 with inputs last, which its class has first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import derived
from helpers.derived import NEW, OPTIONS, PROMPTS
from helpers.whole_steps import compiler_of
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import mtpc
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.layout import StepKey
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
    """And a note says that this backend reads no codes."""
    directory, model = released
    spec = mtpc.compile(directory, spec_tokens=0, **OPTIONS)
    wanted = [derived.continued(model, prompt, 1e-4) for prompt in PROMPTS]
    assert spec.generate([*PROMPTS], NEW, ignore_eos=True) == wanted
    assert any(
        "4 of 4 quantised weight(s) are dequantised" in line for line in spec.stats.fallbacks
    )


# ---- Codes of 4 bits, on the cpu backend -----------------------------------------------------

SIZES: dict[str, Any] = dict(max_len=96, prefill_chunk=16, page_size=8)
CPU = {**SIZES, "backend": "cpu"}
MORE = [*PROMPTS, [8, 3, 5] * 6]
LONG = 40
"""Tokens of a text."""
NEAR = 0.1
"""Mean error of log-probabilities; that of the same model in bfloat16, without codes, is 0.055."""


def test_codes_stay_codes(released: tuple[Path, Any]) -> None:
    """A step reads no dequantised weight of an expert, and its codes take up to 4.5 bits each."""
    directory, model = released
    options = {**SIZES, "spec_tokens": 0, "batch_buckets": (1,)}
    compiler = compiler_of(directory, "bfloat16", CpuBackend(), **options)
    graph = compiler.rewrite(compiler.trace(StepKey.decode(1, 0)))
    held = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    read = [name for name in held if "experts" in name and not name.endswith("_bias")]
    assert {name.rpartition(".")[2] for name in read} == {"codes", "scales"}
    weights = sum(p.numel() for n, p in model.named_parameters() if n.endswith(STACKS))
    assert 0 < 8 * sum(graph.weights[name].nbytes for name in read) <= 4.5 * weights


def test_logits_are_near_those_of_the_dequantised_weights(released: tuple[Path, Any]) -> None:
    """In bfloat16, with inputs of products rounded to int8; by log-probabilities of texts."""
    directory, model = released
    spec = mtpc.compile(directory, spec_tokens=0, batch_buckets=(1,), **CPU)
    assert not spec.stats.fallbacks
    errors = []
    for prompt in MORE:
        found = spec.generate(prompt, LONG, ignore_eos=True, logprobs=5)
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *found]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.std() > 1
        for row, token in zip(logits.log_softmax(-1), found.logprobs or [], strict=True):
            errors += [abs(value - float(row[each])) for each, value in token.top]
    assert len(errors) == 5 * LONG * len(MORE)
    assert sum(errors) < NEAR * len(errors)


@pytest.fixture(scope="module")
def plain(released: tuple[Path, Any]) -> list[list[list[int]]]:
    """Plain decoding, one request at a time."""
    spec = mtpc.compile(released[0], spec_tokens=0, batch_buckets=(1,), **CPU)
    return [
        [list(spec.generate(prompt, LONG, **FREE | asked)) for prompt in MORE] for asked in ASKED
    ]


FREE: dict[str, Any] = {"ignore_eos": True}
ASKED: tuple[dict[str, Any], ...] = ({}, {"allowed_ids": (3, 5)})
"""A text of two tokens repeats itself, so copies are found, and half of them are right."""


@pytest.mark.parametrize(
    ("count", "batch", "chunk"), [(0, 4, 16), (3, 1, 16), (3, 4, 5), (1, 4, 16)]
)
def test_text_is_plain_decoding(
    released: tuple[Path, Any], plain: list[Any], count: int, batch: int, chunk: int
) -> None:
    """With copies of the text as drafts, in batches, and in other chunks."""
    copies = {"draft": "copy"} if count else {}
    options = {**CPU, "prefill_chunk": chunk, "batch_buckets": (batch,), **copies}
    spec = mtpc.compile(released[0], spec_tokens=count, **options)
    assert [spec.generate(MORE, LONG, **FREE | asked) for asked in ASKED] == plain
    assert not spec.stats.fallbacks
    assert (0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)) == (count > 0)
