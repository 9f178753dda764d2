"""Model objects and hub ids: what is refused, by one clear error, and what is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import EVERY_FAMILY, TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.tiny import family_of
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import mtpc
from mtpc.errors import BackendError, CheckpointError, MtpcError, UnsupportedModelError
from mtpc.models.hf import model_class
from mtpc.models.load import load
from mtpc.weights.checkpoint import Checkpoint

EAGER: dict[str, Any] = {"backend": "eager", "batch_buckets": (1,), **TINY}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Overridden(transformers.Qwen2ForCausalLM):
    """Its logits are others than the decoder's and the head's."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = -out.logits
        return out


class OnGpu(transformers.Qwen2ForCausalLM):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[pytest.mark.slow] * (n != "mimo")) for n in EVERY_FAMILY]
)
def test_an_object_decodes_as_its_directory(
    family: str, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """transformers' model, with the MTP layers of the directory that it was loaded from."""
    directory, options = checkpoint(family), {"batch_buckets": (1,)}
    model = model_class(family_of(family)).from_pretrained(directory, dtype=torch.float64)
    spec = mtpc.compile(model, spec_tokens=1, backend="eager", **TINY, **options)
    assert spec.generate(PROMPTS[4], 8) == oracle(family).generate(PROMPTS[4], 8)


@pytest.fixture
def loaded_as(checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """loaded_as(class): the tiny MiMo checkpoint as an object of that class."""

    def get(kind: Any = transformers.Qwen2ForCausalLM, **options: Any) -> Any:
        return kind.from_pretrained(checkpoint("mimo", "random"), **options)

    return get


def hooked(model: Any) -> None:
    model.register_forward_hook(lambda module, args, out: None)


def replaced(model: Any) -> None:
    model.forward = lambda *args, **options: None


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Overridden, lambda model: None, r"a forward of its own, by its class .*Overridden"),
        (transformers.Qwen2ForCausalLM, hooked, "the model has forward hooks"),
        (transformers.Qwen2ForCausalLM, replaced, "a forward that replaces the one of its class"),
    ],
)
def test_forwards_that_would_be_ignored(
    loaded_as: Callable[..., Any], kind: Any, change: Callable[[Any], None], message: str
) -> None:
    model = loaded_as(kind)
    change(model)
    with pytest.raises(UnsupportedModelError, match=message):
        mtpc.compile(model, spec_tokens=1, **EAGER)


def test_a_subclass_that_changes_no_forward(loaded_as: Callable[..., Any]) -> None:
    class Renamed(transformers.Qwen2ForCausalLM):
        pass

    assert load(loaded_as(Renamed), None, needs_mtp=True).mtp_layers


def test_forwards_that_canonical_modules_replace(checkpoint: Callable[..., Path]) -> None:
    class Changed(Qwen3NextGatedDeltaNet):
        def forward(self, *args: Any, **options: Any) -> Any:
            return -super().forward(*args, **options)

    model = transformers.Qwen3NextForCausalLM.from_pretrained(checkpoint("qwen3_next", "random"))
    load(model, None, needs_mtp=True)
    for module in model.modules():
        if type(module) is Qwen3NextGatedDeltaNet:
            module.__class__ = Changed
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.linear_attn has a forward of its"):
        load(model, None, needs_mtp=True)


def test_tensors_on_the_meta_device(loaded_as: Callable[..., Any]) -> None:
    model = loaded_as()
    model.model.layers[1].to("meta")
    with pytest.raises(
        UnsupportedModelError, match=r"12 tensor\(s\) on the meta device.*layers\.1"
    ):
        load(model, None, needs_mtp=False)


@pytest.mark.parametrize("part", ["model.norm", "lm_head", "model.layers.0.mlp.up_proj"])
def test_mixed_dtypes(loaded_as: Callable[..., Any], part: str) -> None:
    model = loaded_as(dtype=torch.bfloat16)
    model.get_submodule(part).double()
    message = rf"bfloat16, and 1 other .* not: {part}\.weight \(float64\); expected one dtype"
    with pytest.raises(UnsupportedModelError, match=message):
        load(model, None, needs_mtp=False)


