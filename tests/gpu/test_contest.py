"""A library's experts beside our kernels: which is bound, by times that the tests give.

Needs Triton's interpreter: `tests/run_triton.sh`. What the library computes is in
test_torch_experts.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import triton
from helpers.expert_steps import experts_step
from helpers.tuned_calls import DEVICE

from benchmarks.gpu.machine import DirectGraphs
from mtpc.backends import torch_experts
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CrossBackend
from mtpc.backends.expand import Function
from mtpc.backends.measured import KIND, ROW, Table
from mtpc.backends.triton_kernels import load_kernels, trial, triton_bindings
from mtpc.backends.triton_kernels.configs import Config
from mtpc.backends.triton_kernels.plans import plan
from mtpc.backends.triton_kernels.trial import DeviceTimer, trial_arguments
from mtpc.backends.triton_kernels.tuning import Call, Tuner
from mtpc.errors import BackendError, CaptureError
from mtpc.store.entries import EntryStore
from mtpc.store.lookup import KEY, peek

pytestmark = pytest.mark.triton

load_kernels()
LIBRARY, OURS = "aten._grouped_mm.default", "mtpc_triton.experts.default"


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    tmp_path.chmod(0o755)
    return EntryStore(tmp_path / "store")


class Times:
    """Timers: the last configuration of each launch is the fastest, a whole call takes these times.

    Attributes:
        whole: seconds of our kernels and of the library, or an error.
        asked: configurations of our kernels, for each measurement of whole calls.
    """

    def __init__(self, *whole: float, error: Exception | None = None):
        self.whole, self.error, self.asked = [*whole], error, list[str]()

    def launches(self, call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        return [float(len(configs) - place) for place in range(len(configs))]

    def __call__(self, call: Call, configs: str, function: Function) -> list[float]:
        assert function is torch_experts.experts
        self.asked.append(configs)
        if self.error is not None:
            raise self.error
        return self.whole


def _bound(times: Times, store: EntryStore | None, **changes: Any) -> tuple[list[str], list[str]]:
    """The operators that a call becomes, and notes."""
    tuner = Tuner(Table(store, DEVICE), times.launches)
    bindings = torch_experts.torch_bindings((9, 0), partial(tuner.prefers, times))
    _, graph = experts_step(**changes)
    notes: list[str] = []
    BindKernels((*bindings, *triton_bindings(tuner)), notes.append).apply(graph)
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"], notes


def _row(store: EntryStore) -> tuple[str, dict[str, str]]:
    """The row of the whole call."""
    (found,) = [(name, dict(fields)) for name, fields in peek(store) if "operator" in fields]
    return found


@pytest.mark.parametrize(
    ("seconds", "wins"),
    [((2.0, 1.0), True), ((1.0, 2.0), False), ((1.0, 0.99), False), ((1.0, math.inf), False)],
)
def test_the_faster_by_a_margin_is_bound(seconds: tuple[float, float], wins: bool) -> None:
    """Our kernels in their fastest configurations; that the library is slower is no note."""
    times = Times(*seconds)
    called, notes = _bound(times, None)
    assert called.count(LIBRARY) == 2 * wins
    assert called.count(OURS) == (not wins)
    assert not notes
    (configs,) = times.asked
    assert {word.partition(":")[0] for word in configs.split(";")} == {
        "expert_gate_up_kernel", "expert_down_kernel",
    }  # fmt: skip


def test_a_choice_is_measured_once_and_kept(store: EntryStore) -> None:
    first = Times(2.0, 1.0)
    assert LIBRARY in _bound(first, store)[0]
    name, fields = _row(store)
    assert (fields["kind"], fields["device"]) == (KIND, DEVICE)
    assert fields["operator"] == "experts"
    assert fields["torch"] == torch.__version__
    row = json.loads((store.directory(name) / ROW).read_text())
    assert row == {"choice": "library", "seconds": {"triton": 2.0, "library": 1.0}}
    second = Times(1.0, 2.0)
    assert LIBRARY in _bound(second, store)[0]
    assert second.asked == []
    assert OURS in _bound(second, store, rows=40)[0], "other sizes are another row"
    assert len(second.asked) == 1


def test_what_is_slow_with_other_configurations_is_measured_anew(store: EntryStore) -> None:
    """The key has our kernels' configurations."""
    _bound(Times(2.0, 1.0), store)
    other = Times(1.0, 2.0)
    other.launches = lambda call, index, configs: [1.0] * len(configs)  # type: ignore[method-assign]
    table = Table(store, DEVICE)
    for name, fields in [*peek(store)]:
        if "operator" not in fields:
            _write(store, name, {"choice": fields["configurations"].split("; ")[0]})
    node, graph = experts_step()
    tuner = Tuner(table, other.launches)
    assert tuner.prefers(other, torch_experts.experts, node, graph) == (False, ())
    assert other.asked == [""]


