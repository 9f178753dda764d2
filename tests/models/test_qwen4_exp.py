"""Qwen4-Exp: rows against transformers' own, the choice of blocks, released files, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import qwen4, tiny
from helpers.explained import explained
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.refused import check_refused
from helpers.stepped_rows import DRAFTS, SLOTS, SteppedRows, poisoned
from helpers.theorem import PROMPTS

import mtpc
from mtpc.errors import OptionError, UnsupportedModelError
from mtpc.layout import Layout
from mtpc.layout.buffers import K_MAX, C, M, N, P, S
from mtpc.models.load import load
from mtpc.models.stepped import SteppedModel
from mtpc.models.weight_recipes import weight_recipes
from mtpc.weights.recipes import Join

FAMILY = "qwen4_exp"
EAGER: dict[str, Any] = {**TINY, "backend": "eager", "batch_buckets": (2,)}
TABLE = "layers.0.ple.ple_embedding.ngram_embedding"


@torch.no_grad()
@pytest.mark.parametrize(
    ("ratio", "budget", "ngram", "kernel", "page"),
    [(4, 8, 3, 3, 4), (4, 8, 3, 4, 8), (2, 4, 2, 2, 4), (1, 3, 4, 1, 2), (8, 64, 3, 3, 8)],
)
def test_rows_equal_transformers_uncached(
    ratio: int, budget: int, ngram: int, kernel: int, page: int, tmp_path: Path
) -> None:
    """Ragged chunks, then steps of which drafts are rejected; texts with many ends."""
    changes = {"indexer_compress_ratio": ratio, "indexer_budget": budget}
    changes |= {"ngram_size": ngram, "ple_conv_kernel_size": kernel}
    directory, length = tiny.make_checkpoint(FAMILY, tmp_path, **changes), 44
    generator = torch.Generator().manual_seed(ratio + ngram)
    texts = torch.randint(2, 96, (2, length), generator=generator)
    texts[torch.rand(2, length, generator=generator) < 0.2] = qwen4.EOS
    page_of_code = DraftOracle(Oracle(FAMILY, directory)).page
    expected = [page_of_code.first(text.tolist()) for text in texts]
    drafted = [
        page_of_code.run(0, text[1:].tolist(), fed[:-1])
        for text, fed in zip(texts, expected, strict=True)
    ]
    loaded, blocks = load(directory, "float64", True), SteppedRows.blocks(length, page)
    sizes = {S: SLOTS, K_MAX: DRAFTS, M: blocks, P: page, N: 3 * blocks + 1, C: 64}
    model = SteppedModel(loaded, poisoned(Layout(loaded.state_specs, sizes)), SLOTS)
    pieces = (model.target, model.drafts[0])
    stepped = SteppedRows(*pieces, texts, expected, drafted, generator, page, tolerance=2e-5)
    for counts in ([7, 6], [5, 9]):
        stepped.step(counts, counts)
    stepped.verify_the_rest()


@torch.no_grad()
def test_the_choice_of_blocks_decides(oracle: Callable[..., Oracle]) -> None:
    """Else nothing here would show that rows leave tokens out."""
    plain = oracle(FAMILY, "random")
    indexer = plain.model.get_decoder().layers[1].self_attn.indexer
    chosen = plain.hidden(PROMPTS[12])[0]
    indexer.block_topk, indexer.token_budget = 99, 396
    try:
        all_seen = plain.hidden(PROMPTS[12])[0]
    finally:
        indexer.block_topk, indexer.token_budget = 2, 8
    differs = ~torch.isclose(chosen, all_seen, rtol=1e-3).all(1)
    assert not differs[:11].any()
    assert differs[11:].all()


@pytest.mark.slow
def test_a_budget_beyond_the_longest_text(tmp_path: Path) -> None:
    """Rows then attend to all tokens, and a choice has as many places as there are blocks."""
    directory = tiny.make_checkpoint(FAMILY, tmp_path, indexer_budget=400)
    spec = mtpc.compile(directory, spec_tokens=0, dtype="float64", **EAGER)
    wanted = Oracle(FAMILY, directory).generate(PROMPTS[12], 12, stop=False)
    assert spec.generate(PROMPTS[12], 12, ignore_eos=True) == wanted


def test_pages_of_broken_blocks(checkpoint: Callable[..., Path]) -> None:
    options = {**EAGER, "page_size": 6}
    with pytest.raises(OptionError, match="page_size=6; expected a multiple of 4"):
        mtpc.compile(checkpoint(FAMILY, "random"), spec_tokens=0, **options)


@pytest.mark.parametrize("headers_only", [False, True])
def test_released_files(
    headers_only: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A text model inside a multimodal one, whose table of n-grams is stored in shards."""
    source = checkpoint(FAMILY, "random")
    directory = qwen4.as_released(source, tmp_path / "released")
    loaded = load(directory, None, needs_mtp=True, headers_only=headers_only)
    recipes = weight_recipes(loaded) if headers_only else explained(loaded)
    assert recipes.keys() == loaded.weights().keys()
    shards = tuple(f"model.language_model.{TABLE}.shard_{i}.weight" for i in range(4))
    assert recipes[f"model.{TABLE}.weight"] == Join("cat", shards)
    if headers_only:
        return
    usual = load(source, None, needs_mtp=True)
    for name, tensor in usual.weights().items():
        assert torch.equal(loaded.weights()[name], tensor), name
    assert loaded.config.layer_types == ["linear_attention", "indexed_attention"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"mtp_use_dedicated_embeddings": True}, "has mtp_use_dedicated_embeddings True; expected"),
        ({"index_share_for_mtp_iteration": True}, "index_share_for_mtp_iteration True; expected"),
        ({"mtp": {"mtp_use_hidden_state_from_layer": 3}}, "from_layer 3; expected None"),
        ({"attn_output_gate": False}, "has attn_output_gate False; expected True"),
    ],
)
def test_configs_of_other_models(
    entries: dict[str, Any], said: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    check_refused(checkpoint(FAMILY, "random"), tmp_path / "other", entries, said)


def test_images_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises((OptionError, UnsupportedModelError), match="qwen4_exp"):
        mtpc.compile(checkpoint(FAMILY, "random"), spec_tokens=0, images=True, **EAGER)


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_a_request_holds(drafts: int, checkpoint: Callable[..., Path]) -> None:
    """Token ids and rows of the convolution, in closed form."""
    loaded = load(checkpoint(FAMILY, "random"), "bfloat16", True)
    specs = [spec for spec in loaded.cache_specs(0) if ".ple_" in spec.name]
    layout = Layout(specs, {S: 1, K_MAX: drafts})
    ids, rows = (3 - 1 + drafts) * 8, ((3 - 1) * 3 + drafts) * 3 * 64 * 2
    assert {name: layout.nbytes(name) for name in layout} == {
        "kv.0.ple_ids": ids,
        "kv.0.ple_rows": rows,
    }
