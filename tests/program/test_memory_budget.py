"""What steps take on a device, estimated before anything is captured, against what is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.families import EACH_FAMILY_OF_FEW
from helpers.plans import changed, plan_of
from helpers.tapes import op_names

from mtpc.backends.cuda import CudaBackend
from mtpc.backends.driver_memory import NODE_BYTES, kernel_count, workspace_bytes
from mtpc.backends.eager import EagerBackend
from mtpc.backends.memory import GRANULE, Live, live_memory, peak_bytes
from mtpc.backends.null import NullGraphs
from mtpc.backends.placing import place_live, pool_bytes
from mtpc.capture.effects import analyse
from mtpc.capture.graph import StepGraph
from mtpc.errors import CapacityError
from mtpc.layout import StepKey
from mtpc.models.load import LoadedModel, load
from mtpc.plan import Plan
from mtpc.program import memory_plan
from mtpc.program.compiler import StepCompiler
from mtpc.program.memory_plan import (
    MARGIN,
    MemoryPlan,
    fit_pages,
    plan_memory,
    planned_compiler,
    steady,
)

OPTIONS = plan_of(spec_tokens=2, batch_buckets=(1, 2), max_len=64, page_size=4, prefill_chunk=8)


def backend(free: int | None = None) -> CudaBackend:
    """The cuda backend on recorded graphs."""
    return CudaBackend(NullGraphs(free), EagerBackend().lower, (), device="cpu")


@pytest.mark.parametrize(
    "family",
    ["glm4_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("deepseek_v3", "mimo_v2"))],
)
def test_the_estimate_holds_what_is_recorded(family: str, checkpoint: Callable[..., Path]) -> None:
    """Never less than the recorded temporaries need at once, and not a multiple of it either."""
    directory = checkpoint(family)
    cuda = backend()
    compiler = StepCompiler(load(directory, "float32", True), OPTIONS, cuda)
    for key in (compiler.keys[0], compiler.keys[-1]):
        graph = compiler.rewritten(key)
        estimate = peak_bytes(live_memory(graph))
        graphs = NullGraphs()
        CudaBackend(graphs, EagerBackend().lower, (), device="cpu").capture(graph.module, graph)
        peak = graphs.pool.peak
        assert 1000 < peak <= graphs.pool_bytes()
        # Small tensors are rounded up; there are never more than a hundred of them at once.
        assert peak <= estimate <= 1.5 * peak + 100 * GRANULE, (str(key), peak, estimate)


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_steps_share_a_pool_without_overlap(family: str, checkpoint: Callable[..., Path]) -> None:
    """What is needed at one time is apart, of every bucket; nothing else is in the pool."""
    options = changed(OPTIONS, batch_buckets=(2,))
    loaded = load(checkpoint(family), "float32", True)
    compiler, ends = StepCompiler(loaded, options, backend()), dict[str, int]()
    for key in compiler.keys:
        graph = compiler.rewritten(key)
        live = live_memory(graph)
        placed, effects = place_live(live), analyse(graph.graph)
        nodes = [node for node in graph.graph.nodes if node.op != "output"]
        assert [p.live for p in sorted(placed, key=lambda p: live.index(p.live))] == live
        for index, one in enumerate(placed):
            assert one.offset % GRANULE == one.live.nbytes % GRANULE == 0
            for other in placed[index + 1 :]:
                apart = one.end <= other.offset or other.end <= one.offset
                assert apart or not one.live.meets(other.live), (one, other)
        roots = {root for node in nodes for root in effects.roots[node]}
        static = {root for root in roots if isinstance(root, str)}
        names = {item.name for item in live}
        assert names >= {root.name for root in roots - static}, "every temporary is in it"
        assert not names & {node.name for node in nodes if node.op == "get_attr"}
        assert {item.last for item in live} <= set(range(len(nodes)))
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        assert not output.all_input_nodes, "nothing of a step is there after it"
        ends[str(key)] = pool_bytes(placed)
        assert peak_bytes(live) <= ends[str(key)] <= 1.5 * peak_bytes(live)
    plan = plan_memory(compiler)
    assert plan.pool == max(ends.values())
    assert plan.steps.keys() == ends.keys()


def test_a_layout_by_hand() -> None:
    """A gap is used again by what comes later, and not by what would overlap."""
    a, b, c, d = (Live("a", 1024, 0, 1), Live("b", 512, 0, 3), Live("c", 1024, 2, 3),
                  Live("d", 512, 3, 4))  # fmt: skip
    assert {p.live.name: p.offset for p in place_live([a, b, c, d])} == {
        "a": 0, "c": 0, "b": 1024, "d": 1536,
    }  # fmt: skip
    assert peak_bytes([a, b, c, d]) == pool_bytes(place_live([a, b, c, d])) == 2048
    assert peak_bytes([]) == pool_bytes([]) == 0


@pytest.mark.parametrize("owned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_that_passes_make_are_in_the_plan(
    owned: bool, checkpoint: Callable[..., Path]
) -> None:
    """Where mtpc read the weights itself, joint ones take their place and nothing is added."""
    loaded = replace(load(checkpoint("mimo"), "float32", True), owned=owned)
    joint = changed(OPTIONS, spec_tokens=0, batch_buckets=(2,))
    apart = changed(joint, disabled_passes=("merge-projections",))
    plain = plan_memory(StepCompiler(loaded, apart, backend()))
    compiler = StepCompiler(loaded, joint, backend())
    merged = plan_memory(compiler)
    made = sum(compiler.weights[name].nbytes for name in compiler.weights.recipes)
    assert made > 10_000
    assert merged.fixed == plain.fixed + (0 if owned else made)


def test_a_plan_by_hand() -> None:
    plan = MemoryPlan({"decode": 100, "prefill": 700}, fixed=50, page=10, pool=720, driver=30)
    # While one is warmed up the other is captured.
    assert plan.graphs == 700 + 100 + 30 + MARGIN
    assert plan.pages(MARGIN + 830 + 50 + 39) == 3
    assert plan.pages(0) == 0


def test_the_pool_takes_what_graphs_leave(checkpoint: Callable[..., Path]) -> None:
    """Reported, and cut visibly; asked for in numbers, it is an error that has the numbers."""
    loaded = load(checkpoint("mimo"), "float32", True)
    options = changed(OPTIONS, spec_tokens=0, batch_buckets=(2,))
    full, lines = StepCompiler(loaded, options, backend()), list[str]()
    state = sum(tensor.nbytes for tensor in full.shared.values())
    pages = full.plan.num_pages
    plan = plan_memory(full)
    assert plan.fixed + pages * plan.page == state
    assert set(plan.steps) == set(map(str, full.keys))
    free, notes = plan.driver + MARGIN + state, Counter[str]()
    settled = fit_pages(plan, full.plan, free, lines.append, notes)
    assert settled.num_pages == steady(plan.pages(free)) < pages
    assert settled == full.plan.given(num_pages=settled.num_pages)
    assert notes == {f"a KV pool of {settled.num_pages} pages instead of {pages}: {lines[0]}": 1}
    notes, enough = Counter[str](), plan.graphs + state
    assert fit_pages(plan, full.plan, enough, lines.append, notes) == full.plan
    assert not notes
    asked = changed(full.plan, num_pages=pages)
    with pytest.raises(CapacityError, match=r"KV pool does not fit the device: .*lower num_pages"):
        fit_pages(plan, asked, enough - 1, lines.append, notes)
    with pytest.raises(CapacityError, match="and 2 at least"):
        fit_pages(plan, full.plan, plan.graphs, lines.append, notes)


def test_most_starts_agree_on_the_size_of_a_cut_pool() -> None:
    """At most one page of 32 is lost; few pages stay as they are."""
    assert [steady(n) for n in (1, 31, 63, 64, 65, 127, 1000, 100_000)] == [
        1, 31, 63, 64, 64, 126, 992, 98_304,
    ]  # fmt: skip
    assert len({steady(n) for n in range(70_000, 71_000)}) <= 2
    assert all(n - steady(n) <= n / 32 for n in range(1, 5000))


@pytest.fixture
def loaded(checkpoint: Callable[..., Path]) -> LoadedModel:
    return load(checkpoint("mimo"), "float32", True)


@pytest.fixture
def options(loaded: LoadedModel) -> Plan:
    """Plain steps of one bucket."""
    return changed(OPTIONS, spec_tokens=0, batch_buckets=(2,)).of_model(loaded.max_positions)


@dataclass
class Planned:
    """What `planned_compiler` made for a device.

    Attributes:
        plan: its plan.
        notes: those of the backend.
        lines: what it said while it planned.
        texts: the steps that run.
        traced: how many steps were traced.
    """

    plan: Plan
    notes: Counter[str]
    lines: list[str]
    texts: set[str]
    traced: int


@pytest.fixture
def planned(
    loaded: LoadedModel, options: Plan, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int | None], Planned]:
    """planned(free): what is made of `options` where a device has so many bytes."""
    keys, trace = list[StepKey](), StepCompiler.trace

    def counted(self: StepCompiler, key: StepKey) -> StepGraph:
        keys.append(key)
        return trace(self, key)

    def get(free: int | None) -> Planned:
        cuda, lines = backend(free), list[str]()
        keys.clear()
        make = partial(StepCompiler, loaded, backend=cuda)
        compiler = planned_compiler(make, options, cuda, lines.append)
        steps = compiler.compile().steps.values()
        texts = {step.graph.text() for step in steps if step.graph}
        return Planned(compiler.plan, cuda.notes, lines, texts, len(keys))

    monkeypatch.setattr(StepCompiler, "trace", counted)
    return get


def test_steps_are_traced_once_where_the_pool_surely_fits(
    loaded: LoadedModel, options: Plan, planned: Callable[[int | None], Planned]
) -> None:
    """The steps that were planned are those that run."""
    plain = StepCompiler(loaded, options, backend())
    found = planned(None)
    assert (found.plan, found.traced) == (options, len(plain.keys))
    assert found.texts == set(_texts(loaded, options))
    assert not found.lines, "where nobody counts, nothing is planned"
    again = planned(_enough(plain))
    assert (again.plan, again.notes, again.texts) == (options, found.notes, found.texts)
    assert again.traced == found.traced


@pytest.mark.slow
def test_steps_are_traced_again_where_the_pool_may_not_fit(
    loaded: LoadedModel,
    options: Plan,
    planned: Callable[[int | None], Planned],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the same, unless the pool is cut."""
    plain = StepCompiler(loaded, options, backend())
    enough, steps = _enough(plain), len(plain.keys)
    monkeypatch.setattr(memory_plan, "_SURE", 0.0)
    found = planned(enough)
    assert (found.plan, found.traced) == (options, 2 * steps)
    assert found.texts == set(_texts(loaded, options))
    monkeypatch.setattr(memory_plan, "_SURE", 0.5)
    cut = options.given(num_pages=steady(options.num_pages - 1))
    less = planned(enough - plan_memory(plain).page)
    assert (less.plan, less.traced) == (cut, 2 * steps)
    assert less.texts == set(_texts(loaded, cut))
    (said,) = less.notes - found.notes
    assert said.startswith(f"a KV pool of {cut.num_pages} pages instead of {options.num_pages}: ")


