"""The autotune table without a device: what may be chosen, where it is kept, when it is measured.

Needs Triton's interpreter: `tests/run_triton.sh`. Timers are given; none of them measures anything.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from helpers.batches import close, make_batch, make_mixture
from helpers.deltas import DELTA, MAMBA, NARROW, Layer, make_rows
from helpers.grouped import experts_call, random_weight
from helpers.index_batches import choose
from helpers.places import HELPERS
from helpers.shipped_launches import kernel_choices
from helpers.slot_batches import make_call
from helpers.triton_steps import OPTIONS, PROMPTS, compile_on
from helpers.tuned_calls import DEVICE, names_of, paged_call

from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.measured import KIND, ROW, Table, fastest
from mtpc.backends.null import NullGraphs
from mtpc.backends.triton_kernels import launch as launching
from mtpc.backends.triton_kernels import load_kernels, recurrence, triton_bindings
from mtpc.backends.triton_kernels.configs import (
    Config,
    all_configured,
    apply_configs,
    configs_of,
)
from mtpc.backends.triton_kernels.ops import OPERATORS
from mtpc.backends.triton_kernels.plans import node_launches
from mtpc.backends.triton_kernels.tuning import Call, Tuner, launch_fields
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of
from mtpc.errors import BackendError, CacheWriteError
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.store.entries import EntryStore
from mtpc.store.key import digest
from mtpc.store.lookup import KEY, peek

pytestmark = pytest.mark.triton

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_triton, torch.ops.mtpc


class Clock:
    """A timer that finds the configuration at one place the fastest, and remembers what it timed.

    Attributes:
        place: the one that wins; the last one where there are fewer.
        timed: kernel and configuration, in order.
        is_recording: what is timed meanwhile is a mistake.
    """

    def __init__(self, place: int = -1):
        self.place, self.timed, self.is_recording = place, list[tuple[str, str]](), False

    def __call__(self, call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        assert not self.is_recording, "nothing is measured while a graph is captured"
        with fake_mode_of(call.graph.graph):
            name = node_launches(call.node)[index].name
        self.timed += [(name, str(config)) for config in configs]
        best = configs[min(self.place, len(configs) - 1)]
        return [1e-6 if config == best else 2e-6 for config in configs]


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    tmp_path.chmod(0o755)
    return EntryStore(tmp_path / "store")


# ---- configurations --------------------------------------------------------------------------


class _Configured:
    """The operators, each launched in the n-th of its configurations."""

    def __init__(self, place: int):
        self.place, self.used = place, set[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            launches = OPERATORS[name].plan(*args, **kwargs)[0]
            words = []
            for launch in launches:
                configs = configs_of(launch, "cuda")
                if len(configs) > self.place:
                    words.append(f"{launch.name}:{configs[self.place]}")
                    self.used.add(words[-1])
            return getattr(OURS, name)(*args, **kwargs, configs=";".join(words))

        return call


@pytest.mark.parametrize("place", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_every_configuration_computes_the_same(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of other sizes: against the reference, on sizes that no tile divides."""
    ops = _Configured(place)
    lengths = [(37, 4), (1, 1), (0, 3), (130, 3)]
    batch = make_batch(lengths, dtype=torch.float16, dims=(48, 40))
    close(batch.paged(ops), batch.paged(REFERENCE))
    latent = make_batch(lengths, dtype=torch.float16, heads=(70, 1), dims=(80, 80))
    close(latent.latent(ops, 48), latent.latent(REFERENCE, 48))
    mixture = make_mixture(5, dtype=torch.float16)
    close(mixture.run(ops), mixture.run(REFERENCE), scale=2)
    close(mixture.run_without_gates(ops), mixture.run_without_gates(REFERENCE), scale=2)
    monkeypatch.setattr(recurrence, "_LEAST_ROWS", 18)
    for rule, count in ((DELTA, 5), (MAMBA, 5), (NARROW, 16), (MAMBA, 16)):  # Two in chunks.
        ours, theirs = Layer(ops, torch.float32, rule), Layer(REFERENCE, torch.float32, rule)
        for layer in (ours, theirs):
            layer.run([make_rows(count), make_rows(2, seed=1)], [2, 1], [0, 0], [count, 2])
        for one, other in zip(ours.state, theirs.state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    for kind, group in (("int4", 32), ("int8", 68)):
        grouped = random_weight(kind, (70, 2 * group if kind == "int4" else group), group)
        linear = (torch.randn(5, grouped.weight.codes.shape[1]), *grouped.operands)
        close(ops.grouped_linear(*linear), REFERENCE.grouped_linear(*linear))
    indexed = make_batch([(300, 4), (1, 1), (0, 3), (130, 3)], heads=(64, 1), dims=(12, 1))
    assert torch.equal(choose(ops, indexed, 40), choose(REFERENCE, indexed, 40))
    slotted = make_call("chosen", torch.float16)
    close(slotted.run(ops), slotted.run(REFERENCE))
    experts = experts_call(5, ("int8", 32, ""), torch.float32)
    found, expected = ops.grouped_experts(*experts), REFERENCE.grouped_experts(*experts)
    # An activation on the edge between two integers may be rounded to either.
    assert float((found - expected).norm() / expected.norm()) <= 4e-3
    kernels = {word.partition(":")[0] for word in ops.used}
    choices = kernel_choices()
    counts = {name: sum(not c.amd for c in choices[name].changes) for name in choices}
    assert kernels == {name for name in counts if counts[name] >= place}


def test_configurations_change_tiles_and_threads_only() -> None:
    launches = node_launches(paged_call().node)
    for launch, is_default in all_configured(launches, "cuda"):
        original = next(x for x in launches if x.name == launch.name)
        assert (launch == original) == is_default
        for name, value in launch.arguments.items():
            assert value is original.arguments[name], "scratch memory is the default's"
        assert launch.constants.get("SPLITS") == original.constants.get("SPLITS")


def test_interpreted_kernels_are_launched_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wrap_triton` of torch 2.11 refuses them."""

    def refuse(kernel: Any) -> Any:
        raise RuntimeError("wrap_triton only works on functions annotated with triton.jit")

    monkeypatch.setattr(launching, "wrap_triton", refuse)
    batch = make_batch([(37, 3), (5, 1)], dtype=torch.float16)
    close(batch.paged(OURS), batch.paged(REFERENCE))


def test_unknown_configurations_are_refused() -> None:
    launches = node_launches(paged_call().node)
    assert apply_configs(launches, "") is launches
    for wrong in ("nonsense", "sinkhorn_kernel:threads=64", "paged_attention_kernel:threads=7"):
        with pytest.raises(BackendError, match="paged_attention_kernel"):
            apply_configs(launches, wrong)


def test_the_default_gives_way_to_a_clear_winner_only() -> None:
    assert fastest({"a": 1.0, "b": 0.995, "c": 2.0}) == "a"
    assert fastest({"a": 1.0, "b": 0.9, "c": 0.8}) == "c"
    assert fastest({"a": math.inf, "b": math.inf}) == "a"
    assert fastest({"a": math.inf, "b": 1.0}) == "b"


# ---- the table -------------------------------------------------------------------------------


def test_a_row_is_measured_once_and_kept(store: EntryStore) -> None:
    call, clock = paged_call(), Clock(place=1)
    names = names_of(call)
    first = Tuner(Table(store, DEVICE), clock)
    chosen = (f"paged_attention_kernel:{names[1]}", ())
    assert first(call.node, call.graph) == first(call.node, call.graph) == chosen
    assert [name for _, name in clock.timed] == names, "each once"
    second = Clock(place=2)
    assert Tuner(Table(store, DEVICE), second)(call.node, call.graph) == chosen
    more_pages = paged_call(pages=400)
    assert Tuner(Table(store, DEVICE), second)(more_pages.node, more_pages.graph) == chosen
    assert second.timed == []
    ((name, fields),) = peek(store)
    assert (fields["kind"], fields["device"]) == (KIND, DEVICE)
    seconds = {n: (1e-6 if n == names[1] else 2e-6) for n in names}
    row = json.loads((store.directory(name) / ROW).read_text())
    assert row == {"choice": names[1], "seconds": seconds}


@pytest.mark.parametrize("changes", [{"rows": 2}, {"dtype": torch.float32}, {"dim": 32}])
def test_another_shape_dtype_or_device_is_another_row(
    changes: dict[str, Any], store: EntryStore
) -> None:
    call, other, clock = paged_call(), paged_call(**changes), Clock()
    for device, tuned in ((DEVICE, call), (DEVICE, other), ("another device", call)):
        before = len(clock.timed)
        Tuner(Table(store, device), clock)(tuned.node, tuned.graph)
        assert len(clock.timed) == before + len(names_of(tuned))
    assert len(list(peek(store))) == 3


def test_the_key_names_the_kernels_sources_and_this_triton(store: EntryStore) -> None:
    call, clock = paged_call(), Clock()
    tuner = Tuner(Table(store, DEVICE), clock)
    tuner(call.node, call.graph)
    ((_, fields),) = peek(store)
    assert fields["triton.build"]
    assert fields["configurations"].split("; ") == names_of(call)
    tuner = Tuner(Table(None, DEVICE), clock)
    clock.timed.clear()
    tuner(call.node, call.graph)
    tuner.sources = "others"
    tuner(call.node, call.graph)
    assert len(clock.timed) == 2 * len(names_of(call))


def _damage(store: EntryStore, row: bytes, sealed: bool) -> None:
    ((name, _),) = peek(store)
    key = (store.directory(name) / KEY).read_bytes()
    if not sealed:
        (store.directory(name) / ROW).write_bytes(row)
        return

    def fill(directory: Path) -> None:
        (directory / ROW).write_bytes(row)
        (directory / KEY).write_bytes(key)

    store.write(name, fill)


@pytest.mark.parametrize(
    ("row", "sealed", "message"),
    [
        (b"{}", False, "SHA-256"),
        (b"{}", True, "expected a JSON object with choice and seconds"),
        (b"\xff", True, "is no row"),
        (b"[1]", True, "is no row"),
        (b'{"choice": "threads=7"}', True, "chooses 'threads=7'; expected one of threads="),
    ],
)
def test_a_corrupted_row_is_refused_and_measured_again(
    row: bytes, sealed: bool, message: str, store: EntryStore
) -> None:
    call, names = paged_call(), names_of(paged_call())
    Tuner(Table(store, DEVICE), Clock(place=1))(call.node, call.graph)
    _damage(store, row, sealed)
    clock = Clock(place=2)
    tuner = Tuner(Table(store, DEVICE), clock)
    configs, (note,) = tuner(call.node, call.graph)
    assert configs == f"paged_attention_kernel:{names[2]}"
    assert len(clock.timed) == len(names)
    assert note.startswith("the autotune row of paged_attention_kernel is refused, and measured")
    assert message in note
    assert tuner(call.node, call.graph) == (configs, (note,)), "every step that takes it says so"
    assert Tuner(Table(store, DEVICE), Clock())(call.node, call.graph) == (configs, ()), (
        "it is mended"
    )


def test_a_cache_that_others_could_have_written_is_not_used(store: EntryStore) -> None:
    call, clock = paged_call(), Clock(place=1)
    store.prepare()
    store.root.chmod(0o777)
    configs, (note,) = Tuner(Table(store, DEVICE), clock)(call.node, call.graph)
    assert configs == f"paged_attention_kernel:{names_of(call)[1]}"
    assert "is not kept" in note
    assert "go-w" in note
    assert list(store.root.glob("entries/*")) == []


def test_what_cannot_be_written_is_measured_once_and_used(
    store: EntryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, clock = paged_call(), Clock(place=1)

    def full(digest: str, fill: Any) -> Any:
        raise CacheWriteError("no space left on device")

    monkeypatch.setattr(store, "write", full)
    configs, notes = Tuner(Table(store, DEVICE), clock)(call.node, call.graph)
    assert configs == f"paged_attention_kernel:{names_of(call)[1]}"
    assert notes == (
        "the autotune row of paged_attention_kernel is not kept: no space left on device",
    )
    assert len(clock.timed) == len(names_of(call))


def test_what_cannot_be_measured_runs_by_default(store: EntryStore) -> None:
    call = paged_call()

    def timer(call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        raise BackendError("no memory")

    assert Tuner(Table(store, DEVICE), timer)(call.node, call.graph) == (
        "",
        ("paged_attention_kernel could not be measured, and runs by default: no memory",),
    )
    assert list(peek(store)) == []


def test_a_frozen_cache_is_not_measured_for(store: EntryStore) -> None:
    """What it has is used; what it lacks runs by default, and is noted."""
    call, clock, frozen = paged_call(), Clock(place=1), EntryStore(store.root, frozen=True)
    _, (note,) = Tuner(Table(frozen, DEVICE), clock)(call.node, call.graph)
    assert note.endswith("runs by default: the graph cache is frozen, and has no row of it")
    assert clock.timed == []
    assert list(peek(store)) == []
    chosen = Tuner(Table(store, DEVICE), clock)(call.node, call.graph)
    assert Tuner(Table(frozen, DEVICE), Clock())(call.node, call.graph) == chosen != ("", ())


def test_two_processes_choose_alike_and_one_measures(store: EntryStore) -> None:
    """Each would choose another: who comes second waits, and takes what the first found."""
    script = str(HELPERS / "tuned_calls.py")
    children = [
        subprocess.Popen(
            [sys.executable, script, str(store.root), str(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for place in (1, 2)
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    answers = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert sorted(answer["timed"] for answer in answers) == [0, len(names_of(paged_call()))]
    assert answers[0]["configs"] == answers[1]["configs"] != ""
    assert [answer["notes"] for answer in answers] == [[], []]


# ---- in a step -------------------------------------------------------------------------------


class _Watched:
    """Graphs of the null device, which tell a clock when they run or record."""

    def __init__(self, clock: Clock):
        self._clock, self.graphs = clock, NullGraphs()

    def warm_up(self, run: Any) -> None:
        self._during(self.graphs.warm_up, run)

    def record(self, run: Any) -> Any:
        return self._during(self.graphs.record, run)

    def pool_bytes(self) -> int:
        return self.graphs.pool_bytes()

    def free_bytes(self) -> int | None:
        return None

    def _during(self, function: Callable[[Any], Any], run: Any) -> Any:
        self._clock.is_recording = True
        try:
            return function(run)
        finally:
            self._clock.is_recording = False


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_tuned_steps_emit_the_same_tokens(
    family: str, checkpoint: Callable[..., Path], store: EntryStore
) -> None:
    """All is measured while steps are bound; their graphs hold the choice, and replay it."""
    clock = Clock()
    watched, tuner = _Watched(clock), Tuner(Table(store, DEVICE), clock)

    def lower(graph: StepGraph) -> Any:
        return EagerBackend().lower(graph)

    backend = CudaBackend(watched, lower, triton_bindings(tuner), device="cpu")
    ours = compile_on(checkpoint(family), backend, OPTIONS)
    measured = len(clock.timed)
    clock.is_recording = True
    theirs = compile_on(checkpoint(family), CudaBackend(NullGraphs(), lower, (), "cpu"), OPTIONS)
    assert ours.generate(PROMPTS, 6) == theirs.generate(PROMPTS, 6)
    assert ours.stats.accepted == theirs.stats.accepted
    assert len(clock.timed) == measured > 0, "serving measures nothing"
    assert not backend.notes
    held = [
        value
        for tape in watched.graphs.tapes
        for entry in tape.entries
        for value in (*entry.args, *entry.kwargs.values())
        if isinstance(value, str) and value
    ]
    kernels = {part.partition(":")[0] for word in held for part in word.split(";")}
    assert kernels == {name for name, _ in clock.timed}
    again = Clock()
    backend = CudaBackend(
        NullGraphs(), lower, triton_bindings(Tuner(Table(store, DEVICE), again)), "cpu"
    )
    StepCompiler(load(checkpoint(family), "float32", True), OPTIONS, backend).compile()
    assert again.timed == [], "a second start measures nothing"


def test_a_binding_without_tuner_takes_the_default() -> None:
    call, notes = paged_call(), list[str]()
    assert BindKernels(triton_bindings(), notes.append).apply(call.graph) == 1
    assert "configs" not in call.node.kwargs
    assert digest(launch_fields(node_launches(call.node)[0]))
    assert not notes
