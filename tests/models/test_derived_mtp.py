"""MTP layers of families without a row: drafts are those of transformers' own `MtpModel`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import derived, tiny
from helpers.derived import NEW, OPTIONS, PROMPTS
from helpers.explained import explained
from helpers.theorem import check_drafts
from safetensors.torch import load_file

import mtpc
from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.derived import derive
from mtpc.models.graft import graft
from mtpc.models.load import find_family, load
from mtpc.models.mtp_faults import find_faults
from mtpc.models.mtp_layers import build_mtp_layer, stored_tensors

if not transformers.__version__.startswith("5.24."):
    pytest.skip("the rules of MtpModel are of transformers 5.24", allow_module_level=True)

from helpers.mtp_model import CASES, FULL, SLIDING, MtpOracle, save_case

SLOW = pytest.mark.slow
BY_DEFAULT = (("rules", 2),)
ROWS = [
    pytest.param(case, k, marks=[SLOW] * ((case, k) not in BY_DEFAULT))
    for case in CASES
    for k in ((1, 2, 3) if case in ("mellum", "rules") else (3,))
]
"""Cases, and drafts: fewer than MTP layers, as many, and more."""
NAMES = {
    "mellum": ("mtp.fc", "mtp.norm", "mtp.layers.0.self_attn.q_norm", "mtp.layers.0.mlp.gate"),
    "rules": ("model.layers.3.eh_proj", "model.mtp.chain_norm", "model.layers.2.mlp.gate"),
    "hy_v3": ("model.layers.2.mlp.router.gate", "model.layers.2.shared_head.norm"),
    "axk1": ("model.layers.2.post_mlp_layernorm", "model.layers.3.mlp.up_proj"),
}
"""Some names of tensors, without ".weight", as transformers' conversions read them."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a case with random weights; written once."""
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("case")
            save_case(case, made[case])
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_rows_are_transformers_own(case: str, saved: Callable[[str], Path]) -> None:
    """Logits of every layer and row, in chunks and one by one, three texts at once."""
    oracle = MtpOracle(saved(case))
    loaded = load(saved(case), "float64", needs_mtp=True)
    wanted = [oracle.rows(text) for text in PROMPTS]
    for layer, texts in enumerate(derived.stepped_drafts(loaded, PROMPTS)):
        for found, expected in zip(texts, wanted, strict=True):
            size = expected[layer].shape[-1]
            torch.testing.assert_close(found[:, :size], expected[layer], rtol=0, atol=1e-5)
            assert bool(found[:, size:].isneginf().all())


@pytest.mark.parametrize(("case", "spec_tokens"), ROWS)
def test_drafts_and_text_are_transformers_own(
    case: str, spec_tokens: int, saved: Callable[[str], Path]
) -> None:
    """After every step, in company; K below, at and above the number of layers."""
    oracle = MtpOracle(saved(case))
    spec = mtpc.compile(saved(case), spec_tokens=spec_tokens, **OPTIONS)
    assert check_drafts(spec, oracle, [PROMPTS[0], PROMPTS[2]], NEW) >= NEW
    wanted = [derived.continued(oracle.model, prompt, 1e-6) for prompt in PROMPTS]
    assert spec.generate([*PROMPTS], NEW, ignore_eos=True) == wanted


@pytest.mark.parametrize("case", NAMES)
def test_names_are_those_that_transformers_reads(case: str, saved: Callable[[str], Path]) -> None:
    """And each weight has a recipe over stored names, for warm starts."""
    assert {f"{name}.weight" for name in NAMES[case]} <= load_file(
        saved(case) / "model.safetensors"
    ).keys()
    read = MtpOracle(saved(case)).mtp  # Its loader refuses a checkpoint that lacks a tensor.
    loaded = load(saved(case), "float64", needs_mtp=True)
    layers, recipes = loaded.mtp_layers, explained(loaded)
    assert [n for n in loaded.weights() if n.startswith("mtp.") and n not in recipes] == []
    assert len(layers) == len(read.layers) == CASES[case][1]["num_mtp_layers"]
    for found, wanted in zip(layers, read.layers, strict=True):
        block = wanted.mtp_block.state_dict()
        assert found.block.state_dict().keys() == block.keys()
        assert all(torch.equal(found.block.state_dict()[name], t) for name, t in block.items())


def test_what_mtp_layers_keep(saved: Callable[[str], Path]) -> None:
    """By their own layer types: Mellum's slides, whatever the target's last layer does."""
    for case, last in (("mellum", SLIDING), ("mellum, full", FULL)):
        loaded = load(saved(case), None, needs_mtp=True)
        names = [spec.name for spec in loaded.cache_specs(2)]
        ring = "ring_" if last == SLIDING else ""
        assert names == [f"kv.2.{ring}k", f"kv.2.{ring}v"]


