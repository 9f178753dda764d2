"""gpt-oss as released: experts in MXFP4 with inputs last, which its class has first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import derived
from helpers.derived import NEW, OPTIONS, PROMPTS
from helpers.plans import plan_of
from helpers.released.gpt_oss import STACKS, save_released, with_codes
from helpers.whole_steps import model_of
from safetensors.torch import load_file
from torch import Tensor

import mtpc
from mtpc.api import SpecModel
from mtpc.backends.base import Backend
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.cuda import CudaBackend, GpuBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.null import NullGraphs
from mtpc.errors import CheckpointError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.weights.block_rows import BlockRows
from mtpc.weights.checkpoint import Checkpoint

WIDTH = 64
"""Of the hidden state and of an expert, as of the released ones: a stack of down is square."""
FIRST = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory, and transformers' model of the values that its codes stand for, in float64."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    sizes = dict(hidden_size=WIDTH, intermediate_size=WIDTH)
    model = derived.tiny_model("GptOssForCausalLM", **sizes)
    codes = with_codes(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    save_released(model, codes, directory, torch.bfloat16)
    model.config._experts_implementation = "eager"
    return directory, model


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


def _compiler(directory: Path, backend: Backend) -> StepCompiler:
    plan = plan_of(**{**SIZES, "spec_tokens": 0, "batch_buckets": (1,)})
    return StepCompiler(load(directory, "bfloat16", needs_mtp=False), plan, backend)


@pytest.mark.parametrize("backend", [CpuBackend(), GpuBackend((), "cpu", False)])
def test_codes_stay_codes(released: tuple[Path, Any], backend: Backend) -> None:
    """A step reads no dequantised weight of an expert, and its codes take up to 4.5 bits each, 8.5
    for GPUs."""
    directory, model = released
    compiler = _compiler(directory, backend)
    graph = compiler.rewrite(compiler.trace(StepKey.decode(1, 0)))
    held = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    read = [name for name in held if "experts" in name and not name.endswith("_bias")]
    assert {name.rpartition(".")[2] for name in read} == {"codes", "scales"}
    weights = sum(p.numel() for n, p in model.named_parameters() if n.endswith(STACKS))
    most, scales = (4.5, torch.uint8) if isinstance(backend, CpuBackend) else (8.5, torch.bfloat16)
    assert {graph.weights[name].dtype for name in read if name.endswith("scales")} == {scales}
    assert 0 < 8 * sum(graph.weights[name].nbytes for name in read) <= most * weights


def test_logits_are_near_those_of_the_dequantised_weights(released: tuple[Path, Any]) -> None:
    """In bfloat16, with inputs of products rounded to int8; by log-probabilities of texts."""
    directory, model = released
    spec = mtpc.compile(directory, spec_tokens=0, batch_buckets=(1,), **CPU)
    assert not spec.stats.fallbacks
    assert _mean_error(spec, model, MORE) < NEAR


def _mean_error(spec: SpecModel, model: Any, prompts: list[list[int]]) -> float:
    """Of the five largest log-probabilities of each token, beside the dequantised weights'."""
    errors = []
    for prompt in prompts:
        found = spec.generate(prompt, LONG, ignore_eos=True, logprobs=5)
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *found]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.std() > 1
        for row, token in zip(logits.log_softmax(-1), found.logprobs or [], strict=True):
            errors += [abs(value - float(row[each])) for each, value in token.top]
    assert len(errors) == 5 * LONG * len(prompts)
    return sum(errors) / len(errors)


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


def test_logits_of_the_codes_that_gpus_read(released: tuple[Path, Any]) -> None:
    """By the references, on the null device."""
    directory, model = released
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, (), device="cpu")
    spec = model_of(_compiler(directory, backend))
    assert _mean_error(spec, model, MORE[:2]) < NEAR


# ---- GGUF ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(released: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(released, tmp_path_factory.mktemp("gguf") / "gpt-oss.gguf")


