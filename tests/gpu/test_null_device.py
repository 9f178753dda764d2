"""Capture on the null device: one replay a decode step, no host writes, and what it refuses."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import EACH_FAMILY_OF_FEW
from helpers.plans import plan_of
from helpers.sampling_cases import make_rows
from helpers.tapes import counting_graph, op_names, storages, taken
from helpers.theorem import PROMPTS
from torch.utils._pytree import tree_map_only

import mtpc
from mtpc.api import SpecModel
from mtpc.backends.eager import EagerBackend
from mtpc.backends.graphs import static_tensors
from mtpc.backends.null import NullDevice, Tape
from mtpc.engine.readout import Readout
from mtpc.errors import CaptureError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.ops.philox import gumbel
from mtpc.program.compiler import StepCompiler
from mtpc.sampling_params import INTS, SamplingParams


@pytest.fixture(scope="module")
def null_model(checkpoint: Callable[..., Any]) -> Callable[..., tuple[SpecModel, NullDevice]]:
    """null_model(family, **changes): a model compiled once on a null device of its own, and the
    device. What the tests before have left is aborted."""
    made: dict[Any, tuple[SpecModel, NullDevice]] = {}

    def get(family: str, **changes: Any) -> tuple[SpecModel, NullDevice]:
        sizes = {"spec_tokens": 3, "batch_buckets": (2,), "max_len": 64, "page_size": 4}
        options = plan_of(**{**sizes, **changes})
        if (family, options) not in made:
            device, loaded = NullDevice(), load(checkpoint(family), "float64", True)
            program = StepCompiler(loaded, options, device).compile()
            made[family, options] = SpecModel(loaded.served(), options, program), device
        spec, device = made[family, options]
        for request in list(spec.engine.running):
            spec.engine.abort(request.request_id)
        return spec, device

    return get


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_replay_equals_eager(
    family: str, null_model: Callable[..., Any], compiled: Callable[..., Any]
) -> None:
    """The tape, replayed on captured memory, gives what the eager graph gives, token for token."""
    spec, _ = null_model(family)
    eager = compiled(family, 3, batch_buckets=(2,))
    assert spec.generate(PROMPTS[2:7], 16) == eager.generate(PROMPTS[2:7], 16)


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_nothing_is_taken_but_static_memory_and_the_tapes_own(
    family: str, null_model: Callable[..., Any]
) -> None:
    """No tensor of the host's, or of another step's, however small, is in a captured graph."""
    spec, device = null_model(family)
    static = {key: static_tensors(step.graph) for key, step in spec.program.steps.items()}
    assert {str(key) for key in static} == device.tapes.keys()
    for key, tensors in static.items():
        known, tape = storages(tensors.values()), device.tapes[str(key)]
        assert taken(tape, known) & known
        made = [t for entry in tape.entries for t in entry.outputs]
        temporaries = [t for t in made if not storages([t]) & known]
        assert len(storages(temporaries)) < len(temporaries) / 4, "memory is used again"
        for rest in device.tapes.values():
            theirs = [t for entry in rest.entries for t in entry.outputs]
            assert storages(temporaries) & storages(theirs), "steps share a pool"


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
@torch.no_grad()
def test_no_tensor_of_a_step_is_on_another_device(
    family: str, checkpoint: Callable[..., Any]
) -> None:
    """What is made without naming a device would be on the CPU. "meta" stands for a GPU, whose fake
    tensors torch's builds for the CPU cannot index."""
    loaded = load(checkpoint(family), "float32", True)
    for module in (loaded.target, *loaded.mtp_layers):
        module.to("meta")
    options = plan_of(
        spec_tokens=2, batch_buckets=(2,), max_len=64, page_size=4, prefill_chunk=8, sampling=True
    )
    compiler = StepCompiler(loaded, options, EagerBackend())
    for key in compiler.keys:
        tensors: list[torch.Tensor] = []
        for node in compiler.rewritten(key).graph.nodes:
            tree_map_only(torch.Tensor, tensors.append, node.meta.get("val"))
        assert len(tensors) > 100
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_results_come_by_one_copy(null_model: Callable[..., Any]) -> None:
    """Of decode and of prefill steps: side by side, where kernels may read 16 bytes at once."""
    spec, _ = null_model("mimo")
    for key, step in spec.program.steps.items():
        held = {name: step.buffers[name] for name in step.layout.results}
        assert len(held) > 3
        assert len(storages(held.values())) == 1
        places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held.values())
        assert all(begin % 16 == 0 for begin, _ in places)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
        found = Readout(spec.program, key).read()
        assert len(storages(found.values())) == 1
        assert not storages(found.values()) & storages(held.values())
        assert found.keys() == held.keys()
        assert all(torch.equal(found[name], held[name]) for name in held)


