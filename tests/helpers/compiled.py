"""Models compiled for the cpu backend, and ways to run their steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mtpc.api import SpecModel
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.layout import Part, StepKey
from mtpc.program.compiler import StepCompiler
from mtpc.program.program import CapturedStep, StepBinder
from mtpc.store.entries import Entry


@contextmanager
def run_on(threads: int) -> Iterator[None]:
    """Run the block with a number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def give_kernels(root: Path) -> None:
    """Copy the user's compiled kernels to a new cache: compiling them takes half a minute."""
    kernels = build_kernels()
    assert isinstance(kernels, Entry)
    target = root / "entries" / kernels.digest
    if not target.exists():
        (root / "entries").mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copytree(kernels.directory, target)


@dataclass(frozen=True)
class CpuBuilt:
    """A model compiled for the cpu backend in this process, with the objects involved."""

    spec: SpecModel
    backend: CpuBackend
    compiler: StepCompiler


def capture_split(compiler: StepCompiler, key: StepKey) -> tuple[CapturedStep, CapturedStep]:
    """One step as two captured graphs, `verify` and `propose`."""
    own: dict[str, torch.Tensor] = {}
    return captured(compiler, key, "verify", own), captured(compiler, key, "propose", own)


def captured(
    compiler: StepCompiler,
    key: StepKey,
    part: Part = "step",
    own: dict[str, torch.Tensor] | None = None,
) -> CapturedStep:
    """One step over the compiler's shared buffers, and such of its own; see `StepBinder.bind`."""
    step = compiler.obtain(key, part)
    return StepBinder(compiler.built({(key, part): step}), compiler.shared).bind(step, own)


def in_turn(verify: CapturedStep, propose: CapturedStep) -> CapturedStep:
    """The two halves of a split step as one captured step."""

    def replay() -> None:
        verify.replay()
        propose.replay()

    return CapturedStep(verify.key, verify.layout, verify.buffers, replay, 0.0)
