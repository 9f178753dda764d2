"""A program that lowers steps as the cuda backend does, on the CPU, and keeps them in a cache.

    python lower_kept.py CACHE STEP [STEP...]

STEP is a name of `SMALL`, or the directory of a checkpoint, whose decode step of one request is
taken. Inductor's own cache is where TORCHINDUCTOR_CACHE_DIR says. If MTPC_TEST_SOURCES is set, it
is the digest of mtpc's sources. Prints JSON: what Inductor and AOTAutograd took from their caches
or not, the backend's notes, and what each step computed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from helpers.plans import plan_of
from helpers.small_graphs import small_graph
from mtpc.backends import cuda, kept_steps
from mtpc.backends.cuda import CudaBackend, lower_by_inductor
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.store.entries import EntryStore

MACHINE = {"device": "the tests' CPU"}
COUNTED = ("fxgraph_cache_hit", "fxgraph_cache_miss", "autograd_cache_hit", "autograd_cache_miss")


def _added(batch_out: torch.Tensor, weight: torch.Tensor) -> None:
    batch_out.copy_(weight + 1)


def _doubled(batch_out: torch.Tensor, weight: torch.Tensor) -> None:
    batch_out.copy_(weight * 2)


SMALL: dict[str, Callable[..., Any]] = {"added": _added, "doubled": _doubled}
"""Steps of one operator, of one name and with tensors of the same forms."""


def small_step(name: str) -> StepGraph:
    """A step of `SMALL`, whose weight is 0 to 7."""
    return small_graph(SMALL[name], batch_out=torch.zeros(8), weight=torch.arange(8.0))


def keeping(store: EntryStore) -> CudaBackend:
    """The cuda backend on the CPU, which keeps what it lowers."""
    backend = CudaBackend(NullGraphs(), lower_by_inductor, (), device="cpu")
    backend.keep_steps(store, MACHINE)
    return backend


def _decode(checkpoint: str, backend: CudaBackend) -> StepGraph:
    options = plan_of(spec_tokens=1, batch_buckets=(1,), max_len=64, page_size=16)
    compiler = StepCompiler(load(Path(checkpoint), "float32", True), options, backend)
    return compiler.rewritten(StepKey.decode(1, 1))


def main(cache: str, *names: str) -> None:
    """Lower and run each step; print what happened."""
    if digest := os.environ.get("MTPC_TEST_SOURCES"):
        for module in (cuda, kept_steps):
            setattr(module, "sources_digest", lambda: digest)  # noqa: B010
    backend, results = keeping(EntryStore(Path(cache))), {}
    for name in names:
        graph = small_step(name) if name in SMALL else _decode(name, backend)
        backend.lower(graph)()
        results[name] = graph.buffer("batch.out").tolist() if name in SMALL else None
    found = counters["inductor"] + counters["aot_autograd"]
    counted = {name: found[name] for name in COUNTED}
    print(json.dumps({"counted": counted, "notes": dict(backend.notes), "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