def _enough(plain: StepCompiler) -> int:
    """The bytes that steps and their whole pool take."""
    plan = plan_memory(plain)
    return plan.graphs + plan.fixed + plain.plan.num_pages * plan.page


def _texts(loaded: LoadedModel, options: Plan) -> list[str]:
    """The steps of a compiler that plans nothing."""
    compiler = StepCompiler(loaded, options, backend())
    return [compiler.rewritten(key).text() for key in compiler.keys]


def test_every_graph_and_workspace_is_counted(checkpoint: Callable[..., Path]) -> None:
    """A copy of each bucket's graph; more buckets take more."""
    loaded = load(checkpoint("mimo"), "float32", True)
    options = changed(OPTIONS, spec_tokens=0)
    compiler, counts = StepCompiler(loaded, options, backend()), list[int]()
    for key in compiler.keys:
        graph = compiler.rewritten(key)
        ran = NullGraphs()
        CudaBackend(ran, EagerBackend().lower, (), device="cpu").capture(graph.module, graph)
        (tape,) = ran.tapes
        counts.append(kernel_count(graph))
        # Views are calls of the tape and no kernels; each product is a kernel.
        products = sum("linear" in name or ".mm" in name for name in op_names(tape))
        assert products < counts[-1] < len(list(op_names(tape)))
    plan = plan_memory(compiler)
    assert plan.driver == workspace_bytes("cpu") + sum(counts) * NODE_BYTES
    fewer = plan_memory(StepCompiler(loaded, changed(options, batch_buckets=(2,)), backend()))
    assert plan.driver - fewer.driver >= min(counts) * NODE_BYTES


def test_workspaces_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams have one each: 32 MiB from Hopper on, 8.125 before."""
    monkeypatch.setattr(torch.version, "hip", None)
    for major, wanted in ((8, 8_519_680), (9, 32 << 20), (10, 32 << 20)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, m=major: (m, 0))
        assert workspace_bytes("cuda:0") == 2 * wanted
    assert workspace_bytes("cpu") == 2 * (32 << 20)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert workspace_bytes("cuda:0") == 2 * (128 << 20)
