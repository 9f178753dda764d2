"""A traced draft whose linear layers and experts the host computes, on one rank or on several.

The host here is plain torch: it cuts weights as vLLM and SGLang do, and its ranks are threads that
add up what they computed. tests/peers/vllm_plugin.py and sglang_plugin.py run it with the hosts
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.oracles import DraftOracle, Oracle
from helpers.plain_host import CHAINED, FAMILIES, TOKENS, Causal, Group, Host, Linear
from safetensors.torch import load_file
from torch import Tensor, nn

from mtpc.errors import CheckpointError, OptionError, UnsupportedModelError
from mtpc.integrations.draft import DraftOptions, TracedDraft
from mtpc.integrations.layer_sites import ExpertsSite, LinearSite

DOUBLE = DraftOptions(dtype=torch.float64)


@cache
def make(directory: Path, ranks: int, index: int = 0, host: type[Host] = Host) -> list[TracedDraft]:
    """One draft a rank."""
    group, weights = Group(ranks), load_file(directory / "model.safetensors")
    drafts = []
    for rank in range(ranks):
        options = replace(DOUBLE, index=index)
        drafts.append(TracedDraft(directory, Causal, options, host(rank, group)))
        drafts[-1].load_weights(weights.items())
    return drafts


def run(drafts: list[TracedDraft], oracle: Oracle, ids: list[int], hidden: Tensor) -> Tensor:
    """What all ranks return; they must be equal to the last bit."""
    embedded = oracle.model.get_input_embeddings()(torch.tensor(ids)).detach()

    @torch.no_grad()
    def one(draft: TracedDraft) -> Tensor:
        return draft(None, torch.arange(len(ids)), hidden, embedded)

    with ThreadPoolExecutor(len(drafts)) as pool:
        results = list(pool.map(one, drafts))
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


def error(drafts: list[TracedDraft], reference: DraftOracle) -> float:
    """The largest difference from the oracle, over 11 rows."""
    ids, features = TOKENS[1:12], reference.page.first(TOKENS[:11])
    expected = reference.page.run(0, ids, features).detach()
    return float((run(drafts, reference.oracle, ids, features) - expected).abs().max())


CASES = [
    *((family, 2) for family in FAMILIES[:4] if family != "glm4_moe"),
    *(("mimo", 1), ("deepseek_v4", 2)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *(("mimo", 4), ("deepseek_v3", 1), ("glm4_moe", 2)),
            *((family, 2) for family in (*FAMILIES[4:6], "step3p7", "nemotron_h")),
            *((family, 1) for family in CHAINED),
        )
    ),
]


@pytest.mark.parametrize(("family", "ranks"), CASES)
def test_hosts_layers_are_the_oracles(
    family: str, ranks: int, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """Four ranks share two key/value heads."""
    reference = DraftOracle(oracle(family, "random"))
    drafts = make(checkpoint(family, "random"), ranks)
    for count in (1, 6):
        ids, features = TOKENS[1 : count + 1], reference.page.first(TOKENS[:count])
        expected = reference.page.run(0, ids, features).detach().flatten(1)
        ours = run(drafts, reference.oracle, ids, features.flatten(1))
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)
        assert expected.abs().max() > 0.1
    draft = drafts[0]
    calls = {str(n.target) for n in draft.graph.graph.nodes if n.op == "call_module"}
    kinds = {call.partition(".")[0] for call in calls}
    assert kinds - {"experts"} == {"sites", "linears"}
    owned = sum(parameter.numel() for parameter in draft.layer.parameters())
    hosted = sum(p.numel() for h in draft.hosted.values() for p in h.module.parameters())
    assert owned < hosted / 8  # Norms and routers.


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
def test_a_compiled_draft_is_the_oracles(
    family: str, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """As vLLM's plugin has it compiled: for one row, and for any other number."""
    reference = DraftOracle(oracle(family, "random"))
    drafts = [TracedDraft(checkpoint(family, "random"), Causal, DOUBLE)]
    drafts[0].load_weights(load_file(checkpoint(family, "random") / "model.safetensors").items())
    drafts[0].graph.compile(dynamic=True)
    for count in (3, 1, 11):
        ids, features = TOKENS[1 : count + 1], reference.page.first(TOKENS[:count])
        expected = reference.page.run(0, ids, features).detach()
        ours = run(drafts, reference.oracle, ids, features)
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def test_sites_say_what_a_rank_computes(checkpoint: Callable[..., Path]) -> None:
    (draft, *_) = make(checkpoint("deepseek_v3", "random"), 2)
    found = {name: hosted.site for name, hosted in draft.hosted.items()}
    styles = {name.rpartition(".")[2]: getattr(site, "style", "") for name, site in found.items()}
    assert styles == {
        "projection": "replicated",
        "q_a_proj": "replicated",
        "q_b_proj": "column",
        "kv_a_proj_with_mqa": "replicated",
        "kv_b_proj": "column",
        "o_proj": "row",
        "gate_proj": "column",
        "up_proj": "column",
        "down_proj": "row",
        "experts": "",
    }
    assert found["block.self_attn.o_proj"].name == "model.layers.2.self_attn.o_proj"
    assert [site.name for site in found.values() if getattr(site, "is_joint", False)] == [
        "model.layers.2.eh_proj"
    ]
    experts = found["block.mlp.experts"]
    assert isinstance(experts, ExpertsSite)
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (4, 2, 32)
    (site,) = draft.sites
    assert (site.num_heads, site.num_kv_heads) == (2, 2)
    assert site.expansion is draft.hosted["block.self_attn.kv_b_proj"].module


