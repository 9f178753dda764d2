"""Timing on a device, with arguments like those of a step in the middle of a text: one launch, or a
whole operator beside a library's.

Weights are the model's own. All else is made anew, so that nothing of a request is read or written.
Tests check the arguments in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor, fx

from mtpc.backends.base import Run
from mtpc.backends.cuda import compile_call
from mtpc.backends.expand import Function
from mtpc.backends.graphs import Graphs
from mtpc.backends.triton_kernels.configs import Config, configured
from mtpc.backends.triton_kernels.launch import Launch, run
from mtpc.backends.triton_kernels.loading import CodeObjects
from mtpc.backends.triton_kernels.plans import operator_of
from mtpc.backends.triton_kernels.tuning import Call
from mtpc.errors import BackendError, CaptureError
from mtpc.ops.signatures import given_to

_POOLS = ("k_cache", "v_cache", "latent_cache", "index_cache", "cache")
_SCALES = {"k_scale": "k_cache", "v_scale": "v_cache", "scales": "cache"}
"""Scales of codes -> the pool that these are in."""
_LARGEST_CODE = 100
_POOL_BYTES = 256 << 20
"""Bytes of a page pool that is made for timing: more than any device's caches hold."""
_WARM_UP_MS, _REPEAT_MS = 10, 40
_COMMITTED = 16
"""Positions that recurrent state has seen before a step's rows."""