def test_float32_that_the_class_keeps_is_no_mix(checkpoint: Callable[..., Path]) -> None:
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(
        checkpoint("deepseek_v4", "random"), dtype=torch.bfloat16
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    load(model, None, needs_mtp=False)


def test_random_weights_under_a_directorys_name(checkpoint: Callable[..., Path]) -> None:
    """The MTP layers of that directory fit them no more than those of any other model."""
    config = transformers.AutoConfig.from_pretrained(checkpoint("glm4_moe", "random"))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.name_or_path == str(checkpoint("glm4_moe", "random"))
    with pytest.raises(CheckpointError, match=r"its weights are others: .* cosine similarity of"):
        load(model, None, needs_mtp=True)
    load(model, None, needs_mtp=False)


def test_weights_that_were_trained_further(loaded_as: Callable[..., Any]) -> None:
    """An object's embedding may differ a little, and have more rows."""
    model = loaded_as()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.1).add_(0.01)
    model.resize_token_embeddings(104, mean_resizing=False)
    assert load(model, None, needs_mtp=True).mtp_layers


def test_a_directory_that_is_gone(loaded_as: Callable[..., Any], tmp_path: Path) -> None:
    copy = shutil.copytree(loaded_as().name_or_path, tmp_path / "copy")
    model = transformers.Qwen2ForCausalLM.from_pretrained(copy)
    shutil.rmtree(copy)
    for _ in ("gone", "empty"):
        with pytest.raises(CheckpointError, match=r"to read the MTP tensors from, .*use spec_tok"):
            load(model, None, needs_mtp=True)
        assert load(model, None, needs_mtp=False).checkpoint is None
        copy.mkdir(exist_ok=True)


def test_auto_is_the_device_of_an_object(loaded_as: Callable[..., Any]) -> None:
    """Never "move the model to the CPU": the backend of its device says what it lacks here."""
    if torch.cuda.is_available():
        pytest.skip("the backend would run here")
    with pytest.raises(BackendError, match="cuda"):
        mtpc.compile(loaded_as(OnGpu), spec_tokens=1, **{**EAGER, "backend": "auto"})


@pytest.fixture
def hub_cache(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A hub cache with the snapshot of one model, in the layout of huggingface_hub."""
    root = tmp_path / "hub"
    model = root / "models--tiny--MiMo"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(COMMIT)
    shutil.copytree(checkpoint("mimo", "random"), model / "snapshots" / COMMIT)
    for module in ("huggingface_hub.constants", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(root), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return root


def test_hub_ids(hub_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An id is the snapshot in the cache; a directory of that name comes first."""
    snapshot = hub_cache / "models--tiny--MiMo/snapshots" / COMMIT
    source = Checkpoint(Path("tiny/MiMo"))
    assert source.directory == snapshot
    assert load("tiny/MiMo", None, needs_mtp=True).served().name == "tiny/MiMo"
    model = transformers.Qwen2ForCausalLM.from_pretrained(snapshot)
    model.name_or_path = "tiny/MiMo"  # As if loaded by it: the cache here has no blobs.
    assert load(model, None, needs_mtp=True).checkpoint.directory == snapshot
    local = tmp_path / "work/tiny/MiMo"
    shutil.copytree(snapshot, local)
    monkeypatch.chdir(local.parent.parent)
    assert Checkpoint(Path("tiny/MiMo")).directory == Path("tiny/MiMo")


@pytest.mark.parametrize("name", ["tiny/other", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_hub_ids_that_are_not_in_the_cache(hub_cache: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"no whole model of .*run: hf download {name}"):
        mtpc.compile(name, **EAGER)


def test_incomplete_snapshots(hub_cache: Path) -> None:
    """The message has the command that completes them."""
    (hub_cache / "models--tiny--MiMo/snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="run: hf download tiny/MiMo"):
        Checkpoint(Path("tiny/MiMo"))


@pytest.mark.parametrize("name", ["a" * 300, "/" + "b/" * 3000, "a\0b", "", "..", "a--b/..c"])
def test_paths_that_are_none(name: str) -> None:
    with pytest.raises(MtpcError, match=r"directory|too long"):
        mtpc.compile(name, **EAGER)
