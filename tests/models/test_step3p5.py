"""Step-3.5-Flash: Step-3.7's text model under its own config, names and class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import tiny, uncached
from helpers.explained import explained
from helpers.oracles import DraftOracle, Oracle
from helpers.theorem import PROMPTS, check_after_rejection, check_drafts, check_theorem
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.errors import UnsupportedModelError
from mtpc.models.families.step3p7 import step3p5_class
from mtpc.models.load import load

FEW: dict[str, Any] = {"batch_buckets": (4,)}


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", range(5))
def test_speculative_output_equals_plain_decoding(
    spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    spec = compiled("step3p5", spec_tokens, **FEW)
    check_theorem(spec, oracle("step3p5"), max_examples=8).check_all_happened()


@pytest.mark.slow
def test_partial_acceptance_and_drafts(
    compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """None, some and all drafts accepted; each number planted; drafts as the wiring gives them."""
    spec = compiled("step3p5", 3, **FEW)
    spec.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    rates = spec.stats.acceptance_by_position
    assert 0.05 < rates[2] < rates[0] < 1.0
    for num_accepted in range(4):
        check_after_rejection(spec, oracle("step3p5"), num_accepted)
    prompts = [PROMPTS[3], PROMPTS[9]]
    assert check_drafts(spec, DraftOracle(oracle("step3p5")), prompts, 12) >= 6


def test_the_same_numbers_inside_step3p7(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The released names of both: a Step-3.5 checkpoint's tensors fill Step-3.7's text model."""
    small = checkpoint("step3p5", "random")
    stored = load_file(small / "model.safetensors")
    assert {"model.layers.2.moe.gate_proj.weight", "model.layers.4.eh_proj.weight"} <= stored.keys()
    assert not [name for name in stored if "language_model" in name or "mlp.experts" in name]
    large = tmp_path / "step3p7"
    tiny.make_checkpoint("step3p7", large, seed=5)
    path = large / "model.safetensors"
    merged = load_file(path)
    # transformers writes the text model's own names as Step-3.7 released them: without a prefix.
    assert stored.keys() <= merged.keys()
    save_file({**merged, **stored}, path, metadata={"format": "pt"})
    inner, outer = load(small, "float64", True), load(large, "float64", True)
    ids = torch.tensor([PROMPTS[12]])
    for loaded in (inner, outer):
        loaded.target.set_attn_implementation("eager")
        loaded.config._experts_implementation = "eager"
    with torch.no_grad():
        found = [uncached.target_features(loaded.target, ids) for loaded in (inner, outer)]
    assert torch.equal(found[0], found[1])
    for ours, theirs in zip(inner.mtp_layers, outer.mtp_layers, strict=True):
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_the_released_entries(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """config.json with the names and lists that Step-3.5-Flash was released with."""
    directory = checkpoint("step3p5", "random")
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Step3p5ForCausalLM"]
    assert config["model_type"] == "step3p5"
    released = {**tiny.CONFIGS["step3p5"], "architectures": ["Step3p5ForCausalLM"]}
    released |= {"model_type": "step3p5", "auto_map": {"AutoConfig": "none.Step3p5Config"}}
    released |= {"max_seq_len": 512, "yarn_only_types": ["full_attention"], "use_moe": True}
    for name, text in (("config.json", released), ("generation_config.json", {"eos_token_id": 1})):
        (tmp_path / name).write_text(json.dumps(text))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    found, wanted = load(tmp_path, None, True), load(directory, None, True)
    assert found.config.rope_parameters == wanted.config.rope_parameters
    assert found.config.mtp_layer_types == ["sliding_attention", "full_attention"]
    assert found.weights().keys() == wanted.weights().keys()
    assert explained(found).keys() == found.weights().keys()


@pytest.mark.parametrize("name", ["mtp_layer_types", "mtp_mlp_layer_types"])
def test_lists_without_the_mtp_layers(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A list that is too short is named, and the entries that it leaves out are counted."""
    directory = tiny.with_entries(checkpoint("step3p5", "random"), tmp_path, (), **{name: []})
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: .*2 MTP layers.*`{name}`"):
        load(directory, None, needs_mtp=True)


def test_model_objects(checkpoint: Callable[..., Path]) -> None:
    """Of the class here: adopted, its tensors shared. Of that name from elsewhere: refused."""
    model = step3p5_class().from_pretrained(checkpoint("step3p5"), dtype=torch.float64)
    loaded = load(model, None, needs_mtp=True)
    assert loaded.family.name == "step3p5"
    held = {t.data_ptr() for t in loaded.target.parameters()}
    assert held == {t.data_ptr() for t in model.parameters()}
    remote = type("Step3p5ForCausalLM", (transformers.Qwen2ForCausalLM,), {})
    other = remote(transformers.Qwen2Config(**tiny.CONFIGS["mimo"]))
    with pytest.raises(UnsupportedModelError, match="expected transformers' Step3p5ForCausalLM"):
        mtpc.compile(other, spec_tokens=0, backend="eager")
