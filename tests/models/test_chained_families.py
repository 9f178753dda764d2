"""step3p7 and mimo_v2: what is theirs beside text and drafts (test_theorem, test_drafts)."""

from __future__ import annotations

import json
import math
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
from helpers.plans import plan_of
from helpers.theorem import PROMPTS

import mtpc
from mtpc.backends import make_backend
from mtpc.layout import StepKey
from mtpc.models.families.step3p7 import ClampedExperts
from mtpc.models.hf import OrderedRotary
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.step.chaining import KeepLast, MoveUp, Widen
from mtpc.step.records import Widened
from mtpc.weights.checkpoint import Checkpoint

FAMILIES = ("mimo_v2", "step3p7")


def compiler_of(directory: Path, spec_tokens: int) -> StepCompiler:
    options = plan_of(spec_tokens=spec_tokens, batch_buckets=(4,), **TINY)
    return StepCompiler(load(directory, "float64", True), options, make_backend("eager"))


@pytest.mark.parametrize("limit", [None, 0.2])
def test_clamped_experts_equal_transformers(limit: float | None) -> None:
    """Parity of the canonical module; the limit bites."""
    from transformers.models.step3p7 import modeling_step3p7 as hf

    config = tiny.text_config(tiny.build_target("step3p7"))
    module = hf.Step3p7Experts(config, swiglu_limit=limit).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, weights = torch.randn(9, 64).double(), torch.rand(9, 2).double()
    ids = torch.rand(9, 4).argsort(1)[:, :2]
    ours = ClampedExperts(module)
    assert dict(ours.named_parameters()).keys() == dict(module.named_parameters()).keys()
    wanted = module(x, ids, weights)
    torch.testing.assert_close(ours(x, ids, weights), wanted, rtol=1e-12, atol=1e-12)
    if limit is not None:
        module.limit = math.inf
        assert not torch.allclose(module(x, ids, weights), wanted)


def test_rotary_embeddings_are_traced_in_one_order() -> None:
    """Whatever order transformers' set has, which depends on the process."""
    asked: list[str] = []

    class Rotary(torch.nn.Module):
        def forward(self, like: torch.Tensor, positions: torch.Tensor, kind: str) -> str:
            asked.append(kind)
            return f"{kind} {int(positions)}"

    ordered = OrderedRotary(Rotary(), ["full", "sliding"])
    for step, kinds in enumerate((["full", "sliding"], ["sliding", "full"])):
        at = torch.tensor(step)
        assert [ordered(at, at, kind) for kind in kinds] == [f"{kind} {step}" for kind in kinds]
    assert asked == ["full", "sliding"] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_sliding_layers_hold_their_window(family: str, checkpoint: Callable[..., Path]) -> None:
    """Rows per request and layer: the window, one step's, rounded up to a page; no more."""
    compiler = compiler_of(checkpoint(family, "random"), 4)
    layout, config = compiler.layout(compiler.keys[0]), compiler.loaded.config
    rings = [name for name in layout if name.endswith(("ring_k", "ring_v"))]
    types = list(config.layer_types)
    types += getattr(config, "mtp_layer_types", None) or ["sliding_attention"] * 3
    assert len(rings) == 2 * types.count("sliding_attention")
    step = TINY["prefill_chunk"] + compiler.loaded.chain_window
    for name in rings:
        pages, page, heads, width = layout.shape(name)
        rows = (pages - 1) * page / 4  # Without the null page, by request.
        assert rows < config.sliding_window - 1 + step + page
        per_token = heads * width * 8
        assert layout.nbytes(name) == (4 * rows + page) * per_token
    assert layout.nbytes(rings[0]) < compiler.plan.num_pages * page * per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_drafts_use_fewer_layers(family: str, checkpoint: Callable[..., Path]) -> None:
    """K = 1: one MTP layer's weights and KV, no rows to compute again."""
    compiler = compiler_of(checkpoint(family, "random"), 1)
    layout = compiler.layout(compiler.keys[0])
    layers = {int(name.split(".")[1]) for name in layout if name.startswith("kv.")}
    assert layers == set(range(compiler.loaded.config.num_hidden_layers + 1))
    assert "state.chain_ids" not in layout
    assert not [name for name in compiler.loaded.weights() if name.startswith("mtp.1.")]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_explained(family: str, checkpoint: Callable[..., Path]) -> None:
    """Recipes over stored names, experts included: warm starts need no transformers."""
    loaded = load(checkpoint(family, "random"), None, True)
    recipes = explained(loaded)
    unused = ("model.vision_model.", "model.multi_modal_projector.")
    missing = [n for n in loaded.weights() if n not in recipes and not n.startswith(unused)]
    assert missing == []


