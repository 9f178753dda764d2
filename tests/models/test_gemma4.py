"""Gemma 4: released names, text of transformers' generate, its assistant, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import assistant, tiny
from helpers.explained import explained
from helpers.families import ASSISTED, TINY
from helpers.theorem import PROMPTS, check_caches, poison
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.errors import CheckpointError, MtpcError, UnsupportedModelError
from mtpc.models.heads import target_head
from mtpc.models.hf import model_class
from mtpc.models.load import load
from mtpc.weights.checkpoint import open_checkpoint

OPTIONS: dict[str, Any] = {**TINY, "backend": "eager", "batch_buckets": (1,)}
CLASSES = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified", "gemma4@experts": "Gemma4"}


def released(source: Path, directory: Path, name: str) -> Path:
    """A checkpoint as its authors write it: inside a multimodal model, with its towers, and with
    keys of layers that read those of others."""
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    heads = next(iter(config.pop("per_layer_config").values()))
    del config["architectures"], config["num_nextn_predict_layers"]
    config |= {"global_head_dim": heads["head_dim"]}
    config |= {"num_global_key_value_heads": heads.get("num_key_value_heads")}
    outer = {"architectures": [f"{CLASSES[name]}ForConditionalGeneration"], "dtype": "float32"}
    kind = name.partition("@")[0]
    outer |= {"model_type": kind, "text_config": config, "image_token_id": 90}
    outer |= {"vision_config": {"model_type": f"{kind}_vision"}, "audio_config": None}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = {
        n.replace("model.", "model.language_model."): t
        for n, t in load_file(source / "model.safetensors").items()
    }
    tensors["model.vision_tower.encoder.layers.0.mlp.gate_proj.weight"] = torch.randn(4, 4)
    tensors["model.embed_vision.embedding_projection.weight"] = torch.randn(4, 4)
    if name == "gemma4":
        tensors["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.randn(48, 64)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(source / "draft", directory / "draft")
    return directory


@pytest.mark.parametrize("family", ASSISTED)
def test_released_names(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The authors' files give the model that transformers' own give; each weight has a recipe."""
    source = checkpoint(family, "random")
    directory = released(source, tmp_path / "released", family)
    plain = load(open_checkpoint(source, source / "draft"), None, True)
    nested = load(open_checkpoint(directory, directory / "draft"), None, True)
    assert nested.family.name == family.partition("@")[0]
    assert nested.state_specs == plain.state_specs
    wanted, found = plain.weights(), nested.weights()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    recipes = explained(nested)
    assert recipes.keys() == wanted.keys()
    computed = {name for name, recipe in recipes.items() if recipe is None}
    assert all("inv_freq" in n or "embed_scale" in n for n in computed), computed


@pytest.mark.parametrize("family", ASSISTED)
def test_layers_that_share_keys_have_no_cache(family: str, checkpoint: Callable[..., Path]) -> None:
    """Rings of sliding layers and pages of global ones, each of its own width; the assistant has
    none, and its layers read those of the last layer of their type."""
    directory = checkpoint(family, "random")
    loaded = load(open_checkpoint(directory, directory / "draft"), None, True)
    widths = {spec.name: spec.dims[2:] for spec in loaded.state_specs if spec.name[-2:] != "_v"}
    heads = 2 if family == "gemma4" else 1
    shared = {"kv.0.ring_k": (2, 16), "kv.1.k": (heads, 24), "kv.2.ring_k": (2, 16)}
    own = {"kv.3.ring_k": (2, 16), "kv.4.k": (heads, 24)}
    known = {n: w for n, w in widths.items() if not n.endswith(".v")}
    assert known == (shared if family == "gemma4" else shared | own)
    (drafter,) = loaded.mtp_layers
    read = [layer.self_attn.layer_idx for layer in drafter.block.model.layers]
    assert read == ([2, 2, 1] if family == "gemma4" else [3, 3, 4])
    layers = loaded.target.get_decoder().layers
    numbers = [layer.self_attn.layer_idx for layer in layers]
    assert numbers == ([0, 1, 2, 2, 1] if family == "gemma4" else [0, 1, 2, 3, 4])