class AddsBiasTwice(Host):
    """A bias that every rank adds before the sum."""

    def load(self, module: Any, name: str, tensor: Tensor) -> set[str]:
        is_row = isinstance(module, Linear) and module.site.style == "row"
        return super().load(module, name, tensor * self.ranks if is_row and name == "bias" else
                            tensor)  # fmt: skip


class LeavesOutASum(Host):
    """A row-parallel layer whose ranks do not add up."""

    def linear(self, site: LinearSite) -> nn.Module:
        if site.name.endswith("o_proj"):
            return _Alone(site, self.rank, self.group)
        return super().linear(site)


class _Alone(Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight)


class CutsOtherwise(Host):
    """A layer whose ranks hold each other's parts."""

    def load(self, module: Any, name: str, tensor: Tensor) -> set[str]:
        if isinstance(module, Linear) and module.site.name.endswith("up_proj"):
            tensor = tensor.flip(0)
        return super().load(module, name, tensor)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DraftOracle]:
    """Qwen3-Next with biases, one of which is row-parallel."""
    directory = tmp_path_factory.mktemp("biased")
    tiny.make_checkpoint("qwen3_next", directory, attention_bias=True)
    weights = load_file(directory / "model.safetensors")
    assert weights["mtp.layers.0.self_attn.o_proj.bias"].abs().max() > 0.01
    return directory, DraftOracle(Oracle("qwen3_next", directory))


@pytest.mark.parametrize(
    "fault", [Host, AddsBiasTwice, pytest.param(CutsOtherwise, marks=pytest.mark.slow)]
)
def test_faults_of_a_host_are_seen(fault: type[Host], biased: tuple[Path, DraftOracle]) -> None:
    directory, reference = biased
    difference = error(make(directory, 2, host=fault), reference)
    assert difference < 2e-5 if fault is Host else difference > 1e-3


def test_a_missing_sum_is_seen(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """The ranks then have different results."""
    reference = DraftOracle(oracle("mimo", "random"))
    with pytest.raises(AssertionError):
        error(make(checkpoint("mimo", "random"), 2, host=LeavesOutASum), reference)


def test_what_cannot_be_cut_is_refused(checkpoint: Callable[..., Path]) -> None:
    cases = (
        ("mimo", 3, OptionError, "64 features for 3 ranks"),
        ("mimo_v2", 2, UnsupportedModelError, r"plan cuts block\.self_attn\.sinks among 2 ranks"),
    )
    for family, ranks, kind, message in cases:
        with pytest.raises(kind, match=message):
            make(checkpoint(family, "random"), ranks)


def test_hosts_weights_that_do_not_fit_are_named(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("glm4_moe", "random")
    weights = load_file(directory / "model.safetensors")
    stem = "model.layers.2."
    bad: dict[str, tuple[Any, str]] = {
        "self_attn.o_proj.weight": (None, r"miss model\.layers\.2\.self_attn\.o_proj\.weight"),
        "self_attn.o_proj.weight_scale": (torch.ones(1), r"unexpected \S*o_proj\.weight_scale"),
        "mlp.experts.1.up_proj.weight": (None, r"miss \S*experts\.1\.up_proj\.weight; "),
        "mlp.experts.4.up_proj.weight": (torch.ones(32, 64), r"unexpected \S*experts\.4\.up_proj"),
        "mlp.experts.0.up_proj.scale": (torch.ones(1), r"unexpected .*experts\.0\.up_proj\.scale"),
        "mlp.shared_experts.up_proj.weight": (torch.full((32, 64), torch.nan), "NaN or infinity"),
        "hnorm.odd": (torch.ones(1), r"unexpected hidden_norm\.odd"),
    }
    draft = TracedDraft(directory, Causal, DOUBLE, Host(0, Group(1)))
    for name, (tensor, message) in bad.items():
        changed = {**weights, stem + name: tensor}
        with pytest.raises(CheckpointError, match=message):
            draft.load_weights((n, t) for n, t in changed.items() if t is not None)


def test_a_quantised_checkpoint_is_the_hosts(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The draft takes its config; the host's loaders take its tensors."""
    quantised = {"quant_method": "fp8"}
    directory = tiny.with_entries(
        checkpoint("mimo", "random"), tmp_path / "fp8", (), quantization_config=quantised
    )
    with pytest.raises(UnsupportedModelError, match="quantised"):
        TracedDraft(directory, Causal)
    TracedDraft(directory, Causal, DOUBLE, Host(0, Group(1)))


@pytest.mark.parametrize("kind", ["attention", "linear", "experts"])
def test_marks_are_never_run(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind} site 0 was run"):
        torch.ops.mtpc.host_site([torch.zeros(2, 4)], kind, 0, [4])
