"""The theorem and compiled-equals-eager on a device, for every family, on tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mtpc.models
from benchmarks.gpu_machine import Machine
from benchmarks.gpu_rows import Row
from mtpc.api import SpecModel
from mtpc.backends.cuda import CudaBackend
from mtpc.compiler import StepCompiler
from mtpc.config import CompileOptions
from mtpc.models.load import load, place
from tests import tiny

FAMILIES = tuple(family.name for family in mtpc.models.FAMILIES)
PROMPTS = [[7] * 9, [2, 2, 2, 3, 4, 5], [41, 8], [17, 90, 33, 12, 5]]
NEW_TOKENS = 16
COMPARED = "compiled, K=3 = reference, K=0 and 3"


def check_family(name: str, machine: Machine, directory: Path) -> Row:
    """Compile one family's tiny model as users do, and compare with the reference ops.

    Ragged prompts, more of them than the bucket holds, so that requests join and leave; models
    trained for seconds, so that drafts are accepted in part.
    """
    if not directory.is_dir():
        tiny.make_trained_checkpoint(name, directory)
    ours, backend = _compile(directory, machine.backend(), 3)
    drafting, _ = _compile(directory, machine.reference(), 3)
    plain, _ = _compile(directory, machine.reference(), 0)
    text, wanted = (model.generate(PROMPTS, NEW_TOKENS) for model in (ours, plain))
    late = SpecModel(ours.served, replace(ours.options, async_scheduling=True), ours.program)
    same_drafts = drafting.generate(PROMPTS, NEW_TOKENS) == wanted
    same_drafts &= ours.stats.accepted == drafting.stats.accepted
    row = Row("gate", machine.name, name, COMPARED, 3, 2)
    row.acceptance = ours.stats.acceptance_rate
    faults = [] if text == wanted else ["another text"]
    faults += [] if late.generate(PROMPTS, NEW_TOKENS) == wanted else ["another text, read late"]
    faults += [] if same_drafts else ["other drafts accepted"]
    faults += [] if 0 < row.acceptance < 1 else ["acceptance was not partial: it shows little"]
    row.passed, row.note = not faults, "; ".join([*faults, *backend.notes])
    return row


def _compile(
    directory: Path, backend: CudaBackend, spec_tokens: int
) -> tuple[SpecModel, CudaBackend]:
    options = CompileOptions(
        spec_tokens=spec_tokens, batch_buckets=(2,), max_len=64, page_size=16, prefill_chunk=8,
    )  # fmt: skip
    loaded = place(load(directory, "float32", spec_tokens > 0), backend.device)
    program = StepCompiler(loaded, options, backend).compile()
    return SpecModel(loaded.served(), options, program), backend
