"""What configurations are timed on: the timer without a device, and arguments as a step has them.

Needs Triton's interpreter: `tests/run_triton.sh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import changed
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import triton
from helpers.triton_steps import EACH_STEP, FAMILIES, OPTIONS, SLOW
from helpers.tuned_calls import paged_call

from benchmarks.gpu.machine import DirectGraphs
from mtpc.backends.eager import EagerBackend
from mtpc.backends.triton_kernels import load_kernels, trial
from mtpc.backends.triton_kernels.configs import configs_of
from mtpc.backends.triton_kernels.launch import Launch, run
from mtpc.backends.triton_kernels.ops import OPERATORS
from mtpc.backends.triton_kernels.plans import node_launches, op_name
from mtpc.backends.triton_kernels.trial import DeviceTimer, trial_arguments
from mtpc.backends.triton_kernels.tuning import Call
from mtpc.errors import BackendError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

pytestmark = pytest.mark.triton

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_triton, torch.ops.mtpc


# ---- the timer -------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's stopwatch, which needs a device: every launch takes 5 ms."""

    def do_bench(function: Callable[[], None], **options: Any) -> float:
        function()
        return 5.0

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("message", ["PassManager::run failed", "Triton Error [CUDA]: invalid"])
def test_a_configuration_that_the_device_refuses_is_left_out(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler and its launcher raise plain errors, too."""
    call = paged_call()
    configs = configs_of(node_launches(call.node)[0], "cuda")
    refused = next(c for c in configs if c.threads != configs[0].threads)

    def refuse(launches: Sequence[Launch]) -> None:
        if any(launch.threads == refused.threads for launch in launches[:1]):
            raise RuntimeError(message)
        run(launches)

    monkeypatch.setattr(trial, "run", refuse)
    times = DeviceTimer(torch.device("cpu"), DirectGraphs())(call, 0, configs)
    assert times == [math.inf if c.threads == refused.threads else 0.005 for c in configs]
    assert 0 < times.count(math.inf) < len(times)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("PassManager::run failed"), "the device does not run it: PassManager"),
        (torch.OutOfMemoryError("60 GiB"), "no memory for arguments to time it on: 60 GiB"),
    ],
)
@pytest.mark.parametrize("good", [0, 1])
def test_what_cannot_be_timed_is_no_crash(
    error: Exception, message: str, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default that is refused is a note of the tuner's; no memory condemns no configuration."""
    call, runs = paged_call(), list[Any]()

    def refuse(launches: Sequence[Launch]) -> None:
        runs.append(launches)
        if len(runs) > good:
            raise error

    monkeypatch.setattr(trial, "run", refuse)
    timer = DeviceTimer(torch.device("cpu"), DirectGraphs())
    configs = configs_of(node_launches(call.node)[0], "cuda")
    if good and not isinstance(error, torch.OutOfMemoryError):
        assert timer(call, 0, configs) == [math.inf] * len(configs)
        return
    with pytest.raises(BackendError, match=message):
        timer(call, 0, configs)


# ---- arguments of a step ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "codes"),
    [
        *(pytest.param(name, "auto", marks=[SLOW] * (name != "deepseek_v32")) for name in FAMILIES),
        ("glm4_moe", "int8"),
        pytest.param("glm4_moe", "fp8", marks=SLOW),
    ],
)
def test_trial_arguments_are_those_of_a_step(
    family: str, codes: str, checkpoint: Callable[..., Path]
) -> None:
    """Nothing wild, nothing of a request's, weights not copied; kernel and reference agree.

    Layers repeat calls of the same sizes: kernels run once for each.
    """
    loaded = load(checkpoint(family), "float32", True)
    options = changed(OPTIONS, enabled_passes=("lower-choices",), kv_cache_dtype=codes)
    compiler = StepCompiler(loaded, options, EagerBackend())
    seen, sizes = set[str](), set[Any]()
    for key in (StepKey.decode(2, 2), compiler.keys[-1]):
        graph = compiler.rewritten(key)
        buffers = {t.untyped_storage().data_ptr() for t in graph.buffers().values()}
        for node in graph.graph.nodes:
            if not str(node.target).startswith("mtpc.") or op_name(node) not in OPERATORS:
                continue
            call, name = Call(node, graph), op_name(node)
            with torch.no_grad():
                found = [trial_arguments(call, torch.device("cpu")) for _ in range(2)]
            tensors = [a for a in found[0][0] if isinstance(a, torch.Tensor)]
            assert not any(t.untyped_storage().data_ptr() in buffers for t in tensors)
            weights = [w for w in map(call.weight, node.args) if w is not None]
            assert all(any(t is weight for t in tensors) for weight in weights)
            if (size := (name, *map(_size, found[0][0]))) not in sizes:
                _agree(name, found, node)
            sizes.add(size)
            seen.add(name)
    assert seen - EACH_STEP == FAMILIES[family]


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_pools_of_codes_have_scales_for_every_page(codes: torch.dtype) -> None:
    """However large the pools are: scales of keys and values are far smaller than these."""
    fakes = {
        "k_cache": torch.empty(9999, 16, 8, 128, dtype=codes, device="meta"),
        "v_cache": torch.empty(9999, 16, 8, 64, dtype=codes, device="meta"),
        "k_scale": torch.empty(9999, 16, 8, device="meta"),
        "v_scale": torch.empty(9999, 16, 8, device="meta"),
        "block_table": torch.empty(4, 8192, dtype=torch.int32, device="meta"),
    }
    made = {name: trial._make(name, fakes, torch.device("cpu")) for name in fakes}
    for pool, scales in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        assert made[scales].shape == made[pool].shape[:3]
        assert made[scales].min() > 0
        numbers = made[pool][:9].float() * made[scales][:9, ..., None]
        assert 0.5 < numbers.abs().max() < 2
        assert numbers.std() > 0.2
    assert made["block_table"].max() < len(made["k_cache"])


def _size(argument: Any) -> Any:
    is_tensor = isinstance(argument, torch.Tensor)
    return (argument.dtype, argument.shape, argument.stride()) if is_tensor else argument


def _agree(name: str, found: list[Any], node: Any) -> None:
    (args, kwargs), (more, _) = found
    for one, other in zip(args, more, strict=True):
        if isinstance(one, torch.Tensor) and one is not other:
            other.copy_(one)
    wanted, ours = (
        _results(getattr(ops, name)(*a, **kwargs)) for ops, a in ((REFERENCE, args), (OURS, more))
    )
    pairs = [*zip(ours, wanted, strict=True)]
    pairs += [(b, a) for a, b in zip(args, more, strict=True) if isinstance(a, torch.Tensor)]
    for mine, theirs in pairs:
        if mine.dtype == torch.float8_e4m3fn:
            mine, theirs = mine.float(), theirs.float()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert torch.isfinite(theirs).all()
    if wanted:
        assert any(one.abs().sum() > 0 for one in wanted), "there was something to compute"


def _results(out: Any) -> tuple[torch.Tensor, ...]:
    return () if out is None else (out,) if isinstance(out, torch.Tensor) else out
