"""Qwen3.5, dense and mixture of experts: what qwen3_next's tests show, and what only they have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import tiny
from helpers.explained import explained
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.theorem import PROMPTS, check_after_rejection, check_drafts, check_theorem, poison
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.layout import Layout
from mtpc.layout.buffers import K_MAX, S
from mtpc.models.families.qwen3_next import GatedDelta
from mtpc.models.load import load
from mtpc.weights.checkpoint import Checkpoint

QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
FEW: dict[str, Any] = {"batch_buckets": (4,)}


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [pytest.param(family, k, marks=pytest.mark.slow) for family in QWEN3_5 for k in range(5)],
)
def test_speculative_output_equals_plain_decoding(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """K = 0..4, ragged, joins and leaves, poisoned, in a bucket of 4.

    The fast part has the text and the drafts of qwen3_next, whose state it is; and of this family
    in models/test_images.py, whose prompts are with images and without.
    """
    spec = compiled(family, spec_tokens, **FEW)
    check_theorem(spec, oracle(family), max_examples=12).check_all_happened()


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN3_5)
def test_partial_acceptance(
    family: str, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """None, some and all drafts accepted, by themselves; then each number of them, planted."""
    spec = compiled(family, 3, **FEW)
    spec.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    rates = spec.stats.acceptance_by_position
    assert 0.05 < rates[2] < rates[0] < 1.0
    for num_accepted in range(4):
        check_after_rejection(spec, oracle(family), num_accepted)


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN3_5)
def test_drafts_equal_the_released_names(
    family: str, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    spec = compiled(family, 3, **FEW)
    prompts = [PROMPTS[5], PROMPTS[10]]
    assert check_drafts(spec, DraftOracle(oracle(family)), prompts, 10) >= 6


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers names them: `gate_up_proj` [E, 2I, H] and `down_proj`."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for stem in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        for part, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            each = [
                torch.cat([tensors[f"{stem}.experts.{i}.{n}_proj.weight"] for n in names])
                for i in range(4)
            ]
            out[f"{stem}.experts.{part}"] = torch.stack(each)
    return out


def nest(source: Path, target: Path) -> Path:
    """A text checkpoint as released ones are: inside a multimodal config, its experts stacked."""
    shutil.copytree(source, target)
    tensors = stack_experts(load_file(target / "model.safetensors"))
    inner = {
        name.replace("model.", "model.language_model.", 1) if name[:6] == "model." else name: tensor
        for name, tensor in tensors.items()
    }
    inner["model.visual.patch_embed.proj.bias"] = torch.zeros(4)
    save_file(inner, target / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((target / "config.json").read_text())
    outer = {
        "architectures": [
            text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
        ],
        "model_type": text["model_type"].removesuffix("_text"),
        "eos_token_id": text.pop("eos_token_id"),
        "text_config": text,
    }
    (target / "config.json").write_text(json.dumps(outer))
    (target / "generation_config.json").unlink(missing_ok=True)
    return target


@pytest.mark.parametrize("family", QWEN3_5)
def test_inside_a_multimodal_checkpoint(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Config under `text_config`, names under `model.language_model.`: the same weights."""
    plain = load(checkpoint(family), "float64", True)
    nested = load(nest(checkpoint(family), tmp_path / "nested"), "float64", True)
    assert nested.family is plain.family
    assert nested.stop_ids == plain.stop_ids == (1,)
    assert nested.config.layer_types == plain.config.layer_types
    wanted = plain.weights()
    assert nested.weights().keys() == wanted.keys()
    for name, tensor in nested.weights().items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("family", "nested"),
    [("qwen3_next", False), *((family, nested) for family in QWEN3_5 for nested in (False, True))],
)
def test_every_weight_has_a_recipe(
    family: str, nested: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """What a warm start rests on: each stored tensor is explained, bit for bit."""
    directory = checkpoint(family)
    if nested:
        directory = nest(directory, tmp_path / "nested")
    loaded = load(directory, None, True)
    recipes = explained(loaded)
    assert loaded.weights().keys() == recipes.keys()
    constant = {name for name, recipe in recipes.items() if recipe is None}
    assert all("inv_freq" in name for name in constant)


def test_a_multimodal_object_is_refused() -> None:
    config = transformers.Qwen3_5Config(text_config=tiny.CONFIGS["qwen3_5"], vision_config=_VISION)
    with torch.device("meta"):
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match=r"transformers\.Qwen3_5ForCausalLM"):
        mtpc.compile(model, spec_tokens=0, backend="eager")


