"""Steps of whole models after the passes, and a check that passes change no token."""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.families import TINY
from helpers.plans import plan_of
from mtpc.api import SpecModel
from mtpc.backends.base import Backend
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.eager import EagerBackend
from mtpc.capture.graph import StepGraph
from mtpc.models.load import load
from mtpc.models.weight_recipes import stored_weights
from mtpc.plan import Plan
from mtpc.program.compiler import StepCompiler
from mtpc.weights.weights import Weights


def by_cpu_passes(directory: Path) -> StepGraph:
    """`rewritten` by default: made once, a copy each time."""
    return _by_cpu_passes(directory).clone()


@cache
def _by_cpu_passes(directory: Path) -> StepGraph:
    return rewritten(directory)


def on_references(directory: Path, *passes: str, dtype: str = "bfloat16") -> StepGraph:
    """`rewritten` by some passes on the reference operators: made once, a copy each time."""
    return _on_references(directory, passes, dtype).clone()


@cache
def _on_references(directory: Path, passes: tuple[str, ...], dtype: str) -> StepGraph:
    return rewritten(directory, dtype, EagerBackend(), enabled_passes=passes)


def rewritten(
    directory: Path, dtype: str = "bfloat16", backend: Backend | None = None, **options: Any
) -> StepGraph:
    """A greedy decode step's graph after the passes, by default those of the cpu backend."""
    sizes = {"spec_tokens": 1, "batch_buckets": (2,), "max_len": 64, "sampling": False}
    compiler = compiler_of(directory, dtype, backend or CpuBackend(), **{**sizes, **options})
    return compiler.rewritten(compiler.keys[0])


def compiler_of(directory: Path, dtype: str, backend: Backend, **options: Any) -> StepCompiler:
    """A compiler of a checkpoint; those that differ by options of passes alone share traced pieces.

    They share buffers, too.
    """
    sizes = {name: value for name, value in options.items() if name not in OF_PASSES}
    sizes["dtype"] = dtype
    first = _first_compiler(directory, type(backend), tuple(sorted(sizes.items())))
    return beside(first, plan_of(**{**options, "dtype": dtype}), backend)


def beside(first: StepCompiler, plan: Plan, backend: Backend) -> StepCompiler:
    """Another compiler over what one has traced, and over its buffers; it derives its own weights.

    Args:
        first: the one.
        plan: differs from its plan by `OF_PASSES` alone.
        backend: traces as its backend does.
    """
    first.prepare(first.keys[0])
    compiler = copy.copy(first)
    compiler.backend, compiler._kept = backend, {}
    compiler.plan = plan.of_model(first.loaded.max_positions)
    compiler._lowering = replace(first._lowering, backend=backend, plan=compiler.plan)
    loaded = first.loaded
    compiler.weights = Weights(loaded.weights(), stored_weights(loaded), loaded.owned)
    compiler.weights.defers = backend.makes_files
    return compiler


def model_of(compiler: StepCompiler) -> SpecModel:
    """The model of a compiler. Models of compilers that share buffers run one after the other."""
    return SpecModel(compiler.loaded.served(), compiler.plan, compiler.compile())


OF_PASSES = ("enabled_passes", "disabled_passes", "verify_passes", "draft_vocab", "quantize")
"""Options that change nothing before the first pass."""


@cache
def _first_compiler(
    directory: Path, backend: Callable[[], Backend], sizes: tuple[tuple[str, Any], ...]
) -> StepCompiler:
    plan = plan_of(**dict(sizes))
    loaded = load(str(directory), plan.dtype, plan.spec_tokens > 0)
    return StepCompiler(loaded, plan, backend())


def named(graph: StepGraph) -> Counter[str]:
    names = [str(node.target).split(".")[-2] for node in graph.graph.nodes
             if str(node.target).startswith("mtpc_cpu.")]  # fmt: skip
    return Counter(names)


def check_no_token_changes(directory: Path, *enabled: tuple[str, ...]) -> None:
    """Check that two sets of passes give the same tokens and acceptance by reference operators."""
    prompts = [[5, 9, 17, 33], [3], list(range(40, 51))]
    sizes: dict[str, Any] = {**TINY, "spec_tokens": 2, "batch_buckets": (5,)}
    seen = []
    for passes in enabled:
        compiler = compiler_of(
            directory, "bfloat16", EagerBackend(), enabled_passes=passes, **sizes
        )
        model = model_of(compiler)
        seen.append((model.generate(prompts, max_new_tokens=12), tuple(model.stats.accepted)))
    assert seen[0] == seen[1]
    assert sum(seen[0][1]) > 0


def values_after(graph: StepGraph, run: Callable[[], Any] | None = None) -> dict[str, Tensor]:
    """Run a step once, its graph or `run`, on buffers filled by their names; returns them all."""
    buffers = graph.buffers()
    for name, tensor in buffers.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
        elif name in ("state.token_ids", "batch.prompt_ids"):
            tensor.copy_(torch.randint(2, 90, tensor.shape, generator=generator))
        else:
            tensor.fill_(NUMBERS.get(name, 0))
    table = buffers["state.block_table"]
    table.copy_(torch.arange(table.numel()).view(table.shape) % 16 + 1)
    slots = buffers["batch.state_indices"]
    slots.copy_(torch.arange(1, 1 + len(slots)))
    with torch.inference_mode():
        (run or graph.module)()
    return {name: tensor.clone() for name, tensor in graph.buffers().items()}


NUMBERS = {
    "state.stop_ids": -1,
    "state.remaining_tokens": 9,
    "state.committed_lens": 5,
    "batch.num_input": 4,
    "batch.next_prompt_id": -1,
}
"""The values of integer buffers; 0 for others."""


def different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of buffers of both whose values differ by more than 1e-9."""

    def same(name: str) -> bool:
        a, b = one[name].double(), other[name].double()
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-9)

    return sorted(name for name in one.keys() & other.keys() if not same(name))
