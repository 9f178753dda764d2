"""The traced draft that hosts' plugins share, over a plain torch attention in the host's place.

With the hosts themselves it is run by the scripts in tests/peers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.oracles import DraftOracle, Oracle
from helpers.places import ROOT
from helpers.plain_host import CHAINED, FAMILIES, TOKENS, Causal
from safetensors.torch import load_file
from torch import Tensor

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.integrations.draft import DraftOptions, TracedDraft
from mtpc.integrations.draft_config import draft_config

DOUBLE = {"dtype": torch.float64}
LATE = ("qwen3_5", "qwen3_5_moe", "mimo_v2")
"""Families of the slow run, whose layers have the parts of others: models/test_wiring.py has their
rows."""


def weights_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def make_draft(directory: Path, oracle: Oracle, **options: Any) -> TracedDraft:
    draft = TracedDraft(directory, Causal, DraftOptions(**{**DOUBLE, **options}))
    draft.load_weights(weights_of(directory).items())
    draft.embedding = oracle.model.get_input_embeddings()
    return draft


def run(draft: TracedDraft, ids: list[int], hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return draft(torch.tensor(ids), torch.arange(len(ids)), hidden[0])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in LATE))
        for name in (*FAMILIES, *CHAINED, "nemotron_h")
    ],
)
def test_layer_is_the_oracles(
    family: str, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """Every MTP layer, at several lengths, fed what the layer before returned."""
    reference = DraftOracle(oracle(family, "random"))
    page, layers = reference.page, range(reference.page.count)
    drafts = [make_draft(checkpoint(family, "random"), reference.oracle, index=i) for i in layers]
    for count in (1, 2, 11):
        ids, features = TOKENS[1 : count + 1], page.first(TOKENS[:count])
        ours = features
        for index, draft in enumerate(drafts):
            features = page.run(index, ids, features).detach()
            ours = run(draft, ids, ours.flatten(1)[None])
            # transformers' eager attention has its softmax in float32.
            torch.testing.assert_close(ours, features.flatten(1), atol=2e-5, rtol=2e-5)
            assert features.abs().max() > 0.1
    host = drafts[0].graph.get_submodule("sites.0")
    assert isinstance(host, Causal)
    assert host.calls == 3


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in FAMILIES[1:3])) for n in FAMILIES[:4]],
)
def test_only_the_host_attends(family: str, checkpoint: Callable[..., Path]) -> None:
    draft = TracedDraft(checkpoint(family, "random"), Causal, DraftOptions(**DOUBLE))
    calls = [n.target for n in draft.graph.graph.nodes if n.op == "call_module"]
    assert calls == ["sites.0"]
    assert len(draft.sites) == 1
    names = " ".join(str(n.target) for n in draft.graph.graph.nodes)
    assert "kv_b_proj" not in names  # What is not used is not computed either.
    assert not [op for op in ("host_site", "attention.", "paged", "latent") if op in names]
    owned = [id(p) for p in draft.parameters()]
    assert len(owned) == len(set(owned)) == len(list(draft.layer.parameters()))
    assert all(not p.requires_grad for p in draft.parameters())
    assert not draft.eval().training  # Hosts call it.


def test_latent_site_gives_the_hosts_what_they_need(checkpoint: Callable[..., Path]) -> None:
    draft = TracedDraft(checkpoint("deepseek_v3", "random"), Causal, DraftOptions(**DOUBLE))
    (site,) = draft.sites
    assert (site.kind, site.latent_rank, site.rope_head_dim) == ("latent", 32, 8)
    assert (site.num_heads, site.head_dim, site.v_head_dim) == (4, 24, 12)
    assert site.expansion is draft.layer.block.self_attn.kv_b_proj


def test_sinks_and_window_of_a_site(checkpoint: Callable[..., Path]) -> None:
    draft = TracedDraft(checkpoint("mimo_v2", "random"), Causal, DraftOptions(**DOUBLE))
    (site,) = draft.sites
    assert (site.sliding_window, site.head_dim, site.v_head_dim) == (6, 24, 16)
    assert site.sinks is draft.layer.block.self_attn.sinks


def test_options_follow_a_host(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """Zeroing the first embedding, and leaving out the final norm, do what they say."""
    plain = oracle("glm4_moe", "random")
    directory, hidden = checkpoint("glm4_moe", "random"), plain.hidden(TOKENS[:5])
    usual = run(make_draft(directory, plain), TOKENS[1:6], hidden)
    zeroing = make_draft(directory, plain, zero_first_embedding=True)
    zeroed = run(zeroing, TOKENS[1:6], hidden)
    assert not torch.equal(usual, zeroed)
    other = [77, *TOKENS[2:6]]  # The token that goes with position 0 is not looked at.
    torch.testing.assert_close(run(zeroing, other, hidden), zeroed)
    unnormed = make_draft(directory, plain, returns="before_final_norm")
    raw = run(unnormed, TOKENS[1:6], hidden)
    assert not torch.allclose(raw, usual)
    torch.testing.assert_close(unnormed.final_norm(raw), usual)


def test_drafts_of_one_process_share_nothing(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    first = oracle("mimo", "random")
    draft, ids = make_draft(checkpoint("mimo", "random"), first), TOKENS[1:6]
    hidden = first.hidden(TOKENS[:5])
    before = run(draft, ids, hidden)
    second = oracle("mimo", "trained")
    other = make_draft(checkpoint("mimo", "trained"), second)
    make_draft(checkpoint("qwen3_next", "random"), oracle("qwen3_next", "random"))
    assert not torch.allclose(run(other, ids, hidden), before)
    assert torch.equal(run(draft, ids, hidden), before)


def test_configs_that_hosts_hand_over(checkpoint: Callable[..., Path]) -> None:
    """A directory, a config object, its entries, and a config that bears a draft's name."""
    directory = checkpoint("qwen3_next", "random")
    given = transformers.AutoConfig.from_pretrained(directory)
    entries = json.loads((directory / "config.json").read_text())
    made = [draft_config(source)[1].to_dict() for source in (directory, given, entries)]
    assert made[0] == made[1] == made[2]
    given.architectures, given.model_type = ["Qwen3NextMTP"], "qwen3_next_mtp"
    with pytest.raises(UnsupportedModelError, match=r"Qwen3NextMTP.*are not supported"):
        draft_config(given)
    family, config = draft_config(given, "Qwen3NextForCausalLM")
    assert family.name == "qwen3_next"
    assert config is not given
    assert config.to_dict() == made[0]
    assert given.model_type == "qwen3_next_mtp"