_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}


def own_object(directory: Path) -> Any:
    return transformers.Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float64)


def test_a_model_object(checkpoint: Callable[..., Path]) -> None:
    """The user's model keeps its own layers; parameters are shared, the canonical ones' too."""
    model = own_object(checkpoint("qwen3_5"))
    loaded = load(model, None, needs_mtp=True)
    held = {t.data_ptr() for t in loaded.target.parameters()}
    assert held == {t.data_ptr() for t in model.parameters()}
    assert [m for m in loaded.target.modules() if isinstance(m, GatedDelta)]
    assert not [m for m in model.modules() if isinstance(m, GatedDelta)]


@pytest.mark.slow
def test_text_of_a_model_object(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    spec = mtpc.compile(
        own_object(checkpoint("qwen3_5")), spec_tokens=2, backend="eager", **TINY, **FEW
    )
    assert spec.generate(PROMPTS[4], 8) == oracle("qwen3_5").generate(PROMPTS[4], 8)


def test_mtp_tensors_are_counted(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Qwen3-Next's config says nothing of its MTP layer; its tensors must all be there."""
    for name in ("mtp.fc.weight", "mtp."):
        directory = tmp_path / name
        shutil.copytree(checkpoint("qwen3_next"), directory)
        path = directory / "model.safetensors"
        kept = {n: t for n, t in load_file(path).items() if not n.startswith(name)}
        save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing projection\.weight; unexpected none"):
        load(tmp_path / "mtp.fc.weight", None, True)
    with pytest.raises(CheckpointError, match=r"no tensor is named mtp\.\*.*spec_tokens=0"):
        load(tmp_path / "mtp.", None, True)
    load(tmp_path / "mtp.", None, needs_mtp=False)


def test_an_unknown_mtp_tensor(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("qwen3_5"), tmp_path / "extra"))
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected layers\.1\.mlp\.up_proj\.weight"):
        load(directory, None, True)


@pytest.mark.parametrize("family", ["qwen3_next", *QWEN3_5])
def test_memory_per_request(family: str, checkpoint: Callable[..., Path]) -> None:
    """One state and K + W - 1 inputs a request and layer: docs/models.md's closed form."""
    loaded = load(Checkpoint(checkpoint(family)), "bfloat16", True)
    config, drafts = loaded.config, 4
    specs = [s for s in loaded.state_specs if s.dims[0] == S]
    layout = Layout(specs, {S: 1, K_MAX: drafts})
    heads, key, value = 4, 8, 12
    channels = 2 * 2 * key + heads * value
    state = heads * key * value * 4
    inputs = (drafts + config.linear_conv_kernel_dim - 1) * (channels + 2 * heads) * 2
    layers = config.layer_types.count("linear_attention")
    assert sum(layout.nbytes(name) for name in layout) == layers * (state + inputs + 4)


def test_a_slot_used_again(compiled: Callable[..., Any], oracle: Callable[..., Oracle]) -> None:
    """A request that joins a slot starts from nothing, whatever its last one left, NaN included."""
    spec, plain = compiled("qwen3_next", 3), oracle("qwen3_next")
    poison(spec)
    slots = []
    for prompt in (PROMPTS[7], PROMPTS[0], PROMPTS[9]):
        spec.engine.add(prompt, 9)
        found = []
        while spec.engine.has_work:
            found += [token for output in spec.engine.step() for token in output.token_ids]
            slots += [request.slot for request in spec.engine.running]
        assert found == plain.generate(prompt, 9, stop=False)
    assert len(set(slots)) == 1
