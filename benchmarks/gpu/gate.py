"""Compares compiled steps in bfloat16 with the reference operators on a device, step by step.

The models are tiny models of every family, trained for seconds so that drafts are accepted in part,
and two layers of each measured shape with random weights. `lockstep` says what is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import mtpc.models
from benchmarks.gpu.lockstep import Lockstep, Probed
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build
from benchmarks.gpu.rows import Row
from mtpc import CompileOptions, SpecModel
from mtpc.backends.cuda import CudaBackend
from mtpc.models.load import load
from mtpc.models.place import place
from mtpc.models.save import save_checkpoint
from mtpc.plan import make_plan
from mtpc.program.compiler import StepCompiler

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from helpers import tiny, trained

FAMILIES = tuple(family.name for family in mtpc.models.FAMILIES)
PROMPTS = [[7] * 9, [2, 2, 2, 3, 4, 5], [41, 8], [17, 90, 33, 12, 5]]
NEW_TOKENS = 16
COMPARED = "bfloat16, beside the reference at each step"
TELLING = ("glm4_moe", "deepseek_v3", "qwen3_next")
"""Between them: paged and latent attention, experts, state. The first two are measured, too."""
SAMPLED = "a seed: itself again, beside the reference at each step"
SAMPLED_FAMILY = "mimo"
INVARIANT = "batch_invariant: K=3 in company beside K=0 alone, bit for bit"
LAYERS = 2
"""Of a measured shape in its gate: each kernel at its real size, in a minute."""


def check_family(row: Row, machine: Machine, directory: Path) -> Row:
    """Compile one family's tiny model as users do, and compare each of its steps.

    There are more prompts than the bucket holds, of different lengths, so that requests join and
    leave. Steps are read at once, and read late.
    """
    make_checkpoint(row.shape, directory)
    ours, steps, backend = compile_beside(directory, machine, 3)
    ours.generate(PROMPTS, NEW_TOKENS)
    row.acceptance = ours.stats.acceptance_rate
    late = SpecModel(ours.served, replace(ours.options, async_scheduling=True), ours.program)
    late.generate(PROMPTS, NEW_TOKENS)
    faults = steps.found.faults(steps.experts)
    faults += [] if 0 < row.acceptance < 1 else ["acceptance was not partial: it shows little"]
    return _fill(row, faults, steps, backend)


def check_shape(row: Row, machine: Machine, directory: Path) -> Row:
    """Compile the first layers of a measured shape, random weights, and compare each step; of one
    request, whose few rows have kernels of their own. With K = 1 their launches begin early."""
    if not directory.is_dir():
        loaded = build(row.shape, machine.device, LAYERS, accepting=False)
        save_checkpoint(loaded.target, loaded.mtp_layers, directory, loaded.family)
        del loaded
    k = row.spec_tokens
    ours, steps, backend = compile_beside(directory, machine, k, batch_buckets=(1,))
    ours.generate(PROMPTS, NEW_TOKENS)
    return _fill(row, steps.found.faults(steps.experts), steps, backend)


def check_sampling(row: Row, machine: Machine, directory: Path) -> Row:
    """Sampled text: again by the same seed, other by another seed; each step's rows as of the
    reference. What is sampled of logits that are a little different is not compared: the part
    `ops` compares `sample` on equal logits."""
    make_checkpoint(row.shape, directory)
    asked: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.95}
    ours, steps, backend = compile_beside(directory, machine, 3, greedy=False, sampling=True)
    text, again = (ours.generate(PROMPTS, NEW_TOKENS, seed=7, **asked) for _ in range(2))
    faults = steps.found.faults(steps.experts)
    faults += [] if text == again else ["another text by the same seed"]
    if ours.generate(PROMPTS, NEW_TOKENS, seed=8, **asked) == text:
        faults.append("the same text by another seed: nothing was sampled")
    return _fill(row, faults, steps, backend)


def check_invariance(row: Row, machine: Machine, directory: Path) -> Row:
    """With `batch_invariant`: four requests that draft in one step, beside prompts in chunks, have
    the tokens and the log-probabilities that plain decoding has of each alone."""
    make_checkpoint(row.shape, directory)
    found = []
    for k, buckets, chunk in ((0, (1,), 16), (3, (4,), 8)):
        plan = make_plan(
            CompileOptions(
                spec_tokens=k, batch_buckets=buckets, prefill_chunk=chunk, max_len=64, sampling=True
            )
        )
        backend = machine.backend(batch_invariant=True)
        loaded = place(load(directory, "bfloat16", k > 0), backend.device)
        program = StepCompiler(loaded, plan, backend).compile()
        spec = SpecModel(loaded.served(), plan, program)
        together = [PROMPTS] if k else [[prompt] for prompt in PROMPTS]
        asked: dict[str, Any] = dict(ignore_eos=True, logprobs=1)
        texts = [text for some in together for text in spec.generate(some, NEW_TOKENS, **asked)]
        found.append([(list(text), text.logprobs) for text in texts])
    differ = [place for place, (one, other) in enumerate(zip(*found, strict=True)) if one != other]
    row.passed = None if machine.is_dry else not differ
    row.note = f"of {len(PROMPTS)} texts {len(differ)} differ: {differ}"
    return row


def _fill(row: Row, faults: list[str], steps: Lockstep, backend: CudaBackend) -> Row:
    row.passed = not faults
    row.note = "; ".join([*faults, str(steps.found), *backend.notes])
    return row


def make_checkpoint(name: str, directory: Path) -> None:
    """A family's tiny model, trained for seconds, and its drafter where it has one, in bfloat16;
    unless it is there."""
    if directory.is_dir():
        return
    trained.make_trained_checkpoint(name, directory)
    for path in directory.rglob("*.safetensors"):
        narrow = {
            key: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for key, tensor in load_file(path).items()
        }
        save_file(narrow, path, {"format": "pt"})


def compile_beside(
    directory: Path,
    machine: Machine,
    spec_tokens: int,
    greedy: bool = True,
    backend: CudaBackend | None = None,
    **more: Any,
) -> tuple[SpecModel, Lockstep, CudaBackend]:
    """A bfloat16 checkpoint's model whose steps are all compared, and what they showed.

    Args:
        directory: of the checkpoint.
        machine: has the references.
        spec_tokens: K.
        greedy: whether tokens are the largest logits.
        backend: what is tested, if not the machine's.
        **more: options.
    """
    tested = backend or machine.backend()
    compiled: Callable[..., tuple[SpecModel, Probed]] = partial(
        _compile, directory, spec_tokens=spec_tokens, **more
    )
    made = [
        compiled(Probed(tested), dtype="bfloat16"),
        compiled(Probed(machine.reference()), dtype="bfloat16"),
        compiled(Probed(machine.reference()), dtype="float32"),
    ]
    ours, theirs, truth = (model.program for model, _ in made)
    first, second, third = (probed for _, probed in made)
    steps = Lockstep(ours, theirs, truth, (first, second, third), greedy)
    spec = SpecModel(made[0][0].served, made[0][0].options, steps)  # type: ignore[arg-type]
    return spec, steps, tested


def _compile(
    directory: Path, backend: Any, *, spec_tokens: int, dtype: str, **more: Any
) -> tuple[SpecModel, Probed]:
    sizes = {"batch_buckets": (2,), "max_len": 64, "page_size": 16, "prefill_chunk": 8}
    given: dict[str, Any] = {**sizes, "sampling": False, **tiny.drafter(directory), **more}
    plan = make_plan(CompileOptions(spec_tokens=spec_tokens, **given))
    loaded = load(directory, dtype, spec_tokens > 0, draft=plan.draft)
    loaded = place(loaded, backend.device)
    for layer in loaded.mtp_layers[:1]:
        vocabulary = loaded.parts.draft_vocabulary(layer)
        backend.whole_logits = vocabulary.logits if vocabulary else backend.whole_logits
    program = StepCompiler(loaded, plan, backend).compile()
    return SpecModel(loaded.served(), plan, program), backend