def test_a_model_object_brings_its_layers(saved: Callable[[str], Path]) -> None:
    directory = saved("mellum")
    model = transformers.MellumForCausalLM.from_pretrained(directory)
    (found,), (wanted,) = (load(s, None, needs_mtp=True).mtp_layers for s in (model, directory))
    assert torch.equal(found.projection.weight, wanted.projection.weight)


@pytest.mark.slow
def test_text_in_bfloat16_as_users_compile_it(tmp_path: Path) -> None:
    """The cpu backend with its own options; drafts are accepted in part, and change nothing."""
    save_case("mellum", tmp_path, adapted=True)
    few: dict[str, Any] = {"max_len": 64, "batch_buckets": (4,), "dtype": "bfloat16"}
    texts = []
    for spec_tokens in (0, 2):
        spec = mtpc.compile(tmp_path, spec_tokens=spec_tokens, **few)
        texts.append(spec.generate([*PROMPTS], 20, ignore_eos=True))
        assert not spec.stats.fallbacks
    assert texts[0] == texts[1]
    assert 0 < spec.stats.accepted[0] <= spec.stats.drafted[0]
    assert sum(spec.stats.accepted) < sum(spec.stats.drafted)


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_family_file_says_what_is_derived(name: str) -> None:
    """Names, shapes, state and wiring of two families that have a file, without it."""
    own, found = find_family([name]), derive([name], {"num_nextn_predict_layers": 1})
    assert found is not None
    model = tiny.build_target(own.name)
    config = tiny.text_config(model)
    wiring = {**vars(found.wiring), "head": "own", "embedding": "own"}
    assert wiring == vars(own.wiring)
    assert (found.num_mtp_layers(config), found.rotary_type(config, 0)) == (1, None)
    stored = [
        {
            family.layer_prefix(2, 0) + name: tensor.shape
            for name, tensor in stored_tensors(build_mtp_layer(family, model), family)
        }
        for family in (own, found)
    ]
    assert stored[0] == stored[1]
    for layer in range(3):
        specs = [family.cache_specs(config, layer, torch.float64) for family in (own, found)]
        assert specs[0] == specs[1]


@pytest.mark.parametrize("model_type", ["sarvam_moe", "sarvam_mla"])
def test_types_that_borrow_a_class(model_type: str, tmp_path: Path) -> None:
    """Sarvam as released: architectures that transformers lacks, and names of its own."""
    model: Any = save_case(model_type, tmp_path / "made", count=0)
    name = type(model.config).__name__.replace("Config", "ForCausalLM")
    entries = {"architectures": [name]}
    directory = tiny.with_entries(tmp_path / "made", tmp_path / "released", (), **entries)
    loaded = load(directory, "float64", needs_mtp=False)
    assert type(loaded.config) is type(model.config)
    model.config._experts_implementation = "eager"
    for text, found in zip(PROMPTS, derived.stepped_logits(loaded, PROMPTS), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_graft_brings_all_tensors_back(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The norm that all layers share, too, which is stored beside them."""
    save_case("rules", tmp_path / "tuned", count=0)
    graft(saved("rules"), tmp_path / "tuned", tmp_path / "out")
    assert find_faults(tmp_path / "out") == []
    assert len(load(tmp_path / "out", None, needs_mtp=True).mtp_layers) == 2


def test_layers_that_are_announced_and_absent(tmp_path: Path) -> None:
    """One error where drafts are asked for; else a line that says why there are none."""
    save_case("mellum", tmp_path / "made", count=0)
    entries = {"num_nextn_predict_layers": 1}
    directory = tiny.with_entries(tmp_path / "made", tmp_path / "lost", (), **entries)
    with pytest.raises(CheckpointError, match=r"has lost the MTP layers .* use spec_tokens=0"):
        mtpc.compile(directory, spec_tokens=1, **OPTIONS)
    spec = mtpc.compile(directory, **OPTIONS)
    assert spec.options.spec_tokens == 0
    assert any("has lost the MTP layers" in line for line in spec.stats.fallbacks)


def test_an_entry_that_is_no_number() -> None:
    entries = {"num_mtp_layers": 1, "unpadded_vocab_size": "100"}
    with pytest.raises(UnsupportedModelError, match="unpadded_vocab_size is '100'; expected a num"):
        derive(["SolarOpenForCausalLM"], entries)


def test_layers_of_unknown_kinds(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A config that lists the target's kinds alone: transformers cannot tell either."""
    drop = ("mtp_mlp_layer_types", "num_mtp_layers")
    tiny.with_entries(saved("hy_v3"), tmp_path, drop, num_nextn_predict_layers=1)
    with pytest.raises(UnsupportedModelError, match=r"`mtp_mlp_layer_types` is ambiguous.*spec_"):
        load(tmp_path, None, needs_mtp=True)
    assert load(tmp_path, None, needs_mtp=False).mtp_layers == ()