def test_embeddings_in_place_of_ids(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    plain = oracle("mimo", "random")
    draft, hidden = make_draft(checkpoint("mimo", "random"), plain), plain.hidden(TOKENS[:5])
    expected = run(draft, TOKENS[1:6], hidden)
    embedded = draft.embedding(torch.tensor(TOKENS[1:6])).detach()
    draft.embedding = None
    assert torch.equal(draft(None, torch.arange(5), hidden[0], embedded), expected)


def test_weights_that_do_not_fit_are_named(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("glm4_moe", "random")
    draft, weights = TracedDraft(directory, Causal), weights_of(directory)
    used = draft.load_weights(weights.items())
    assert used == {name for name in weights if name.startswith("model.layers.2.")}
    bad: dict[str, tuple[Any, str]] = {
        "model.layers.2.eh_proj.weight": (None, "missing projection.weight; unexpected none"),
        "model.layers.2.odd.weight": (torch.ones(1), "unexpected block.odd.weight"),
        "model.layers.2.enorm.weight": (torch.ones(3), r"is \(3,\), expected \(64,\)"),
        "model.layers.2.hnorm.weight": (torch.full((64,), torch.nan), "NaN or infinity"),
        "model.layers.2.mlp.experts.1.up_proj.weight": (None, r"experts lacks 1\.up_proj"),
        "model.layers.2.self_attn.o_proj.weight": (
            torch.zeros(64, 64, dtype=torch.float8_e4m3fn),
            "1 tensor.s. of 8 bits: self_attn.o_proj.weight",
        ),
    }
    kept = {n: t.clone() for n, t in draft.layer.state_dict().items()}
    for name, (tensor, message) in bad.items():
        changed = {**weights, name: tensor}
        with pytest.raises(CheckpointError, match=message):
            draft.load_weights((n, t) for n, t in changed.items() if t is not None)
    assert all(torch.equal(kept[n], t) for n, t in draft.layer.state_dict().items())
    with pytest.raises(CheckpointError, match="missing"):
        draft.load_weights([])


@pytest.mark.parametrize("changed", [False, True])
def test_a_head_of_its_own_is_refused(changed: bool, checkpoint: Callable[..., Path]) -> None:
    """A copy of the target's head is no head of its own; another one would be ignored."""
    directory = checkpoint("glm4_moe", "random")
    draft, weights = TracedDraft(directory, Causal), weights_of(directory)
    stored = weights["lm_head.weight"].clone()
    stored[3, 5] += 0.25 * changed
    draft.load_weights({**weights, "model.layers.2.shared_head.head.weight": stored}.items())
    if not changed:
        return draft.check_ends()
    with pytest.raises(UnsupportedModelError, match=r"glm4_moe: MTP layer 0 .* different head"):
        draft.check_ends()


def test_models_that_cannot_be_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for family, role in (("qwen4_exp", ".*"), ("deepseek_v32", "index, latent")):
        message = rf"{family}: its MTP layers hold state of their own kind \({role}\)"
        with pytest.raises(UnsupportedModelError, match=message):
            TracedDraft(checkpoint(family, "random"), Causal)
    with pytest.raises(UnsupportedModelError, match=r"asked for, counted from 0; .* announces 1"):
        TracedDraft(checkpoint("mimo", "random"), Causal, DraftOptions(index=1))
    shutil.copytree(checkpoint("mimo", "random"), tmp_path / "fp8")
    path = tmp_path / "fp8" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantised \(fp8\)"):
        TracedDraft(tmp_path / "fp8", Causal)
    path.unlink()
    with pytest.raises((CheckpointError, OSError), match=r"config\.json"):
        TracedDraft(tmp_path / "fp8", Causal)


def test_float32_parts_stay_so_in_bfloat16(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("glm4_moe", "random")
    draft = TracedDraft(directory, Causal, DraftOptions(dtype=torch.bfloat16))
    draft.load_weights(weights_of(directory).items())
    dtypes = {n: t.dtype for n, t in draft.layer.state_dict().items()}
    wide = {n for n, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"block.mlp.gate.e_score_correction_bias"}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    rows = torch.randn(5, 64, dtype=torch.bfloat16)
    out = draft(None, torch.arange(5), rows, rows)
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


def test_a_stream_head_is_as_wide_as_the_targets(checkpoint: Callable[..., Path]) -> None:
    """DeepSeek-V4 keeps it in float32, as SGLang does in its draft (deepseek_v4_nextn.py:88-92)."""
    options = DraftOptions(dtype=torch.bfloat16)
    draft = TracedDraft(checkpoint("deepseek_v4", "random"), Causal, options)
    head = {n: t for n, t in draft.layer.state_dict().items() if n.startswith("stream_head.")}
    assert len(head) == 3
    assert {tensor.dtype for tensor in head.values()} == {torch.float32}
    streams = torch.randn(5, 128, dtype=torch.bfloat16)
    assert draft.final_norm(streams).dtype == torch.bfloat16


def test_vllms_entry_point_is_there_and_light() -> None:
    """vLLM imports it in each process: neither vLLM nor torch, nor the rest of mtpc."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["mtpc"].partition(":")
    code = (
        f"import sys; from {module} import {function}; assert callable({function}); "
        "heavy = {'torch', 'vllm', 'transformers', 'mtpc.api'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
