"""The engines of benchmarks.gpu: the fused step, and its separate pieces."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from benchmarks.gpu.machine import Clock, Machine
from benchmarks.gpu.pieces import Compiled, PiecewiseStep
from benchmarks.harness.decoders import MtpcDecoder
from mtpc import SpecModel
from mtpc.backends.base import Run
from mtpc.backends.cuda import CudaBackend, compile_flat
from mtpc.layout import StepKey, largest_first
from mtpc.models.load import LoadedModel
from mtpc.plan import Plan
from mtpc.program.compiler import StepCompiler
from mtpc.program.program import CapturedStep, Program, StepBinder


class TimedProgram:
    """A program that times its decode replays: on the device, and until the launch returns.

    Args:
        program: the program that does the work; other attributes are its own.
        clock: the device's clock.

    Attributes:
        launch_s: seconds of host time per decode replay.
    """

    def __init__(self, program: Program, clock: Clock):
        self._program, self.clock, self.launch_s = program, clock, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def restart(self, clock: Clock) -> None:
        """Drop all times, and continue with a new clock."""
        self.clock = clock
        self.launch_s.clear()

    def run(self, key: StepKey) -> Any:
        """One iteration."""
        if key.phase != "decode":
            return self._program.run(key)
        result: list[Any] = []
        self.clock.run(lambda: result.append(self._launch(key)))
        return result[0]

    def _launch(self, key: StepKey) -> Any:
        start = time.perf_counter()
        result = self._program.run(key)
        self.launch_s.append(time.perf_counter() - start)
        return result


class Fused:
    """One model at one K and one batch size, and the ways to launch its decode step.

    Prompts run operator by operator: their step is not measured, and would take as long to compile.

    Args:
        machine: the machine.
        loaded: the model, on the machine's device.
        plan: with one batch bucket.
        backend: None is the machine's backend.
    """

    def __init__(
        self,
        machine: Machine,
        loaded: LoadedModel,
        plan: Plan,
        backend: CudaBackend | None = None,
    ):
        self.machine, self.backend = machine, backend or machine.backend()
        start = time.perf_counter()
        compiler = StepCompiler(loaded, plan, self.backend)
        shared = compiler.shared
        prompts = StepCompiler(
            loaded, plan, machine.direct(), new_buffer=lambda layout, name, device: shared[name]
        )
        by_phase = {"decode": compiler, "prefill": prompts}
        binders = {phase: StepBinder(c.built({}), shared) for phase, c in by_phase.items()}
        steps = {
            key: binders[key.phase].bind(by_phase[key.phase].obtain(key))
            for key in largest_first(compiler.keys)
        }
        self.program = Program(steps, shared)
        self.build_s = time.perf_counter() - start
        self.options, self._served = compiler.plan, loaded.served()
        self.key = next(key for key in self.program.steps if key.phase == "decode")

    @property
    def step(self) -> CapturedStep:
        """The decode step."""
        return self.program.steps[self.key]

    def decoder(
        self, replay: Run | None = None, late: bool = False
    ) -> tuple[MtpcDecoder, TimedProgram]:
        """Make an engine.

        Args:
            replay: replaces the replay of the decode step.
            late: launch a step before the previous one is read.
        """
        steps = dict(self.program.steps)
        if replay is not None:
            steps[self.key] = replace(self.step, replay=replay)
        program = Program(steps, self.program.shared)
        timed = TimedProgram(program, self.machine.clock())
        options = replace(self.options, async_scheduling=late)
        spec = SpecModel(self._served, options, timed)  # type: ignore[arg-type]
        return MtpcDecoder(spec, self.build_s), timed

    @cached_property
    def pieces(self) -> PiecewiseStep:
        """The decode step in parts, each compiled as the whole step is."""
        graph = self.step.graph
        assert graph is not None
        compile_part = _interpret if self.machine.is_dry else compile_flat
        return PiecewiseStep(graph, compile_part)


def _interpret(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Compiled:
    return module
