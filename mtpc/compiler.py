"""From a loaded model to a program: trace, rewrite, lower, capture, for every bucket.

loaded model -> ModelTraces (once) -> trace_step -> passes -> backend.lower -> backend.capture
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtpc.backends.base import Backend
from mtpc.capture.graph import StepGraph, WeightTable, set_tensor
from mtpc.capture.program import CapturedStep, Program
from mtpc.capture.split import split_step
from mtpc.capture.trace import ModelTraces, trace_step
from mtpc.config import CompileOptions
from mtpc.errors import CapacityError
from mtpc.layout import K_MAX, E, K, Layout, M, N, P, Q, R, S, StepKey, batch_specs, state_specs
from mtpc.models.load import LoadedModel, SteppedModel
from mtpc.passes import Verifier, run_pipeline, select_passes

MAX_STOP_IDS = 8
"""Stop-token ids a request may have."""


@dataclass(frozen=True)
class Progress:
    """One finished or beginning stage of compilation.

    Attributes:
        stage: "trace model", "trace", "rewrite", "lower", "capture", "done", or what a backend
            reports of its own preparation.
        key: the step, or None for work that all steps share.
        done: steps finished so far.
        total: steps to compile.
        elapsed_s: seconds since compilation began.
    """

    stage: str
    key: StepKey | None
    done: int
    total: int
    elapsed_s: float


Listener = Callable[[Progress], None]


def step_keys(options: CompileOptions) -> tuple[StepKey, ...]:
    """The steps that options ask for: one decode step per bucket and one prefill step."""
    k = options.spec_tokens
    decode = tuple(StepKey.decode(num_reqs, k) for num_reqs in options.batch_buckets)
    return (*decode, StepKey.prefill(1, options.prefill_chunk, k))


def blocks_per_request(num_tokens: int, options: CompileOptions) -> int:
    """Pages a sequence of `num_tokens` needs, with room for a round of drafts at its very end."""
    return math.ceil((num_tokens + 2 * options.spec_tokens) / options.page_size)


class StepCompiler:
    """Compiles steps of one model over one set of shared buffers.

    Args:
        loaded: the model.
        options: sizes and choices.
        backend: where to.
        listener: hears of progress.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: CompileOptions,
        backend: Backend,
        listener: Listener = lambda progress: None,
    ):
        positions = getattr(loaded.config, "max_position_embeddings", None)
        self.loaded, self.backend = loaded, backend
        self.options = options.for_model(positions)
        self.keys = step_keys(options)
        self._listener, self._start, self._done = listener, time.perf_counter(), 0
        self.weights = WeightTable(loaded.weights())
        self.shared, self.shared_module = self._allocate_shared()
        self._buffer_names = {id(tensor): name for name, tensor in self.shared.items()}
        self._traces: ModelTraces | None = None

    def layout(self, key: StepKey) -> Layout:
        """Buffers of one step, metadata sized as plain decoding has it."""
        options = self.options
        blocks = blocks_per_request(options.sequence_limit, options)
        largest = max(options.batch_buckets)
        pages = options.num_pages or largest * blocks + 1
        if pages - 1 < blocks_per_request(2, options):
            raise CapacityError(
                f"num_pages is {pages}, one of them reserved: too small for any request; expected "
                f"at least {blocks_per_request(2, options) + 1}"
            )
        sizes = {
            R: key.bucket.num_reqs,
            Q: key.bucket.query_len,
            K: key.spec_tokens,
            K_MAX: options.spec_tokens,
            M: blocks,
            P: options.page_size,
            N: pages,
            S: largest + 1,
            E: MAX_STOP_IDS,
        }
        specs = (*state_specs(), *batch_specs(key.phase), *self.loaded.cache_specs())
        return Layout(specs, sizes)

    def _allocate_shared(self) -> tuple[dict[str, Tensor], nn.Module]:
        layout, module = self.layout(self.keys[0]), nn.Module()
        device = next(self.loaded.target.parameters()).device
        tensors = {
            name: layout.allocate(name, device) for name, spec in layout.items() if spec.shared
        }
        for name, tensor in tensors.items():
            set_tensor(module, name, tensor, buffer=True)
        return tensors, module

    def _tell(self, stage: str, key: StepKey | None) -> None:
        elapsed = time.perf_counter() - self._start
        self._listener(Progress(stage, key, self._done, len(self.keys), elapsed))

    def trace(self, key: StepKey) -> StepGraph:
        """The step as traced, before any pass."""
        layout = self.layout(key)
        if self._traces is None:
            self._tell("trace model", None)
            pools = {n: t for n, t in self.shared.items() if n.startswith("kv.")}
            self._traces = ModelTraces(SteppedModel(self.loaded, pools), layout)
        return trace_step(key, self._traces, layout, self.shared_module, self.weights)

    def rewrite(self, graph: StepGraph, until: str | None = None) -> StepGraph:
        """Run the pass pipeline in place, through the pass `until` or to its end."""
        options = self.options
        passes = select_passes(self._buffer_names, options.disabled_passes, options.enabled_passes)
        pipeline = (*passes, *self.backend.legalise())
        run_pipeline(graph, pipeline, Verifier(options.verify_passes), until)
        if until is None:
            Verifier(propagate=True)(graph, pipeline[-1].name)
        return graph

    def capture(self, key: StepKey) -> CapturedStep:
        """Trace, rewrite, lower and capture one step."""
        start = time.perf_counter()
        self._tell("trace", key)
        graph = self.trace(key)
        self._tell("rewrite", key)
        self.rewrite(graph)
        self._tell("lower", key)
        run = self.backend.lower(graph)
        self._tell("capture", key)
        replay = self.backend.capture(run, graph)
        self._done += 1
        return CapturedStep(
            key, graph, graph.buffers() | self.shared, replay, time.perf_counter() - start
        )

    @torch.no_grad()
    def capture_split(self, key: StepKey) -> tuple[CapturedStep, CapturedStep]:
        """One step as two captured graphs, `verify` then `propose`, for hosts that schedule."""
        start = time.perf_counter()
        split = split_step(self.rewrite(self.trace(key)))
        halves = []
        for graph in (split.verify, split.propose):
            replay = self.backend.capture(self.backend.lower(graph), graph)
            seconds = time.perf_counter() - start
            halves.append(CapturedStep(key, graph, graph.buffers() | self.shared, replay, seconds))
        return halves[0], halves[1]

    @torch.no_grad()
    def compile(self) -> Program:
        """Every step of `keys`, the largest bucket first."""
        largest_first = sorted(self.keys, key=lambda key: key.bucket.num_tokens, reverse=True)
        steps: Mapping[StepKey, CapturedStep] = {key: self.capture(key) for key in largest_first}
        self._tell("done", None)
        return Program(steps, self.shared)
