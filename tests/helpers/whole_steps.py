"""Steps of whole models after the passes, and that a pass changes no token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mtpc
from helpers.families import TINY
from mtpc.backends.base import Backend
from mtpc.backends.cpu import CpuBackend
from mtpc.capture.graph import StepGraph
from mtpc.config import CompileOptions
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler


def rewritten(
    directory: Path, dtype: str = "bfloat16", backend: Backend | None = None, **options: Any
) -> StepGraph:
    """A decode step's graph after the passes, the cpu backend's unless told otherwise."""
    chosen = CompileOptions(spec_tokens=1, batch_buckets=(2,), max_len=64, **options)
    compiler = StepCompiler(load(str(directory), dtype, True), chosen, backend or CpuBackend())
    return compiler.rewritten(compiler.keys[0])


def named(graph: StepGraph) -> Counter[str]:
    names = [str(node.target).split(".")[-2] for node in graph.graph.nodes
             if str(node.target).startswith("mtpc_cpu.")]  # fmt: skip
    return Counter(names)


def check_no_token_changes(directory: Path, *enabled: tuple[str, ...]) -> None:
    """With these passes and with those, on the reference operators: the same tokens and
    acceptance."""
    prompts = [[5, 9, 17, 33], [3], list(range(40, 51))]
    seen = []
    for passes in enabled:
        model = mtpc.compile(
            directory, backend="eager", dtype="bfloat16", spec_tokens=2, batch_buckets=(5,),
            enabled_passes=passes, **TINY,
        )  # fmt: skip
        seen.append((model.generate(prompts, max_new_tokens=12), tuple(model.stats.accepted)))
    assert seen[0] == seen[1]
    assert sum(seen[0][1]) > 0