@torch.no_grad()
def test_logits_are_capped(checkpoint: Callable[..., Path]) -> None:
    """As transformers caps them, to the bit; without the cap they are others."""
    model = transformers.Gemma4ForCausalLM.from_pretrained(checkpoint("gemma4", "random"))
    out = model(torch.tensor([PROMPTS[9]]), output_hidden_states=True)
    features = out.hidden_states[-1]
    wiring = tiny.family_of("gemma4").wiring
    assert torch.equal(target_head(model, wiring)(features), out.logits)
    assert not torch.allclose(model.lm_head(features), out.logits, rtol=0.01)


@torch.no_grad()
def test_experts_have_gelu(checkpoint: Callable[..., Path]) -> None:
    """Through mtpc's interface, the module of 26B-A4B gives what transformers' own loop gives."""
    loaded = load(checkpoint("gemma4@experts", "plain"), "float64", False)
    module = loaded.target.get_decoder().layers[0].experts
    x, weights = torch.randn(5, 64).double(), torch.rand(5, 2).double()
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    wanted = type(module).forward.__wrapped__(module, x, ids, weights)
    torch.testing.assert_close(module(x, ids, weights), wanted, rtol=1e-9, atol=1e-9)


def generated(directory: Path, family: str, prompt: list[int], dtype: torch.dtype) -> list[int]:
    """transformers' plain generation, with its own caches."""
    kind = model_class(tiny.family_of(family))
    model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=-1)
    return out[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend", "spec_tokens"),
    [(family, backend, k) for family in ASSISTED for backend in ("eager", "cpu") for k in (0, 3)],
)
def test_text_is_transformers_generation(
    family: str,
    backend: str,
    spec_tokens: int,
    checkpoint: Callable[..., Path],
    cpu_cache: Path,
) -> None:
    """In float32, with prompts of several chunks, longer than the window, and of one token."""
    directory = checkpoint(family)
    options = {**OPTIONS, "backend": backend, "dtype": "float32", "spec_tokens": spec_tokens}
    cached = {"cache_dir": cpu_cache} if backend == "cpu" else {}
    spec = mtpc.compile(directory, draft=directory / "draft", **options, **cached)
    for prompt in (PROMPTS[0], PROMPTS[4], PROMPTS[12]):
        wanted = generated(directory, family, prompt, torch.float32)
        assert spec.generate(prompt, 16, ignore_eos=True) == wanted
    assert spec_tokens == 0 or sum(spec.stats.accepted) > 0


@pytest.mark.slow
def test_every_draft_is_of_the_text_alone(checkpoint: Callable[..., Path]) -> None:
    """What a rejected draft has left in the target's caches is not read: a text that comes back
    with reuse, in other chunks and beside others has the drafts that it had."""
    directory = checkpoint("gemma4")
    fixed = {**OPTIONS, "dtype": "float64", "draft": directory / "draft", "spec_tokens": 3}
    spec = mtpc.compile(directory, **{**fixed, "batch_buckets": (4,)})
    poison(spec)
    together = spec.generate(PROMPTS[3:7], 20, ignore_eos=True)
    accepted = list(spec.stats.accepted)
    other = mtpc.compile(directory, **{**fixed, "prefill_chunk": 3})
    poison(other)
    assert [other.generate(p, 20, ignore_eos=True) for p in PROMPTS[3:7]] == together
    assert list(other.stats.accepted) == accepted
    check_caches(spec, PROMPTS[7])


# ---------------------------------------------------------------------- refusals


def refused(target: Path, draft: Path, **options: Any) -> str:
    with pytest.raises(MtpcError) as raised:
        mtpc.compile(target, draft=draft, spec_tokens=2, **{**OPTIONS, **options})
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'; expected"),
    ],
)
def test_a_target_with_other_parts(
    entries: dict[str, Any], said: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoint("gemma4", "random"), tmp_path / "copy"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **entries}))
    with pytest.raises(UnsupportedModelError, match=said):
        load(directory, None, needs_mtp=False)


