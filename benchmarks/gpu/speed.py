"""Measures the time per iteration of one shape, by K, batch and engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.gpu.engines import Fused, TimedProgram
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build, weigh
from benchmarks.gpu.profile import fill_floor, gap_rows, kernel_rows, launches_in
from benchmarks.gpu.rows import APART, COMPILED, ENGINES, FUSED, LATE, Row
from benchmarks.harness.decoders import Decoded, MtpcDecoder, Prompts
from mtpc import CompileOptions
from mtpc.backends.base import Run
from mtpc.models.load import LoadedModel
from mtpc.plan import make_plan

PAGE = 16
PROMPTS_AT_ONCE = 16
"""That share a prefill step, at most."""
OPTIONAL_PASSES = ("canonicalise", "select-head-rows", "hoist-shared")
"""Left out for the count of kernels before passes; absorb-latent stays, for the kernel it feeds."""
NORM_PASSES = ("fuse-elementwise", "fuse-draft-entry")
"""Inductor fuses most of the same."""
PROFILES: dict[str, dict[str, Any]] = {
    f"{FUSED}, default passes": {},
    f"{FUSED}, without passes": {"disabled_passes": OPTIONAL_PASSES},
    f"{FUSED}, norms fused by Inductor": {"disabled_passes": NORM_PASSES},
    f"{FUSED}, batch-invariant": {"batch_invariant": True},
}
"""A row of a profile -> its options."""
NOTES = {
    APART: "our pieces (the target's pass, each draft's), each a graph of its own, as servers do",
    COMPILED: "torch.compile of the same modules piecewise: our pieces, each compiled by Inductor "
    "as the whole step is, launched one by one without a graph",
}


@dataclass(frozen=True)
class Plan:
    """What is decoded.

    Attributes:
        prompt_tokens: of each request.
        new_tokens: of each request, after a warm-up of as many.
        max_len: of the compiled steps.
        layers: decoder layers, instead of the shape's.
        workdir: for checkpoints of the gates.
    """

    prompt_tokens: int
    new_tokens: int
    max_len: int
    layers: int | None
    workdir: Path


@dataclass(frozen=True)
class Case:
    """A number of drafts at a batch size."""

    spec_tokens: int
    batch: int


@dataclass(frozen=True)
class Bench:
    """One shape on a machine: every row of it.

    Attributes:
        machine: where.
        shape: of models.SHAPES.
        plan: what is decoded.
        loaded: the model.
    """

    machine: Machine
    shape: str
    plan: Plan
    loaded: LoadedModel

    @classmethod
    def open(cls, machine: Machine, shape: str, plan: Plan) -> Bench:
        """With weights made on the machine."""
        return cls(machine, shape, plan, build(shape, machine.device, plan.layers))

    def measure(self, case: Case, rows: Sequence[Row]) -> Iterator[Row]:
        """Fill rows of one case."""
        fused = Fused(self.machine, self.loaded, make_plan(self._options(case)))
        yield from (self._measure(fused, row) for row in rows)
        del fused
        _free(self.machine)

    def profile(self, case: Case, rows: Sequence[Row]) -> Iterator[Row]:
        """Fill rows of PROFILES; of the first also its kernels, and the largest gaps to the time
        of its bytes."""
        for row in rows:
            plan = make_plan(replace(self._options(case), **PROFILES[row.engine]))
            backend = self.machine.backend(plan.batch_invariant)
            fused = Fused(self.machine, self.loaded, plan, backend)
            decoder, timed = self._warm(fused, row)
            self._fill(row, self._decode(decoder, row), timed)
            fill_floor(row)
            profiler = self.machine.profiler()
            timed.restart(profiler)
            self._decode(decoder, row)
            row.kernels, row.build_s = launches_in(profiler), fused.build_s
            yield row
            if row.engine == next(iter(PROFILES)):
                kernels = list(kernel_rows(row, profiler))
                # All matrices, but for experts' where those have kernels of their own.
                yield from gap_rows(
                    row, kernels, weigh(self.loaded).step_bytes(row.spec_tokens, batch=0)
                )
                yield from kernels
            del fused, decoder, timed
            _free(self.machine)

    def _options(self, case: Case) -> CompileOptions:
        # One by one, the first prompts of many would be done before the last one began.
        together = min(case.batch, PROMPTS_AT_ONCE)
        return CompileOptions(
            spec_tokens=case.spec_tokens, batch_buckets=(case.batch,),
            max_len=self.plan.max_len,
            page_size=PAGE, prefill_chunk=together * self.plan.prompt_tokens,
            prefill_rows=together, prefix_caching=False, sampling=False,
        )  # fmt: skip

    def _prompts(self, batch: int) -> Prompts:
        generator = torch.Generator().manual_seed(batch)
        shape = (batch, self.plan.prompt_tokens)
        return torch.randint(0, self.loaded.vocab_size, shape, generator=generator).tolist()

    def _measure(self, fused: Fused, row: Row) -> Row:
        row.build_s = fused.build_s
        replay = None
        if row.engine in (FUSED, LATE):
            row.launches = 1
            captured = fused.backend.captured.values()
            row.graph_mib = sum(step.pool_bytes for step in captured) / (1 << 20)
            row.note = "; ".join(fused.backend.notes)
        else:
            pieces, is_apart = fused.pieces, row.engine == APART
            row.launches, row.note = pieces.num_parts, NOTES[row.engine]
            replay = pieces.capture(self.machine.graphs()) if is_apart else pieces.run
        decoder, timed = self._warm(fused, row, replay)
        return self._fill(row, self._decode(decoder, row), timed)

    def _warm(
        self, fused: Fused, row: Row, replay: Run | None = None
    ) -> tuple[MtpcDecoder, TimedProgram]:
        """An engine that has decoded once, with a new clock; the copy's bandwidth just before."""
        row.copy_gb_s = self.machine.copy_bandwidth() / 1e9
        decoder, timed = fused.decoder(replay, late=row.engine == LATE)
        self._decode(decoder, row)
        timed.restart(self.machine.clock())
        return decoder, timed

    def _decode(self, decoder: MtpcDecoder, row: Row) -> Decoded:
        return decoder.decode(self._prompts(row.batch), self.plan.new_tokens)

    def _fill(self, row: Row, decoded: Decoded, timed: TimedProgram) -> Row:
        row.ms_step, row.tokens_per_s = decoded.ms_per_step, decoded.tokens_per_s
        row.acceptance = decoded.acceptance_rate
        row.ms_device = 1e3 * mean(timed.clock.read())
        row.launch_us = 1e6 * mean(timed.launch_s)
        row.host_us = 1e3 * (row.ms_step - row.ms_device)
        row.step_bytes = weigh(self.loaded).step_bytes(row.spec_tokens, batch=row.batch)
        row.of_bandwidth = row.step_bytes / (1e-3 * row.ms_device) / (1e9 * (row.copy_gb_s or 1))
        return row


