"""DeepSeek-V4's canonical attention against transformers' own, uncached, and its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import tiny, uncached
from helpers.explained import explained
from helpers.stepped_rows import DRAFTS, SLOTS, SteppedRows, poisoned
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.errors import UnsupportedModelError
from mtpc.layout import Layout
from mtpc.layout.buffers import K_MAX, M, P, S
from mtpc.layout.slot_state import slot_state
from mtpc.models.caches import CachePool
from mtpc.models.families.deepseek_v4 import STORED_PREFIXES, StreamDraft, StreamTarget, cache_specs
from mtpc.models.hf import TextRotary
from mtpc.models.load import load
from mtpc.models.mtp_layers import load_mtp_layer
from mtpc.models.seams import share_model, stand_in, use_seams

PAGE = 4
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def config_of(ratios: tuple[int, int], window: int, topk: int) -> dict[str, Any]:
    """Changes to the tiny config: one layer of each kind."""
    return {
        "num_hidden_layers": 3,
        "layer_types": KINDS,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": dict(zip(KINDS[1:], ratios, strict=True)),
        "sliding_window": window,
        "index_topk": topk,
        "experts_implementation": "eager",
    }


def pieces(model: Any, layer: Any, blocks: int) -> tuple[StreamTarget, StreamDraft]:
    """A target and its MTP layer, on poisoned state."""
    family = tiny.family_of("deepseek_v4")
    layers = model.config.num_hidden_layers + 1
    specs = [s for i in range(layers) for s in cache_specs(model.config, i, torch.float64)]
    layout = Layout(specs, {S: SLOTS, K_MAX: DRAFTS, M: blocks, P: PAGE})
    pool = CachePool(poisoned(layout), SLOTS, family.cache_kinds)
    decoder = share_model(model, family.canonical).get_decoder()
    use_seams(layer.block.mlp.experts.config)
    stand_in(layer, family.canonical)
    rotary = TextRotary(decoder.rotary_emb, 1, "main")
    return StreamTarget(decoder, pool, family.wiring), StreamDraft(decoder, rotary, layer, pool)


@torch.no_grad()
@pytest.mark.parametrize(
    ("ratios", "window", "topk", "length"),
    [((2, 5), 6, 3, 40), ((4, 3), 1, 2, 40), ((3, 7), 8, 99, 40), ((4, 128), 128, 8, 300)],
)
def test_rows_equal_transformers_uncached(
    ratios: tuple[int, int], window: int, topk: int, length: int
) -> None:
    """Ragged chunks, then steps of which drafts are rejected; state starts as NaN."""
    generator = torch.Generator().manual_seed(window)
    model = tiny.build_target("deepseek_v4", **config_of(ratios, window, topk)).double()
    model.set_attn_implementation("eager")
    layer = tiny.build_mtp_layer("deepseek_v4", model).double()
    texts = torch.randint(2, 96, (2, length), generator=generator)
    expected = uncached.target_features(model, texts)
    drafted = uncached.run_mtp_uncached("deepseek_v4", model, layer, texts[:, 1:], expected[:, :-1])
    made = pieces(model, layer, SteppedRows.blocks(length, PAGE))
    stepped = SteppedRows(*made, texts, expected, drafted, generator, PAGE, tolerance=1e-5)
    first, second = length // 3, 2 * length // 5
    while int(stepped.lens[0]) < first:
        count = [min(7, first - int(stepped.lens[0])), second // (-(-first // 7))]
        stepped.step(count, count)
    stepped.verify_the_rest()


@pytest.mark.parametrize("drafts", [0, 3])
def test_memory_is_what_the_architecture_needs(drafts: int) -> None:
    """Values a request, in closed form: windows and their slack, and entries."""
    config = tiny.build_target("deepseek_v4", **config_of((4, 16), 6, 3)).config
    width, index, length = config.head_dim, config.index_head_dim, 64
    window = (6 - 1 + max(drafts, 1)) * width
    sparse = (2 * 4 - 1 + drafts) * 4 * (width + index) + length // 4 * (width + index)
    heavy = (16 - 1 + drafts) * 2 * width + length // 16 * width
    sizes = {S: 1, K_MAX: drafts, M: length // PAGE, P: PAGE}
    for layer, wanted in enumerate([window, window + sparse, window + heavy, window]):
        layout = Layout(cache_specs(config, layer, torch.bfloat16), sizes)
        assert sum(layout.nbytes(name) for name in layout) == 2 * wanted


def test_released_names(tmp_path: Path) -> None:
    """MTP tensors bear the names that the released checkpoint and vLLM's loader have."""
    target = tiny.build_target("deepseek_v4")
    layers = tiny.build_mtp_layers("deepseek_v4", target)
    tiny.save_checkpoint("deepseek_v4", target, layers, tmp_path)
    stored = {n for n in load_file(tmp_path / "model.safetensors") if n.startswith("mtp.0.")}
    linears = ["e_proj", "h_proj", "enorm", "hnorm", "norm", "attn_norm", "ffn_norm", "ffn.gate"]
    linears += [f"attn.{part}" for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")]
    linears += ["attn.q_norm", "attn.kv_norm"]
    experts = ["shared_experts", *(f"experts.{i}" for i in range(4))]
    linears += [f"ffn.{expert}.w{i}" for expert in experts for i in (1, 2, 3)]
    streams = [
        f"hc_{site}_{p}" for site in ("head", "attn", "ffn") for p in ("fn", "base", "scale")
    ]
    whole = ["attn.attn_sink", "ffn.gate.bias", *streams, *(f"{name}.weight" for name in linears)]
    assert stored == {f"mtp.0.{name}" for name in whole}


def released_name(name: str) -> str:
    """What transformers' `save_pretrained` leaves of its own in a target's names, put right."""
    for own, stored in STORED_PREFIXES:
        if name.startswith(own):
            name = stored + name.removeprefix(own)
    return name.replace("attn.norm.", "attn.kv_norm.")


def released(tmp_path: Path) -> Path:
    """A checkpoint, not quantised, with the names and config entries of released ones."""
    kinds = {"layer_types": KINDS[1:], "compress_rates": {KINDS[1]: 4, KINDS[2]: 128}}
    directory = tiny.make_checkpoint("deepseek_v4", tmp_path, **kinds)
    written = json.loads((directory / "config.json").read_text())
    new = ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope")
    config = {n: value for n, value in written.items() if not n.startswith(new)}
    config |= {"compress_ratios": [4, 128, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8}
    config |= {"compress_rope_theta": 160000, "rope_theta": 10000, "topk_method": "noaux_tc"}
    scaling = {"factor": 16, "original_max_position_embeddings": 32}
    config["rope_scaling"] = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, **scaling}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    renamed = {released_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_released_entries_and_names(tmp_path: Path) -> None:
    """What they say is understood; names are released ones throughout, and all are explained."""
    directory = released(tmp_path)
    stored = load_file(directory / "model.safetensors")
    prefixes = ("layers.", "embed.", "head.", "norm.", "hc_head_", "mtp.0.")
    assert all(name.startswith(prefixes) for name in stored)
    loaded = load(directory, "float32", needs_mtp=True)
    norm = loaded.target.get_decoder().layers[1].self_attn.kv_norm.weight
    assert torch.equal(norm, stored["layers.1.attn.kv_norm.weight"])
    assert loaded.config.layer_types == KINDS[1:]
    assert loaded.config.mlp_layer_types == ["hash_moe", "moe"]
    rates = loaded.config.compress_rates
    assert [rates[kind] for kind in KINDS[1:]] == [4, 128]
    assert loaded.config.qk_rope_head_dim == 8
    rope = loaded.config.rope_parameters
    assert [rope[k]["rope_type"] for k in ("main", "compress")] == ["default", "yarn"]
    assert explained(loaded).keys() == loaded.weights().keys()


def test_every_weight_has_a_recipe_and_its_dtype(tmp_path: Path) -> None:
    """A warm start reads all weights; in bfloat16 both models keep the same ones in float32."""
    loaded = load(tiny.make_checkpoint("deepseek_v4", tmp_path), "bfloat16", needs_mtp=True)
    recipes = explained(loaded)
    assert recipes.keys() == loaded.weights().keys()
    dtypes = {
        name.removeprefix("model.layers.1."): tensor.dtype
        for name, tensor in loaded.target.state_dict().items()
        if "compressor" not in name
    }
    for name, tensor in loaded.mtp_layers[0].block.state_dict().items():
        assert tensor.dtype == dtypes[name], name
    assert {torch.float32, torch.bfloat16} <= set(dtypes.values())


def test_the_layer_that_drafts_is_not_changed_for_others(tmp_path: Path) -> None:
    """`load_mtp_layer` gives transformers' block; only a `LoadedModel` has canonical ones."""
    directory = tiny.make_checkpoint("deepseek_v4", tmp_path)
    loaded = load(directory, "float32", needs_mtp=True)
    assert loaded.checkpoint is not None
    layer = load_mtp_layer(loaded.checkpoint, loaded.family, loaded.target, 0)
    assert type(layer.block.self_attn).__name__ == "DeepseekV4Attention"
    assert type(loaded.mtp_layers[0].block.self_attn).__name__ == "WindowedAttention"


def test_several_layers_are_refused(tmp_path: Path) -> None:
    """Chains of several layers keep features [T, H]; streams would not fit."""
    directory = tiny.make_checkpoint("deepseek_v4", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="2 MTP layers that are fed residual streams"):
        load(directory, "float32", needs_mtp=True)


def test_no_buffer_counts_as_paged() -> None:
    """A request that reuses a beginning needs a snapshot of every buffer."""
    config = tiny.build_target("deepseek_v4", **config_of((4, 16), 6, 3)).config
    for layer in range(config.num_hidden_layers + 1):
        layout = Layout(
            cache_specs(config, layer, torch.bfloat16), {S: SLOTS, K_MAX: 1, M: 16, P: PAGE}
        )
        assert slot_state(layout) == tuple(sorted(layout))


NORM = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4RMSNorm


def widened(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight.float() * x  # type: ignore[no-any-return]


def test_norms_that_widen_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As transformers 5.17 has them: the weight is float32, and so is the product with it."""
    monkeypatch.setattr(NORM, "forward", widened)
    directory = tiny.make_checkpoint("deepseek_v4", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"give float32 for bfloat16 .* 5\.23 or later"):
        mtpc.compile(directory, dtype="bfloat16", backend="eager", max_len=64)


@pytest.mark.slow
def test_norms_that_widen_serve_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(NORM, "forward", widened)
    directory = tiny.make_checkpoint("deepseek_v4", tmp_path)
    few: dict[str, Any] = {"spec_tokens": 0, "batch_buckets": (1,)}
    mtpc.compile(directory, dtype="float32", backend="eager", max_len=64, **few)
