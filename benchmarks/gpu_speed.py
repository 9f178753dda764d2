"""Time per iteration of one shape, by K and batch, engine by engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.decoders import Decoded, Decoder, Prompts, TransformersDecoder
from benchmarks.gpu_engines import VARIANTS, Fused, TimedProgram, decode_on, with_mtp
from benchmarks.gpu_machine import Machine
from benchmarks.gpu_models import SHAPES, build, weigh
from benchmarks.gpu_rows import APART, COMPILED, FUSED, PLAIN, USE_MTP, Row
from mtpc.backends.base import Run
from mtpc.config import CompileOptions
from mtpc.models.load import LoadedModel

PAGE = 16
PROMPTS_AT_ONCE = 16
"""That share a prefill step, at most."""


@dataclass(frozen=True)
class Plan:
    """What is decoded.

    Attributes:
        prompt_tokens: of each request.
        new_tokens: of each request, after a warm-up of as many.
        layers: decoder layers, instead of the shape's.
        workdir: for the checkpoint that `use_mtp` reads.
    """

    prompt_tokens: int
    new_tokens: int
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
        shape: of gpu_models.SHAPES.
        plan: what is decoded.
        loaded: the model as mtpc takes it.
        model: the same tensors as transformers' model.
    """

    machine: Machine
    shape: str
    plan: Plan
    loaded: LoadedModel
    model: Any

    @classmethod
    def open(cls, machine: Machine, shape: str, plan: Plan) -> Bench:
        """With weights made on the machine."""
        loaded, model = build(shape, machine.device, plan.layers)
        return cls(machine, shape, plan, loaded, model)

    def rows(self, case: Case, wants: Callable[[Row], bool]) -> Iterator[Row]:
        """One case by every engine that has not been measured; the fused step first."""
        ours = [self._blank(engine, case) for engine in (FUSED, APART, COMPILED)]
        wanted = [row for row in ours if wants(row)]
        if wanted:
            fused = Fused(self.machine, self.loaded, self._options(case))
            for row in wanted:
                yield self._measure(fused, row)
            del fused
        for engine in (PLAIN, USE_MTP):
            row = self._blank(engine, case)
            if self._transformers_does(engine, case) and wants(row):
                yield self._time_transformers(row)
        _free(self.machine)

    def profile(self, case: Case) -> Iterator[Row]:
        """Kernels of an iteration and its time, by which passes ran."""
        for name, disabled, enabled in VARIANTS:
            passes = {"disabled_passes": disabled, "enabled_passes": enabled}
            options = replace(self._options(case), **passes)
            fused = Fused(self.machine, self.loaded, options)
            row, kernels = self._blank(f"{FUSED}, {name}", case, "profile"), fused.kernels()
            row.kernels, row.build_s = kernels.total(), fused.build_s
            row.note = "; ".join(f"{count} {kernel}" for kernel, count in kernels.most_common(12))
            yield self._time(fused, row)
            del fused
            _free(self.machine)

    def _blank(self, engine: str, case: Case, part: str = "speed") -> Row:
        return Row(part, self.machine.name, self.shape, engine, case.spec_tokens, case.batch)

    def _options(self, case: Case) -> CompileOptions:
        length = self.plan.prompt_tokens + 2 * self.plan.new_tokens + 32
        # One by one, the first prompts of many would be done before the last one began.
        together = min(case.batch, PROMPTS_AT_ONCE)
        return CompileOptions(
            spec_tokens=case.spec_tokens, batch_buckets=(case.batch,), max_len=length,
            page_size=PAGE, prefill_chunk=together * self.plan.prompt_tokens,
            prefill_rows=together, prefix_caching=False,
        )  # fmt: skip

    def _prompts(self, batch: int) -> Prompts:
        generator = torch.Generator().manual_seed(batch)
        shape = (batch, self.plan.prompt_tokens)
        return torch.randint(0, self.loaded.vocab_size, shape, generator=generator).tolist()

    def _measure(self, fused: Fused, row: Row) -> Row:
        row.build_s = fused.build_s
        replay = None
        if row.engine != FUSED:
            pieces = fused.pieces()
            row.launches = pieces.num_parts
            is_apart = row.engine == APART
            replay = pieces.capture(self.machine.graphs()) if is_apart else pieces.run
        else:
            row.launches, row.kernels = 1, fused.kernels().total()
            captured = fused.backend.captured.values()
            row.graph_mib = sum(step.pool_bytes for step in captured) / (1 << 20)
            row.note = "; ".join(fused.backend.notes)
        return self._time(fused, row, replay)

    def _time(self, fused: Fused, row: Row, replay: Run | None = None) -> Row:
        row.copy_gb_s = self.machine.copy_bandwidth() / 1e9
        decoder, timed = fused.decoder(replay)
        prompts = self._prompts(row.batch)
        decoder.decode(prompts, self.plan.new_tokens)
        timed.restart(self.machine.clock())
        return self._fill(row, decoder.decode(prompts, self.plan.new_tokens), timed)

    def _fill(self, row: Row, decoded: Decoded, timed: TimedProgram) -> Row:
        row.ms_step, row.tokens_per_s = decoded.ms_per_step, decoded.tokens_per_s
        row.acceptance = decoded.acceptance_rate
        row.ms_device = 1e3 * mean(timed.clock.read())
        row.launch_us = 1e6 * mean(timed.launch_s)
        row.host_us = 1e3 * (row.ms_step - row.ms_device)
        rows = row.batch * (row.spec_tokens + 1)
        row.step_bytes = weigh(self.loaded, rows).step(row.spec_tokens)
        row.of_bandwidth = row.step_bytes / (1e-3 * row.ms_device) / (1e9 * (row.copy_gb_s or 1))
        return row

    def _transformers_does(self, engine: str, case: Case) -> bool:
        """It decodes any batch plainly; it drafts one token, for one request of GLM-4 MoE."""
        if engine == PLAIN:
            return case.spec_tokens == 0
        return case == Case(1, 1) and SHAPES[self.shape].family == "glm4_moe"

    def _time_transformers(self, row: Row) -> Row:
        decoder: Decoder = TransformersDecoder(self.model, 0)
        if row.engine == USE_MTP:
            decoder = with_mtp(self.loaded, self.plan.workdir / self.shape, self.machine.device)
        prompts = self._prompts(row.batch)
        for _ in range(2):  # The first warms up.
            found = decode_on(decoder, self.machine.device, prompts, self.plan.new_tokens)
        row.ms_step, row.tokens_per_s = found.ms_per_step, found.tokens_per_s
        row.acceptance = found.acceptance_rate
        return row


def cases(spec_tokens: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """Small batches first, and of each the most drafts beside none before those between."""
    ends = sorted({min(spec_tokens), max(spec_tokens)})
    order = [*ends, *(k for k in spec_tokens if k not in ends)]
    return [Case(k, batch) for batch in batches for k in order]


def _free(machine: Machine) -> None:
    gc.collect()
    if not machine.is_dry:
        torch.cuda.empty_cache()
