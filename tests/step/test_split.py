"""verify and propose as two graphs: the cut is found, and the halves equal the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compiled import capture_split, captured, in_turn
from helpers.families import EACH_FAMILY_OF_FEW, FAMILY_NAMES, TINY
from helpers.plans import plan_of
from helpers.theorem import PROMPTS

from mtpc.api import SpecModel
from mtpc.backends import make_backend
from mtpc.capture.effects import analyse
from mtpc.capture.graph import operators
from mtpc.capture.split import split_step
from mtpc.errors import GraphError
from mtpc.layout import StepKey, graph_keys
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.program.program import Program


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[..., Any]) -> Callable[..., StepCompiler]:
    made: dict[Any, StepCompiler] = {}

    def get(family: str, spec_tokens: int = 3, dtype: str = "float64") -> StepCompiler:
        key = (family, spec_tokens, dtype)
        if key not in made:
            options = plan_of(spec_tokens=spec_tokens, batch_buckets=(2,), **TINY)
            loaded = load(checkpoint(family), dtype, spec_tokens > 0)
            made[key] = StepCompiler(loaded, options, make_backend("eager"))
        return made[key]

    return get


def test_what_proposes_nothing_is_not_built_in_halves() -> None:
    """K by load has plain decoding among its steps."""
    graphs = graph_keys(plan_of(spec_tokens="auto"), "both")
    assert {part for key, part in graphs if key.spec_tokens == 0} == {"step"}
    assert {part for _, part in graphs} == {"step", "verify", "propose"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_two_graphs_equal_one(
    family: str, compiler: Callable[..., StepCompiler], compiled: Callable[..., Any]
) -> None:
    """A whole generation through verify + propose equals the fused step's."""
    built = compiler(family)
    steps = {}
    for key in built.keys:
        steps[key] = in_turn(*capture_split(built, key))
    spec = SpecModel(built.loaded.served(), built.plan, Program(steps, built.shared))
    whole = compiled(family, 3, batch_buckets=(2,))
    assert spec.generate(PROMPTS[4:9], 16) == whole.generate(PROMPTS[4:9], 16)


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_the_cut_is_where_drafting_begins(
    family: str, compiler: Callable[..., StepCompiler]
) -> None:
    """verify holds the target and the results, propose the draft layer; little crosses.

    In float32: from float64 the cut rightly prefers the float32 cast that the draft layer's norm
    begins with, because it is half as large.
    """
    built = compiler(family, dtype="float32")
    split = split_step(built.rewrite(built.trace(StepKey.decode(2, 3))))
    calls = list(operators(split.verify.graph))
    verify = {node.meta.get("piece") for node, _ in calls}
    propose = {node.meta.get("piece") for node, _ in operators(split.propose.graph)}
    assert {"target", "target_head", "accept"} <= verify
    # Positions and masks may be worked out on this side where that is fewer bytes to hand on.
    products = {node.meta.get("piece") for node, op in calls if op is torch.ops.aten.linear.default}
    assert not {piece for piece in products if str(piece).startswith("draft")}
    assert "drafts.0" in propose
    assert "target" not in propose
    # Hidden states of R*Q = 8 rows of 64 floats, one stream or two; everything else is metadata.
    features = 8 * 64 * 4 * getattr(built.loaded.config, "hc_mult", 1)
    layout = split.verify.layout
    crossing = sum(layout.nbytes(name) for name in layout if name.startswith("cross."))
    assert features <= crossing < features + 2048


def test_results_are_ready_after_verify(compiler: Callable[..., StepCompiler]) -> None:
    """A host may read and act on the emitted tokens before it runs propose."""
    built = compiler("mimo")
    split = split_step(built.rewrite(built.trace(StepKey.decode(2, 3))))
    effects = analyse(split.verify.graph)
    written = set().union(*(effects.buffer_writes(node) for node in split.verify.graph.nodes))
    counts = {"batch.num_emitted", "batch.num_accepted", "batch.stop_reason"}
    assert counts | {"batch.out_token_ids"} <= written


def test_the_halves_run_compiled(checkpoint: Callable[..., Any]) -> None:
    """On the cpu backend: small buffers that a half only reads must not be frozen into its code."""
    loaded = load(checkpoint("mimo"), "float64", True)
    options = plan_of(spec_tokens=2, batch_buckets=(2,), **TINY)
    cpu = StepCompiler(loaded, options, make_backend("cpu"))
    key = StepKey.decode(2, 2)
    verify, propose = capture_split(cpu, key)
    whole = StepCompiler(loaded, options, make_backend("eager"))
    step = captured(whole, key)
    for compiler in (cpu, whole):
        state = compiler.shared
        state["state.block_table"][1:3, :2] = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
        state["state.remaining_tokens"][1:3] = 6
    for buffers in (verify.buffers, propose.buffers, step.buffers):
        buffers["batch.state_indices"].copy_(torch.tensor([1, 2]))
    for _ in range(2):
        verify.replay()
        propose.replay()
        step.replay()
        for name in ("state.token_ids", "state.committed_lens", "state.remaining_tokens"):
            assert torch.equal(cpu.shared[name][1:], whole.shared[name][1:]), name


def test_nothing_to_propose(compiler: Callable[..., StepCompiler]) -> None:
    built = compiler("mimo", 0)
    graph = built.rewrite(built.trace(StepKey.decode(2, 0)))
    with pytest.raises(GraphError, match="spec_tokens=0"):
        split_step(graph)


def test_an_unfinished_graph_is_refused(compiler: Callable[..., StepCompiler]) -> None:
    with pytest.raises(GraphError, match="run the passes first"):
        split_step(compiler("mimo").trace(StepKey.decode(2, 3)))
