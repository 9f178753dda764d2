"""What a replay leaves for the host: copied out behind it, so that the next may be launched first.

On a device with streams a launch returns before the work is done. Copies of the results follow the
replay on its stream, and events say when each began and ended; the host waits for the copies alone,
while what it launched meanwhile runs. On a cpu a launch is the work, and all of this is immediate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mtpc.layout import RESULT_BUFFERS, StepKey
from mtpc.program.program import Program


class Moment(Protocol):
    """A point of a stream of work, the host's or a device's."""

    def wait(self) -> None:
        """Return when the work before it is done."""
        ...

    def seconds_until(self, later: Moment) -> float:
        """From here to a later moment of the same stream; both are over."""
        ...


class HostMoment:
    """Work that is done when its call returns: the moment is now."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        """It is over."""

    def seconds_until(self, later: Moment) -> float:
        """By the host's clock."""
        assert isinstance(later, HostMoment)
        return later.time_s - self.time_s


class DeviceMoment:
    """An event on the current stream of a GPU, which need not be the thread's current one; has
    never run on one."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """The host sleeps until the stream gets there."""
        self.event.synchronize()

    def seconds_until(self, later: Moment) -> float:
        """By the device's clock."""
        assert isinstance(later, DeviceMoment)
        return float(self.event.elapsed_time(later.event)) / 1e3


class Readout:
    """Runs a step; holds its results until they are asked for.

    Args:
        program: of the step.
        key: which step.

    Attributes:
        begin: of the replay.
        end: of the replay.
    """

    def __init__(self, program: Program, key: StepKey):
        device = program.steps[key].buffers[RESULT_BUFFERS[0]].device
        moment = partial(DeviceMoment, device) if device.type == "cuda" else HostMoment
        self.begin: Moment = moment()
        buffers = program.run(key)
        self.end: Moment = moment()
        # Copied to pinned memory on a device: `non_blocking` into pageable memory would block.
        self._results = {
            name: buffers[name].to("cpu", non_blocking=True, copy=True)
            for name in RESULT_BUFFERS
            if name in buffers
        }
        self._copied: Moment = moment()

    def read(self) -> Mapping[str, Tensor]:
        """The results by buffer, on the CPU; waits for them."""
        self._copied.wait()
        return self._results

    @property
    def replay_s(self) -> float:
        """Seconds of the replay, once it was read."""
        return self.begin.seconds_until(self.end)