def test_a_step_is_read_after_the_next_one_is_launched(null_model: Callable[..., Any]) -> None:
    """Results of a launch stay as they are until the launch after the next one."""
    spec, _ = null_model("mimo")
    step = next(iter(spec.program.steps.values()))
    results = {name: step.buffers[name] for name in step.layout.results}
    launched = []
    for number in (1, 0, 1):
        for tensor in results.values():
            tensor.fill_(number)
        launched.append(step.results.take())
        if number == 0:
            assert all((tensor == 1).all() for tensor in launched[0].values())
    first, second, third = (storages(copies.values()) for copies in launched)
    assert first == third != second
    assert not any(tensor.any() for tensor in launched[1].values())


@pytest.mark.parametrize("page_size", [4, 64])
def test_one_replay_a_step_and_a_host_write_a_page(
    page_size: int, null_model: Callable[..., Any]
) -> None:
    """While no request joins or leaves: one replay a step, and a write where one needs a page."""
    spec, device = null_model("mimo", page_size=page_size)
    for prompt in PROMPTS[3:5]:
        spec.engine.add(prompt, 24)
    while any(not r.is_prefilled for r in spec.engine.running) or spec.engine.waiting:
        spec.engine.step()
    spec.engine.step()  # The first decode step points the batch at its slots.
    tape = device.tapes[str(StepKey.decode(2, 3))]
    replays, total = tape.replays, sum(spec.program.replays.values())
    grown = 0
    for _ in range(4):
        pages = [len(r.pages) for r in spec.engine.running]
        writes, counted = tape.host_writes, spec.program.host_writes
        spec.engine.step()
        now = sum(len(r.pages) > n for r, n in zip(spec.engine.running, pages, strict=True))
        assert tape.host_writes - writes == now, "seen by the tensors' own version counters"
        assert spec.program.host_writes - counted == now, "as counted by the program"
        grown += now
    assert tape.replays - replays == 4
    assert sum(spec.program.replays.values()) - total == 4
    assert (grown > 0) == (page_size == 4)


def test_host_writes_are_seen(null_model: Callable[..., Any]) -> None:
    """The counter that the test above rests on does count a write behind the program's back."""
    spec, device = null_model("mimo", page_size=64)  # No page is crossed.
    spec.engine.add(PROMPTS[3], 24)
    for _ in range(3):
        spec.engine.step()
    tape = device.tapes[str(StepKey.decode(2, 3))]
    before = tape.host_writes
    spec.program.shared["state.token_ids"][1, 1] = 5
    spec.engine.step()
    assert tape.host_writes == before + 1


def test_a_moved_buffer_is_refused(null_model: Callable[..., Any]) -> None:
    """A device graph would go on using the old address."""
    spec, _ = null_model("mimo")
    step = spec.program.steps[StepKey.decode(2, 3)]
    state = step.graph.module.get_submodule("state")
    there = state.token_ids
    state.token_ids = there.clone()
    with pytest.raises(CaptureError, match=r"state.token_ids moved"):
        step.replay()
    state.token_ids = there


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda c: c[0].item(), "host"),
        (lambda c: c.nonzero(), "depends on data"),
        (lambda c: c[c > 1], "depends on data"),
        (lambda c: c.masked_select(c > 1), "depends on data"),
        (lambda c: c.add_(torch.tensor(3)), "Python value"),
        (lambda c: bool(c.sum() > 3), "host"),
    ],
    ids=["item", "nonzero", "mask", "masked_select", "tensor", "bool"],
)
def test_what_a_graph_would_freeze_is_refused(function: Any, message: str) -> None:
    graph = counting_graph(function)
    with pytest.raises(CaptureError, match=message):
        NullDevice().capture(graph.module, graph)