@dataclass(frozen=True)
class Task:
    """Rows that are measured together.

    Attributes:
        shape: of models.SHAPES.
        case: drafts and requests.
        kind: "speed" or "profile"; tasks of one kind take about as long.
    """

    shape: str
    case: Case
    kind: str = "speed"

    def rows(self, machine: Machine) -> list[Row]:
        """What is to be filled."""
        engines = PROFILES if self.kind == "profile" else ENGINES
        k, batch = self.case.spec_tokens, self.case.batch
        return [Row(self.kind, machine.name, self.shape, e, k, batch) for e in engines]


def tasks(shapes: Sequence[str], spec_tokens: Sequence[int], batches: Sequence[int]) -> list[Task]:
    """The tasks, most informative first: for each shape K = 0 and 3 with one request; then all
    others, small batches first."""
    most = telling_case(spec_tokens, batches)
    telling = (Case(min(spec_tokens), most.batch), most)
    rest = [Case(k, b) for b in sorted(batches) for k in spec_tokens]
    both = ((shape, case) for cases in (telling, rest) for shape in shapes for case in cases)
    return [Task(*place) for place in dict.fromkeys(both)]


def profiles(shapes: Sequence[str], case: Case) -> list[Task]:
    """One of each shape."""
    return [Task(shape, case, "profile") for shape in shapes]


def telling_case(spec_tokens: Sequence[int], batches: Sequence[int]) -> Case:
    """The case of one request with K = 3, or the largest K."""
    return Case(3 if 3 in spec_tokens else max(spec_tokens), min(batches))


def _free(machine: Machine) -> None:
    gc.collect()
    if not machine.is_dry:
        torch.cuda.empty_cache()