@pytest.mark.parametrize(
    ("outer", "text", "said"),
    [
        ({}, {"vocab_size": 104}, "vocab_size is 104, and the target's is 96, by "),
        ({"backbone_hidden_size": 48}, {}, "backbone_hidden_size is 48, and the target's is 64"),
        ({}, {"sliding_window": 8}, "sliding_window is 8, and the target's is 6"),
        ({}, {"head_dim": 32}, "head_dim of its sliding_attention (per_layer_config) is 32"),
        (
            {},
            {"num_key_value_heads": 4},
            "num_key_value_heads of its sliding_attention (per_layer_config) is 4",
        ),
        ({"num_centroids": 7}, {}, "num_centroids is 7, of which 5 are looked at; expected a"),
        ({"centroid_intermediate_top_k": 9}, {}, "num_centroids is 8, of which 9 are looked at"),
        ({}, {"num_kv_shared_layers": 1}, "config.json: transformers refuses it"),
        ({"num_centroids": 12}, {}, "masked_embedding.centroids.weight is"),
        ({}, {"intermediate_size": "x"}, "config.json: transformers refuses it"),
        ({"architectures": ["Gemma4Model"]}, {}, "is no drafter for gemma4: its architectures"),
    ],
)
def test_an_assistant_that_does_not_fit(
    outer: dict[str, Any],
    text: dict[str, Any],
    said: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    draft = Path(shutil.copytree(checkpoint("gemma4", "random") / "draft", tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    config = {**config, **outer, "text_config": {**config["text_config"], **text}}
    (draft / "config.json").write_text(json.dumps(config))
    message = refused(checkpoint("gemma4", "random"), draft)
    assert said in message, message
    assert str(draft) in message


def test_an_assistant_with_wrong_tensors(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A token twice in its clusters, and a tensor that is not there."""
    source = checkpoint("gemma4", "random")
    draft = Path(shutil.copytree(source / "draft", tmp_path / "draft"))
    path, name = draft / "model.safetensors", "masked_embedding.token_ordering"
    tensors = load_file(path)
    tensors[name][3] = tensors[name][4]
    save_file(tensors, path, metadata={"format": "pt"})
    assert f"{name} must name each of the target's 96 tokens once" in refused(source, draft)
    del tensors[name], tensors["pre_projection.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    message = refused(source, draft)
    assert "missing block.masked_embedding.token_ordering, projection.weight" in message, message


def test_what_else_is_refused(checkpoint: Callable[..., Path]) -> None:
    gemma4, unified = checkpoint("gemma4", "random"), checkpoint("gemma4_unified", "random")
    with pytest.raises(CheckpointError, match=r"announces no MTP layers.*give a drafter"):
        mtpc.compile(gemma4, spec_tokens=2, **OPTIONS)
    llama = checkpoint("llama", "random")
    assert "the target is of llama; expected one of gemma4" in refused(llama, gemma4 / "draft")
    assert "the target is of gemma4; expected one of gemma4_unified" in refused(
        gemma4, unified / "draft"
    )
    message = refused(gemma4, gemma4 / "draft", wiring={"next_features": "before"})
    assert "wiring has next_features, which has no meaning for the drafter of gemma4" in message


def test_an_assistant_without_clusters_has_a_plain_head(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("gemma4_unified", "random")
    stored = load_file(directory / "draft" / "model.safetensors")
    assert not any("masked" in name or "lm_head" in name for name in stored)
    (drafter,) = load(open_checkpoint(directory, directory / "draft"), None, True).mtp_layers
    assert torch.equal(drafter.head.weight, stored["model.embed_tokens.weight"])
    assert assistant.CONFIGS["gemma4"]["use_ordered_embeddings"]
