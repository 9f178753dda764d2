"""The passes over whole steps of the families: their rewrites, and what the verifier notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import EACH_FAMILY_OF_FEW, TINY
from helpers.plans import plan_of
from helpers.spelled_out import spell_out
from helpers.whole_steps import compiler_of, different, model_of, values_after

from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes.batch_invariant import BatchInvariant
from mtpc.backends.pipeline import pass_names, select_passes
from mtpc.capture.graph import StepGraph, operators
from mtpc.errors import GraphError
from mtpc.layout import StepKey
from mtpc.layout.buffers import Q, R
from mtpc.passes import Verifier, run_pipeline
from mtpc.passes.absorb_latent import AbsorbLatent
from mtpc.passes.fuse_draft_chain import FuseDraftChain
from mtpc.passes.quantise_draft import QuantiseDraft
from mtpc.passes.resize_metadata import ResizeMetadata
from mtpc.passes.select_head_rows import SelectHeadRows
from mtpc.program.compiler import StepCompiler


@pytest.fixture
def compiler(checkpoint: Callable[..., Any]) -> Callable[..., StepCompiler]:
    """compiler(family, K, **options): in float64, on the eager backend."""

    def get(family: str, spec_tokens: int = 3, **changes: Any) -> StepCompiler:
        options = {"spec_tokens": spec_tokens, "batch_buckets": (2,), **TINY, **changes}
        return compiler_of(checkpoint(family), "float64", EagerBackend(), **options)

    return get


PIECES_OF_A_STEP = """
    module pieces.begin
    module pieces.target module pieces.target_head module pieces.choose module pieces.accept
    module pieces.drafts.0 module pieces.draft_heads.0 module pieces.pick
    module pieces.chain_metadata
    module pieces.drafts.0 module pieces.draft_heads.0 module pieces.pick
    module pieces.advance