def test_mtp_layers_are_counted(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """MiMo-V2's released config does not say how many MTP layers there are."""
    directory = Path(shutil.copytree(checkpoint("mimo_v2", "random"), tmp_path / "copy"))
    config = json.loads((directory / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    assert len(load(Checkpoint(directory), None, True).mtp_layers) == 3


@pytest.mark.slow
def test_step3p7_model_objects(
    checkpoint: Callable[..., Path], compiled: Callable[..., Any]
) -> None:
    """A multimodal object is shared, stood-in experts included, and left as it was."""
    directory = checkpoint("step3p7")
    model = transformers.Step3p7ForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float64
    )
    before = model.config.to_json_string()
    experts = model.get_decoder().layers[2].mlp.experts
    options = {"backend": "eager", "batch_buckets": (4,), **TINY}
    spec = mtpc.compile(model, spec_tokens=2, **options)
    wanted = compiled("step3p7", 2, batch_buckets=(4,)).generate(PROMPTS[4], 8)
    assert spec.generate(PROMPTS[4], 8) == wanted
    assert model.config.to_json_string() == before
    assert model.get_decoder().layers[2].mlp.experts is experts
    held = {t.data_ptr() for t in spec.loaded.target.parameters()}
    assert held == {t.data_ptr() for t in model.parameters()}


def test_rows_of_a_round() -> None:
    """A window of 2 over requests with 5, 1 and 0 tokens, one of them off; and what is kept."""
    key, window = StepKey.decode(4, 1), 2  # 2 rows a request
    lens = torch.tensor([5, 9, 1, 0], dtype=torch.int32)
    active = torch.tensor([True, False, True, True])
    slots = torch.tensor([3, 0, 1, 2])
    table = torch.arange(1, 13, dtype=torch.int32).view(4, 3)
    starts = torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32)
    last_ids = torch.full((4, 2), -(2**40))
    last_features = torch.full((4, 2, 1), math.nan)
    last_ids[3], last_ids[1, 1] = torch.tensor([70, 71]), 72
    last_features[3, :, 0], last_features[1, 1, 0] = torch.tensor([0.70, 0.71]), 0.72
    next_ids, features = torch.arange(8), torch.arange(8.0)[:, None]
    anchors = torch.tensor([1, 2, 4, 7])
    out = Widen(key, window, 4)(
        next_ids, features, anchors, lens, active, table, slots, starts, last_ids, last_features
    )
    wide = Widened(*out)
    ids, rows, anchors, starts = wide.ids, wide.features, wide.anchors, wide.query_start_loc
    used = int(starts[-1])
    assert starts.tolist() == [0, 4, 6, 9, 11]
    assert ids[:used].tolist() == [70, 71, 0, 1, 2, 3, 72, 4, 5, 6, 7]
    assert torch.equal(rows[:2, 0], last_features[3, :, 0])
    assert rows[2:6, 0].tolist() == [0, 1, 2, 3]
    assert wide.positions[:used].tolist() == [3, 4, 5, 6, 0, 0, 0, 1, 2, 0, 1]
    assert wide.seq_lens.tolist() == [7, 0, 3, 2]
    assert wide.slot_mapping[:4].tolist() == [4 + 3, 8 + 0, 8 + 1, 8 + 2]
    assert anchors.tolist() == [3, 4, 7, 10]
    moved = MoveUp()(ids, anchors, active, torch.tensor([90, 91, 92, 93]))
    assert moved[:4].tolist() == [71, 0, 1, 90]
    assert moved[6:used].tolist() == [4, 92, 6, 7, 93]
    KeepLast(window, 99)(ids, rows, anchors, starts, slots, last_ids, last_features)
    assert last_ids[[3, 1, 2]].tolist() == [[0, 1], [72, 4], [6, 7]]
    assert last_features[3, :, 0].tolist() == [0, 1]


def test_loading_leaves_the_checkpoint_as_it_was(checkpoint: Callable[..., Path]) -> None:
    """transformers changes nested configs that it reads; the cache's key is made of them."""
    source = Checkpoint(checkpoint("step3p7"))
    before = json.dumps(source.config)
    load(source, "float64", needs_mtp=True)
    assert json.dumps(source.config) == before