@dataclass(frozen=True)
class DeviceTimer:
    """A `tuning.Timer` on a device, and by `whole` a `tuning.WholeTimer`.

    Attributes:
        device: the device that launches run on.
        graphs: capture there.
        objects: code that was built elsewhere; None: everything is compiled here.
    """

    device: torch.device
    graphs: Graphs
    objects: CodeObjects | None = None

    @torch.no_grad()
    def __call__(self, call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        """Median seconds, the device's caches emptied before each run.

        Raises:
            BackendError: the device lacks the memory for arguments, or does not run the default.
        """
        with _measuring():
            args, kwargs = trial_arguments(call, self.device)
            launches, _ = operator_of(call.node).plan(*args, **kwargs)
            run(launches)  # Each reads what others before it wrote.
            return [self._seconds(configured(launches[index], config)) for config in configs]

    def _seconds(self, launch: Launch) -> float:
        if self.objects is not None:
            self.objects.seed([launch])  # Triton compiles what is missing.
        return _seconds(partial(run, [launch]))

    @torch.no_grad()
    def whole(self, call: Call, configs: str, function: Function) -> list[float]:
        """Median seconds, the device's caches emptied before each run. Both are timed as a step
        runs them: in a captured graph, the function compiled by Inductor.

        Raises:
            BackendError: the device lacks the memory for arguments, or does not run our kernels.
        """
        with _measuring():
            args, kwargs = trial_arguments(call, self.device)
            launches, _ = operator_of(call.node).plan(*args, **kwargs, configs=configs)
            if self.objects is not None:
                self.objects.seed(launches)
            ours = _seconds(self._replay(partial(run, launches)))
            try:
                work = compile_call(function, args, kwargs)
                return [ours, _seconds(self._replay(work))]
            except _REFUSED as error:
                if _is_no_memory(error):
                    raise
                return [ours, math.inf]

    def _replay(self, work: Run) -> Run:
        self.graphs.warm_up(work)
        return self.graphs.record(work)


_REFUSED = (RuntimeError, triton.TritonError, CaptureError, torch._dynamo.exc.TorchDynamoException)
"""What compilers, launchers and captures raise: too many registers, threads or bytes of shared
memory, a call that a graph cannot hold."""


def _is_no_memory(error: BaseException | None) -> bool:
    """Whether an error, or the one that it comes from, is a lack of memory, which says nothing of
    what was timed."""
    return isinstance(error, torch.OutOfMemoryError) or (
        error is not None and _is_no_memory(error.__cause__)
    )


@contextmanager
def _measuring() -> Iterator[None]:
    """Turns what the device raises into BackendError."""
    try:
        yield
    except _REFUSED as error:
        if _is_no_memory(error):
            raise BackendError(f"no memory for arguments to time it on: {error}") from error
        raise BackendError(f"the device does not run it: {error}") from error


def _seconds(work: Run) -> float:
    try:
        work()
    except _REFUSED as error:
        if _is_no_memory(error):
            raise  # It does not depend on the configuration.
        return math.inf
    milliseconds = triton.testing.do_bench(
        work, warmup=_WARM_UP_MS, rep=_REPEAT_MS, return_mode="median"
    )
    return float(milliseconds) / 1000


def trial_arguments(call: Call, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call: every request is half way through the context that its table holds."""
    given = given_to(call.node)
    fakes = {n: a.meta["val"] for n, a in given.items() if isinstance(a, fx.Node)}
    made = dict[str, Any]()
    for name, value in given.items():
        if name not in fakes:
            made[name] = value
            continue
        weight = call.weight(value)
        made[name] = _make(name, fakes, device) if weight is None else weight.to(device)
    args = tuple(made.pop(name) for name in [*made][: len(call.node.args)])
    return args, made


def _make(name: str, fakes: dict[str, Tensor], device: torch.device) -> Tensor:
    fake = fakes[name]
    shape, stride = [*fake.shape], fake.stride()
    pool = _SCALES.get(name, name)
    if pool in _POOLS:
        shape[0] = _pages(fakes, fakes[pool])
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if name in _SCALES:
        values = torch.rand(size, device=device).add_(0.5).div_(_LARGEST_CODE)
        return values.as_strided(shape, stride)
    if name in _POOLS and fake.dtype.itemsize == 1:
        codes = torch.randint(-_LARGEST_CODE, _LARGEST_CODE, (size,), device=device)
        return codes.to(fake.dtype).as_strided(shape, stride)
    if fake.dtype.is_floating_point:
        values = torch.rand(size, device=device).sub_(0.5).to(fake.dtype)
        return values.as_strided(shape, stride)
    filled = torch.full((size,), _NUMBERS.get(name, 0), dtype=fake.dtype, device=device)
    tensor = filled.as_strided(shape, stride)
    if name in _INDICES:
        tensor.copy_(_INDICES[name](fakes, fake, device))
    return tensor


def _pages(fakes: dict[str, Tensor], pool: Tensor) -> int:
    """Number of pages: the null page, and those of the block tables, up to `_POOL_BYTES`."""
    wanted = fakes["block_table"].numel() if "block_table" in fakes else pool.shape[0]
    most = _POOL_BYTES // max(1, pool[0].numel() * pool.dtype.itemsize)
    return 1 + max(1, min(wanted, most))


def _block_table(fakes: dict[str, Tensor], fake: Tensor, device: torch.device) -> Tensor:
    pool = next(fakes[name] for name in _POOLS if name in fakes)
    return 1 + _numbers(fake, _pages(fakes, pool) - 1, device)


def _seq_lens(fakes: dict[str, Tensor], fake: Tensor, device: torch.device) -> Tensor:
    """Half of the positions that a table holds, but at least the step's own rows."""
    bounds = _starts(fakes, fakes["query_start_loc"], device)
    rows = bounds[1:] - bounds[:-1]
    if "block_table" not in fakes:
        return rows + _COMMITTED
    pool = next(fakes[name] for name in _POOLS if name in fakes)
    held = fakes["block_table"].shape[1] * pool.shape[1]
    return torch.maximum(rows, torch.full_like(rows, held // 2))


def _starts(fakes: dict[str, Tensor], fake: Tensor, device: torch.device) -> Tensor:
    """The step's rows, divided evenly among the requests."""
    reqs, rows = fake.shape[0] - 1, fakes.get("ids", next(iter(fakes.values())))
    tokens = rows.shape[0]
    return torch.arange(reqs + 1, device=device) * tokens // reqs


def _numbers(fake: Tensor, count: int, device: torch.device) -> Tensor:
    """0 to count - 1, repeated."""
    return (torch.arange(fake.numel(), device=device) % count).view(fake.shape)


def _entries(fakes: dict[str, Tensor]) -> int:
    """Entries that a row of `slot_attention` sees: as many as it may choose, or half of all."""
    given = fakes.get("chosen_entries")
    return fakes["entries"].shape[1] // 2 if given is None else given.shape[1]


def _band(fake: Tensor, width: int, device: torch.device) -> Tensor:
    """Each row sees itself and `width` rows before it."""
    return torch.ones(fake.shape, device=device).tril().triu(-width)


_NUMBERS = {
    "sees_ring": 1, "certain_lens": 1, "active": 1, "finite": 1, "remaining_tokens": 9,
    "standing": _COMMITTED,
}  # fmt: skip
"""Arguments that are filled with one number other than 0."""
_Fill = Callable[[dict[str, Tensor], Tensor, torch.device], Tensor]
_INDICES: dict[str, _Fill] = {
    "block_table": _block_table,
    "seq_lens": _seq_lens,
    "query_start_loc": _starts,
    "expert_ids": lambda fakes, fake, device: _numbers(fake, len(fakes["down"]), device),
    "sees_fresh": lambda fakes, fake, device: _band(fake, fakes["ring"].shape[1] // 2, device),
    "entry_counts": lambda fakes, fake, device: torch.full(
        fake.shape, _entries(fakes), device=device
    ),
    "chosen_entries": lambda fakes, fake, device: _numbers(fake, _entries(fakes), device),
    "state_slots": lambda fakes, fake, device: (
        1 + _numbers(fake, len(fakes["standing"]) - 1, device)
    ),
}
"""Arguments of several numbers. All others are zeros: slot 0 of `slot_mapping` may be written."""