def write_gguf(
    released: tuple[Path, Any], path: Path, is_plain: bool = False, without: str = ""
) -> Path:
    """The same model as llama.cpp's converter writes it: gates and ups apart, in its blocks.

    Args:
        released: the model.
        path: of the file.
        is_plain: whether experts are float32 instead.
        without: the end of names that are left out.
    """
    gguf = pytest.importorskip("gguf")
    directory, model = released
    writer = gguf.GGUFWriter(path, "gpt-oss")
    add_sizes(writer, gguf, model.config)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, model.config.num_hidden_layers)
    for name, tensor in tensors_of(load_file(directory / "model.safetensors"), model, is_plain):
        target = str(table.get_name(name, (".weight", ".bias")))
        if without and target.endswith(without):
            continue
        kind = gguf.GGMLQuantizationType.MXFP4 if tensor.dtype == torch.uint8 else None
        writer.add_tensor(target, tensor.contiguous().numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(
    stored: dict[str, Tensor], model: Any, is_plain: bool
) -> Iterator[tuple[str, Tensor]]:
    """Names that gguf knows, and float32 tensors or bytes of blocks."""
    values = dict(model.named_parameters())
    for name, tensor in stored.items():
        if name.endswith("_scales"):
            continue
        stem, made = re.sub(r"_(blocks|bias)$", "", name), tensor.float()
        if name.endswith("_blocks"):
            scales = stored[f"{stem}_scales"]
            made = values[stem].detach().mT.float() if is_plain else ggml_blocks(tensor, scales)
        end = ".bias" if name.endswith("_bias") else ".weight"
        end = "" if name.endswith((".weight", ".bias")) else end
        if "gate_up_proj" not in name:
            yield f"{stem}{end}", made
            continue
        for turn, part in enumerate(("gate_proj", "up_proj")):
            yield stem.replace("gate_up_proj", part) + end, made[:, turn::2]


def ggml_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks of 17 bytes [E, N, B * 17]: the exponent, then codes j and j + 16 in a byte."""
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    joined = each[..., :16] | each[..., 16:] << 4
    return torch.cat((scales[..., None], joined), -1).flatten(-2)


def add_sizes(writer: Any, gguf: Any, config: Any) -> None:
    """The metadata that llama.cpp's converter writes."""
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)


@pytest.mark.parametrize("is_plain", [False, True])
def test_logits_of_a_gguf_file(is_plain: bool, released: tuple[Path, Any], tmp_path: Path) -> None:
    """Dequantised, or written as plain numbers: names, values and the config are right."""
    path = write_gguf(released, tmp_path / "gpt-oss.gguf", is_plain)
    loaded = load(path, "float64", needs_mtp=False)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.notes == ()) == is_plain
    for text, found in zip(PROMPTS, derived.stepped_logits(loaded, PROMPTS), strict=True):
        with torch.no_grad():
            wanted = released[1](input_ids=torch.tensor([text]), use_cache=False).logits[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_a_gguf_file_without_ups_is_refused(released: tuple[Path, Any], tmp_path: Path) -> None:
    path = write_gguf(released, tmp_path / "gpt-oss.gguf", without="ffn_up_exps.bias")
    with pytest.raises(CheckpointError, match=r"up_proj_bias is missing beside .*gate_proj_bias"):
        load(path, None, needs_mtp=False)


def test_text_of_a_gguf_file(file: Path, plain: list[Any]) -> None:
    """The same codes are kept, so text is that of the released files; the kernel that packs blocks
    has them as the file has them."""
    for part in STACKS:
        assert isinstance(Checkpoint(file).grouped(f"{FIRST}.{part}").read(0, 1), BlockRows)
    spec = mtpc.compile(file, draft="copy", spec_tokens=3, batch_buckets=(4,), **CPU)
    assert [spec.generate(MORE, LONG, **FREE | asked) for asked in ASKED] == plain
    assert not spec.stats.fallbacks