def test_a_python_scalar_is_frozen_as_on_a_device() -> None:
    """The tape repeats numbers as captured: a step index kept in Python would never advance."""
    steps = iter(range(100))
    graph = counting_graph(lambda counter: counter.fill_(next(steps)))
    replay = NullDevice().capture(graph.module, graph)
    replay()
    replay()
    assert graph.module.counter.tolist() == [0, 0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("is_held", [True, False])
def test_memory_that_nothing_holds_is_used_again(is_held: bool) -> None:
    """A step that reads a temporary after it let go of it reads what took its place."""
    kept = []

    def step(counter: torch.Tensor) -> None:
        early = counter + 1
        memory = (ctypes.c_byte * early.nbytes).from_address(early.data_ptr())
        unowned = torch.frombuffer(memory, dtype=early.dtype)
        if is_held:
            kept.append(early)
        del early
        later = counter * 100
        counter.copy_(unowned + later * 0)

    graph = counting_graph(step)
    replay = NullDevice().capture(graph.module, graph)
    graph.module.counter.copy_(torch.arange(4))  # type: ignore[operator]
    replay()
    wanted = [1, 2, 3, 4] if is_held else [0, 100, 200, 300]
    assert graph.module.counter.tolist() == wanted  # type: ignore[union-attr]


def test_no_step_changes_its_stream() -> None:
    """Only capture makes a stream, and what ends kernels that wait for a dead rank. Were there
    another, a graph could use memory that the first one still reads; a tape has one order of
    operators, and would not show it."""
    named = re.compile(r"\b(Stream|ExternalStream|record_stream|wait_stream|cuda\.stream)\(")
    root = Path(mtpc.__file__).parent
    found = {
        p.relative_to(root).as_posix() for p in root.rglob("*.py") if named.search(p.read_text())
    }
    assert found == {"backends/graphs.py", "backends/peer_memory.py"}


def _drawn(tape: Tape) -> list[str]:
    """Operators that take numbers from a generator."""
    seeded = torch.Tag.nondeterministic_seeded
    return [str(entry.op) for entry in tape.entries if seeded in entry.op.tags]


def test_noise_is_of_seed_and_position_at_each_replay() -> None:
    """What stands for a generator that is registered with the graph: the same graph gives other
    noise at other positions, the same at the same, and takes nothing from any generator."""
    rows = make_rows({"temperature": 1.0}, 1000, False, 0)
    logits, ids, slots = torch.zeros(4, 1000), torch.zeros(4).long(), torch.tensor([1, 2, 3, 4])
    seeds, noise = rows.ints[slots, INTS.index("seed")], torch.zeros(4, 1000).double()
    tokens = torch.zeros(4).long()

    def step(positions: torch.Tensor) -> None:
        noise.copy_(gumbel(seeds, positions, 1000))
        tokens.copy_(torch.ops.mtpc.sample(logits, ids, positions, slots, *rows.tuple()))

    graph, device = counting_graph(step), NullDevice()
    replay = device.capture(graph.module, graph)
    before = torch.get_rng_state()

    def replay_at(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        graph.module.counter.copy_(torch.arange(first, first + 4))  # type: ignore[operator]
        replay()
        return noise.clone(), tokens.clone()

    here, chosen = replay_at(10)
    there, others = replay_at(50)
    assert (here != there).all(1).all()
    assert (chosen != others).all(), "the logits are equal, so noise alone chooses"
    again, repeated = replay_at(10)
    assert torch.equal(again, here)
    assert torch.equal(repeated, chosen)
    assert torch.equal(torch.get_rng_state(), before)
    (tape,) = device.tapes.values()
    assert tape.replays == 3
    assert not _drawn(tape)


def test_no_step_that_samples_takes_from_a_generator(null_model: Callable[..., Any]) -> None:
    """Whole steps: what is recorded, and what runs."""
    spec, device = null_model("mimo", sampling=True)
    before = torch.get_rng_state()
    params = SamplingParams(temperature=1.0, seed=3)
    texts = [spec.generate(PROMPTS[3:4], 12, sampling=params) for _ in range(2)]
    assert texts[0] == texts[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert any("mtpc.sample.default" in op_names(tape) for tape in device.tapes.values())
    assert not [name for tape in device.tapes.values() for name in _drawn(tape)]


def test_a_generator_on_the_tape_would_be_seen() -> None:
    """What the two tests above rest on."""
    graph, device = counting_graph(lambda counter: counter.copy_(torch.rand(4))), NullDevice()
    device.capture(graph.module, graph)
    (tape,) = device.tapes.values()
    assert _drawn(tape) == ["aten.rand.default"]
