"""The theorem, compiled-equals-eager and sampling by seeds on a device, on tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mtpc.models
from benchmarks.gpu_machine import Machine
from benchmarks.gpu_rows import Row
from mtpc.api import SpecModel
from mtpc.backends.cuda import CudaBackend
from mtpc.config import CompileOptions
from mtpc.models.load import load, place
from mtpc.program.compiler import StepCompiler
from tests import tiny

FAMILIES = tuple(family.name for family in mtpc.models.FAMILIES)
PROMPTS = [[7] * 9, [2, 2, 2, 3, 4, 5], [41, 8], [17, 90, 33, 12, 5]]
NEW_TOKENS = 16
COMPARED = "compiled, K=3 = reference, K=0 and 3"
TELLING = ("glm4_moe", "deepseek_v3", "qwen3_next")
"""Between them: paged and latent attention, experts, state. The first two are measured, too."""
SAMPLED = "a seed: compiled = itself = reference"
SAMPLED_FAMILY = "mimo"


def check_family(row: Row, machine: Machine, directory: Path) -> Row:
    """Compile one family's tiny model as users do, and compare with the reference ops.

    Ragged prompts, more of them than the bucket holds, so that requests join and leave; models
    trained for seconds, so that drafts are accepted in part.
    """
    make_checkpoint(row.shape, directory)
    ours, backend = _compile(directory, machine.backend(), 3)
    drafting, _ = _compile(directory, machine.reference(), 3)
    plain, _ = _compile(directory, machine.reference(), 0)
    text, wanted = (model.generate(PROMPTS, NEW_TOKENS) for model in (ours, plain))
    late = SpecModel(ours.served, replace(ours.options, async_scheduling=True), ours.program)
    same_drafts = drafting.generate(PROMPTS, NEW_TOKENS) == wanted
    same_drafts &= ours.stats.accepted == drafting.stats.accepted
    row.acceptance = ours.stats.acceptance_rate
    faults = [] if text == wanted else ["another text"]
    faults += [] if late.generate(PROMPTS, NEW_TOKENS) == wanted else ["another text, read late"]
    faults += [] if same_drafts else ["other drafts accepted"]
    faults += [] if 0 < row.acceptance < 1 else ["acceptance was not partial: it shows little"]
    row.passed, row.note = not faults, "; ".join([*faults, *backend.notes])
    return row


def check_sampling(row: Row, machine: Machine, directory: Path) -> Row:
    """Sampled text: again by the same seed, by the reference, and other by another seed."""
    make_checkpoint(row.shape, directory)
    asked: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.95}
    ours, backend = _compile(directory, machine.backend(), 3, sampling=True)
    eager, _ = _compile(directory, machine.reference(), 3, sampling=True)
    text, again = (ours.generate(PROMPTS, NEW_TOKENS, seed=7, **asked) for _ in range(2))
    faults = [] if text == again else ["another text by the same seed"]
    if eager.generate(PROMPTS, NEW_TOKENS, seed=7, **asked) != text:
        faults.append("another text than the reference's")
    if ours.generate(PROMPTS, NEW_TOKENS, seed=8, **asked) == text:
        faults.append("the same text by another seed: nothing was sampled")
    row.passed, row.note = not faults, "; ".join([*faults, *backend.notes])
    return row


def make_checkpoint(name: str, directory: Path) -> None:
    """A family's tiny model, trained for seconds, unless it is there."""
    if not directory.is_dir():
        tiny.make_trained_checkpoint(name, directory)


def _compile(
    directory: Path, backend: CudaBackend, spec_tokens: int, **more: Any
) -> tuple[SpecModel, CudaBackend]:
    options = CompileOptions(
        spec_tokens=spec_tokens, batch_buckets=(2,), max_len=64, page_size=16, prefill_chunk=8,
        **more,
    )  # fmt: skip
    loaded = place(load(directory, "float32", spec_tokens > 0), backend.device)
    program = StepCompiler(loaded, options, backend).compile()
    return SpecModel(loaded.served(), options, program), backend