def _write(store: EntryStore, name: str, row: Any) -> None:
    key = (store.directory(name) / KEY).read_bytes()

    def fill(directory: Path) -> None:
        (directory / ROW).write_text(json.dumps(row))
        (directory / KEY).write_bytes(key)

    store.write(name, fill)


def test_a_damaged_row_is_noted_and_measured_again(store: EntryStore) -> None:
    _bound(Times(2.0, 1.0), store)
    _write(store, _row(store)[0], {"choice": "cublas"})
    times = Times(1.0, 2.0)
    called, (note,) = _bound(times, store)
    assert OURS in called
    assert note.startswith("the autotune row of mtpc::experts is refused, and measured again")
    assert "chooses 'cublas'; expected one of triton, library" in note
    assert len(times.asked) == 1


def test_what_cannot_be_measured_stays_on_our_kernels(store: EntryStore) -> None:
    times = Times(error=BackendError("no memory"))
    called, notes = _bound(times, store)
    assert OURS in called
    assert notes == ["mtpc::experts could not be measured, and runs by default: no memory"]
    assert not [fields for _, fields in peek(store) if "operator" in fields]


def test_without_a_device_no_library_is_asked() -> None:
    assert {binding.library for binding in CrossBackend()._bindings} == {"triton"}


# ---- the timer -------------------------------------------------------------------------------


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Triton's stopwatch, which needs a device: the n-th work takes n seconds. And no compiler."""
    timed: list[Any] = []

    def do_bench(function: Callable[[], Any], **options: Any) -> float:
        timed.append(function())
        return 1000.0 * len(timed)

    def direct(function: Function, args: Any, kwargs: Any) -> Callable[[], Any]:
        return partial(function, *args, **kwargs)

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(trial, "compile_call", direct)
    return timed


def _timed(graphs: Any = None) -> list[float]:
    timer = DeviceTimer(torch.device("cpu"), graphs or DirectGraphs())
    return timer.whole(Call(*experts_step()), "", torch_experts.experts)


def test_both_are_timed_on_the_same_call(
    benched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def arguments(call: Call, device: torch.device) -> Any:
        given.append(trial_arguments(call, device))
        return given[0]

    monkeypatch.setattr(trial, "trial_arguments", arguments)
    assert _timed() == [1.0, 2.0]
    ((args, kwargs),) = given
    assert args[3].tolist()[:3] == [[0, 1], [2, 3], [4, 5]], "choices are even"
    launches, wanted = plan("experts", *args, **kwargs)
    trial.run(launches)
    torch.testing.assert_close(benched[1], wanted, rtol=1.6e-2, atol=1.6e-2)


class _Refusing(DirectGraphs):
    """Captures nothing from the n-th graph on."""

    def __init__(self, place: int, error: Exception):
        self.place, self.error = place, error

    def record(self, run: Any) -> Any:
        self.place -= 1
        if self.place < 0:
            raise self.error
        return run


def _of_memory() -> CaptureError:
    error = CaptureError("the device refused to capture a step")
    error.__cause__ = torch.OutOfMemoryError("60 GiB")
    return error


@pytest.mark.usefixtures("benched")
def test_a_library_that_cannot_be_captured_is_left_out() -> None:
    """A lack of memory says nothing of it, and our kernels must run."""
    refusal = CaptureError("not permitted when stream is capturing")
    assert _timed(_Refusing(1, refusal)) == [1.0, math.inf]
    with pytest.raises(BackendError, match="the device does not run it: not permitted"):
        _timed(_Refusing(0, refusal))
    for place in (0, 1):
        with pytest.raises(BackendError, match="no memory for arguments to time it on"):
            _timed(_Refusing(place, _of_memory()))


@pytest.mark.slow
def test_inductor_compiles_what_is_timed(
    benched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtpc.backends.cuda import compile_call

    monkeypatch.setattr(trial, "compile_call", compile_call)
    assert _timed() == [1.0, 2.0]
    assert benched[1][0].shape == (32, 64)