"""


def test_the_traced_step(compiler: Callable[..., StepCompiler]) -> None:
    """The step before any pass: pieces in order, the draft layer twice for K = 2."""
    graph = compiler("mimo", 2).trace(StepKey.decode(2, 2))
    modules = [f"module {n.target}" for n in graph.graph.nodes if n.op == "call_module"]
    assert " ".join(modules) == " ".join(PIECES_OF_A_STEP.split())


def test_sampling_adds_what_it_needs_where_it_is_asked_for(
    compiler: Callable[..., StepCompiler],
) -> None:
    """One more piece, and the ops of sampling: target and each draft choose, the step records."""
    for sampling in (False, True):
        graph = compiler("mimo", 2, sampling=sampling).trace(StepKey.decode(2, 2))
        modules = " ".join(str(n.target) for n in graph.graph.nodes if n.op == "call_module")
        assert ("pieces.accept pieces.record pieces.drafts.0" in modules) == sampling
        compiler("mimo", 2, sampling=sampling).rewrite(graph)
        names = Counter(str(op) for _, op in operators(graph.graph))
        wanted = {"sample": 3, "count_tokens": 1, "write_logprobs": 1} if sampling else {}
        found = {
            n: names[f"mtpc.{n}.default"] for n in ("sample", "count_tokens", "write_logprobs")
        }
        assert {n: count for n, count in found.items() if count} == wanted


def test_resize_metadata(compiler: Callable[..., StepCompiler]) -> None:
    """slot_mapping and positions go from num_reqs to num_reqs * query_len; nothing else moves."""
    graph = compiler("mimo").trace(StepKey.decode(2, 3))
    assert graph.layout["batch.slot_mapping"].dims == (R,)
    with pytest.raises(
        GraphError, match=r"batch.positions has 2 rows .* uses 8; the pass resize-metadata"
    ):
        Verifier(propagate=False)(graph, "trace")
    text, others = graph.text(), {n: graph.layout[n].dims for n in graph.layout}
    run_pipeline(graph, (ResizeMetadata(),), Verifier(propagate=False))
    assert graph.history[-1].rewrites == 2
    for name in ("batch.slot_mapping", "batch.positions"):
        assert graph.layout[name].dims == (R * Q,)
        assert graph.layout.shape(name) == (8,)
        assert graph.buffer(name).shape == (8,)
        del others[name]
    assert others == {n: graph.layout[n].dims for n in others}
    assert graph.text() == text, "only sizes change"
    assert ResizeMetadata().apply(graph) == 0


def test_plain_decoding_needs_no_resize(compiler: Callable[..., StepCompiler]) -> None:
    graph = compiler("mimo", 0).trace(StepKey.decode(2, 0))
    assert ResizeMetadata().apply(graph) == 0


@pytest.mark.parametrize(
    ("spec_tokens", "pieces"),
    [
        *((0, 6), (2, 13), (3, 17)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 9), (4, 21))),
    ],
)
def test_fuse_draft_chain(
    spec_tokens: int, pieces: int, compiler: Callable[..., StepCompiler]
) -> None:
    """begin, target, head, choose, accept, advance; 3 for the first draft; 4 for each next."""
    built = compiler("mimo", spec_tokens)
    graph = built.trace(StepKey.decode(2, spec_tokens))
    built.rewrite(graph, until="fuse-draft-chain")
    assert graph.history[-1].rewrites == pieces
    assert not [n for n in graph.graph.nodes if n.op == "call_module"]
    writes = [n for n in graph.graph.nodes if n.target is torch.ops.mtpc.write_cache.default]
    assert len(writes) == 2 * (2 + spec_tokens), "K and V of two layers and of each draft pass"
    assert FuseDraftChain({}).apply(graph) == 0


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_pass_keeps_the_step(
    family: str, phase: str, compiler: Callable[..., StepCompiler]
) -> None:
    """After each pass the verifier holds (shapes, effects, syncs), and a rerun is idle.

    And the step computes the same values. Rounded draft weights change the MTP layer's caches and
    the drafts, and nothing of the target.
    """
    enabled = pass_names("backend", "off")
    built = compiler(family, verify_passes=True, enabled_passes=enabled)
    key = StepKey.decode(2, 3) if phase == "decode" else StepKey.prefill(1, 8, 3)
    values: dict[str, torch.Tensor] = {}

    def compare(name: str, graph: StepGraph) -> None:
        if not graph.is_flat:  # Its pieces hold caches of their own.
            return
        found = values_after(graph)
        changed = set(different(values, found))
        if name == QuantiseDraft.name:
            layers = built.loaded.target.config.get_text_config(decoder=True).num_hidden_layers
            assert f"kv.{layers}." in " ".join(changed)
            changed -= {n for n in changed if n.startswith(f"kv.{layers}.")}
            changed -= {"state.token_ids"}
        assert not changed, name
        values.update(found)

    graph = built.rewrite(built.trace(key), seen=compare)
    assert values["batch.num_emitted"].min() > 0
    assert [record.name for record in graph.history] == list(pass_names())
    rewrites = {record.name: record.rewrites for record in graph.history}
    assert rewrites["absorb-latent"] == (5 if family in ("deepseek_v3", "deepseek_v32") else 0)
    assert rewrites["select-head-rows"] > 3
    assert rewrites["hoist-shared"] > 10
    assert rewrites["quantise-draft"] > 0
    assert rewrites["pack-weights"] == 0  # These are float64.
    grown = {record.name: record.nodes_after - record.nodes_before for record in graph.history}
    spelled_out = grown[BatchInvariant.name]
    assert graph.history[-1].nodes_after - spelled_out < graph.history[1].nodes_after
    # Steps with dead code left by a later pass are canonicalised again for free; all else is idle.
    for step in (ResizeMetadata(), FuseDraftChain({}), AbsorbLatent(), SelectHeadRows()):
        assert step.apply(graph) == 0


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_passes_match_however_arguments_are_spelled(
    family: str, checkpoint: Callable[..., Any]
) -> None:
    """By position or by name, with defaults or without: every pass finds the same."""
    options: dict[str, Any] = {**TINY, "spec_tokens": 2, "batch_buckets": (2,), "draft_vocab": 24}
    options["enabled_passes"] = pass_names()
    found = []
    for spelled_out in (False, True):
        built = compiler_of(checkpoint(family), "bfloat16", EagerBackend(), **options)
        graph = built.rewrite(built.trace(built.keys[0]), until="fuse-draft-chain")
        if spelled_out:
            spell_out(graph)
        names = built._lowering.buffer_names
        passes = select_passes(built.plan, buffer_names=names)
        run_pipeline(graph, passes, Verifier(propagate=spelled_out))
        found.append({r.name: r.rewrites for r in graph.history})
    plain, spelled = found
    assert plain == spelled
    assert min(plain[n] for n in ("fuse-elementwise", "pack-weights", "trim-draft-head")) > 0


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_passes_change_no_token(family: str, compiler: Callable[..., StepCompiler]) -> None:
    """Optional passes on or off: the same tokens and the same acceptance."""
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 9, 8]]
    off = ("canonicalise", "select-head-rows", "hoist-shared", "absorb-latent")
    seen = []
    for passes in ({"disabled_passes": off}, {"enabled_passes": ("merge-projections",)}):
        model = model_of(compiler(family, 2, **passes))
        seen.append((model.generate(prompts, 16), model.stats.accepted))
    assert seen[0] == seen[1]


def test_the_verifier_sees_a_dropped_write(compiler: Callable[..., StepCompiler]) -> None:
    """Failure class 8: a write that a pass loses, or moves, does not go unnoticed."""
    built = compiler("mimo")
    graph = built.trace(StepKey.decode(2, 3))
    verifier = Verifier(propagate=False)
    run_pipeline(
        graph, select_passes(plan_of(), buffer_names=built._lowering.buffer_names)[:3], verifier
    )
    writes = [n for n in graph.graph.nodes if n.target is torch.ops.mtpc.write_cache.default]
    graph.graph.erase_node(writes[-1])
    with pytest.raises(GraphError, match=r"effects on kv.2.v changed"):
        verifier(graph, "a-bad-pass")


def test_the_verifier_sees_a_moved_read(compiler: Callable[..., StepCompiler]) -> None:
    """Attention that runs before the cache is written reads stale keys: noticed."""
    built = compiler("mimo")
    graph = built.trace(StepKey.decode(2, 3))
    verifier = Verifier(propagate=False)
    run_pipeline(
        graph, select_passes(plan_of(), buffer_names=built._lowering.buffer_names)[:3], verifier
    )
    nodes = list(graph.graph.nodes)
    write = next(n for n in nodes if n.target is torch.ops.mtpc.write_cache.default)
    read = next(n for n in nodes if n.target is torch.ops.mtpc.paged_attention.default)
    read.append(write)
    with pytest.raises(GraphError, match=r"effects on kv\.0\.k changed"):
        verifier(graph, "a-bad-pass")


@pytest.mark.parametrize("spec_tokens", [0, 1])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_pass_without_rewrites_leaves_the_graph(
    checkpoint: Callable[..., Any], family: str, spec_tokens: int
) -> None:
    """The cache keeps the text before such a pass as that after it."""
    options = {**TINY, "spec_tokens": spec_tokens, "batch_buckets": (1,)}
    compiler = compiler_of(checkpoint(family), "bfloat16", CpuBackend(), **options)
    for key in compiler.keys:
        texts = [compiler.trace(key).text()]
        graph = compiler.rewrite(
            compiler.trace(key), seen=lambda name, graph, texts=texts: texts.append(graph.text())
        )
        idle = [not passed.rewrites for passed in graph.history]
        assert any(idle)
        for passed, before, after in zip(graph.history, texts, texts[1:], strict=False):
            assert (before == after) or passed.rewrites, passed.name
