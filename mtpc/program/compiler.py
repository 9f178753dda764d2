"""From a loaded model to a program: trace, rewrite, lower, capture, for every bucket.

loaded model -> ModelTraces (once) -> trace_step -> passes -> backend.lower -> backend.capture
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mtpc.backends.base import Backend
from mtpc.capture.graph import PassRecord, StepGraph, WeightTable, set_tensor
from mtpc.capture.repeat_layers import repeat_layers
from mtpc.capture.trace import ModelTraces, trace_step
from mtpc.config import CompileOptions
from mtpc.errors import CapacityError, OptionError
from mtpc.layout import IMAGE_STATE, MAX_STOP_IDS, Layout, StepKey, largest_first, step_keys
from mtpc.layout.buffers import (
    K_MAX,
    OPEN_SIZES,
    B,
    C,
    E,
    K,
    L,
    P,
    Q,
    R,
    S,
    V,
    batch_specs,
    sampling_specs,
    state_specs,
    synthetic_specs,
)
from mtpc.layout.open_sizes import shared_sizes
from mtpc.layout.progress import Listener, Progress
from mtpc.models.layer_pattern import find_pattern, with_first_layers
from mtpc.models.load import LoadedModel, SteppedModel
from mtpc.models.vision import image_buffers
from mtpc.models.weight_recipes import stored_groups
from mtpc.passes import Verifier
from mtpc.program.forecast import Forecast
from mtpc.program.lowering import Lowering, Seen
from mtpc.program.packed_results import pack_results
from mtpc.program.program import CapturedStep, Program
from mtpc.program.rank_share import RankShare
from mtpc.program.ranks import Ranks
from mtpc.program.same_calls import agree_on_calls
from mtpc.sampling_params import MAX_LOGIT_BIAS

COPY_LAYERS = "copy-layers"
"""Name in a graph's history of the step that adds layers that were not traced."""


class StepCompiler:
    """Compiles steps of one model over one set of shared buffers.

    Args:
        loaded: the model.
        options: sizes and choices.
        backend: what the steps are compiled for.
        listener: hears of progress.
        new_buffer: makes each shared buffer; `Layout.reserve` if other tensors replace them later.
        ranks: the processes that share the model; None: this one has all of it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: CompileOptions,
        backend: Backend,
        listener: Listener = lambda progress: None,
        new_buffer: Callable[[Layout, str, torch.device], Tensor] = Layout.allocate,
        ranks: Ranks | None = None,
    ):
        self.options = options.for_model(loaded.max_positions)
        loaded = loaded.for_length(self.options.sequence_limit)
        self.loaded = loaded.with_layers(options.spec_tokens).with_kv_cache(options.kv_cache_dtype)
        self.backend = backend
        self._check_draft_vocab()
        self.keys = step_keys(options)
        self.share = RankShare(self.loaded, ranks) if ranks is not None else None
        self.listener, self._start, self._done = listener, time.perf_counter(), 0
        self.forecast = Forecast()
        self.weights = WeightTable(
            loaded.weights(), stored_groups(loaded), loaded.owned, loaded.elsewhere
        )
        self.shared, self.shared_module = self._make_shared(new_buffer)
        self._cut = self._cut_caches()
        self._pools = self._traced_pools()
        names = {id(t): name for name, t in (*self.shared.items(), *self._pools.items())}
        sharding = self.share.sharding(self._cut) if self.share else None
        # A rank that builds for the cache does so without the others.
        self._ranks = ranks if ranks and ranks.control and backend.package is None else None
        meet = self._ranks.meet if self._ranks else lambda: None
        self._lowering = Lowering(backend, names, options, sharding, meet)
        self._traces: ModelTraces | None = None
        self._kept: dict[StepKey, StepGraph] = {}
        self.pattern = find_pattern(self.loaded, self.weights.spec)

    def _check_draft_vocab(self) -> None:
        largest, size = max(self.options.draft_vocab, default=0), self.loaded.vocab_size
        if largest >= size:
            raise OptionError(
                f"draft_vocab names token {largest}; expected ids in 0..{size - 1}, the model's "
                "vocabulary"
            )
        if self.options.draft_vocab and self.loaded.has_draft_vocabulary:
            raise OptionError(
                "draft_vocab names tokens for a drafter that has a vocabulary of its own; leave it "
                "out"
            )

    def layout(self, key: StepKey, whole: bool = False) -> Layout:
        """Buffers of one step, metadata sized as plain decoding has it.

        Args:
            key: the step.
            whole: with all key/value heads, whatever this rank holds of them.
        """
        options = self.options
        shared, pages = shared_sizes(options), options.page_count
        if pages - 1 < options.blocks_per_request(2):
            raise CapacityError(
                f"num_pages is {pages}, one of them reserved: too small for any request; expected "
                f"at least {options.blocks_per_request(2) + 1}"
            )
        sizes = {
            R: key.bucket.num_reqs,
            Q: key.bucket.query_len,
            K: key.spec_tokens,
            K_MAX: options.spec_tokens,
            C: max(map(_rows_of_one_request, self.keys)) + self.loaded.chain_window,
            **{symbol: shared[str(symbol)] for symbol in OPEN_SIZES},
            P: options.page_size,
            E: MAX_STOP_IDS,
            V: self.loaded.vocab_size,
            B: MAX_LOGIT_BIAS,
            L: options.max_logprobs,
        }
        of_layers = self.loaded.state_specs
        if self.share is not None and not whole:
            of_layers = self.share.specs(of_layers)
        specs = (*state_specs(), *batch_specs(key.phase), *of_layers)
        if options.images:
            specs += image_buffers(self.loaded)
        if options.synthetic_acceptance_rates:
            specs += synthetic_specs()
        if options.sampling:
            specs += sampling_specs(key, bool(options.token_mask))
        return Layout(specs, sizes, OPEN_SIZES if self.backend.package is not None else ())

    def _make_shared(
        self, new_buffer: Callable[[Layout, str, torch.device], Tensor]
    ) -> tuple[dict[str, Tensor], nn.Module]:
        layout, module = self.layout(self.keys[0]), nn.Module()
        device = next(self.loaded.target.parameters()).device
        tensors = {
            name: new_buffer(layout, name, device) for name, spec in layout.items() if spec.shared
        }
        for name, tensor in tensors.items():
            set_tensor(module, name, tensor)
        return tensors, module

    def _cut_caches(self) -> dict[str, Tensor]:
        """The caches of which this rank has some heads."""
        if self.share is None:
            return {}
        cut = {spec.name for spec in self.loaded.state_specs if self.share.cuts(spec)}
        return {name: tensor for name, tensor in self.shared.items() if name in cut}

    def _traced_pools(self) -> dict[str, Tensor]:
        """State to trace models over: caches, and what images bring.

        Models are traced whole, so stand-ins take the place of parts.
        """
        pools = {n: t for n, t in self.shared.items() if n.startswith("kv.") or n in IMAGE_STATE}
        cut = self._cut
        if not cut:
            return pools
        whole = self.layout(self.keys[0], whole=True)
        return pools | {name: whole.reserve(name, tensor.device) for name, tensor in cut.items()}

    def tell(self, stage: str, key: StepKey | None) -> None:
        """Say what begins."""
        elapsed = time.perf_counter() - self._start
        done = (self._done, len(self.keys), elapsed)
        self.listener(Progress(stage, key, *done, *self.forecast.now()))

    def finished(self) -> None:
        """Count one more step as done."""
        self._done += 1

    def trace(self, key: StepKey) -> StepGraph:
        """The step as traced, before any pass; of layers that repeat, it has the first ones."""
        traces = self.trace_model(key)
        return trace_step(key, traces, self.layout(key), self.shared_module, self.weights)

    def trace_model(self, key: StepKey) -> ModelTraces:
        """The model's pieces; any step's key will do."""
        if self._traces is None:
            self.tell("trace model", None)
            layout, traced = self.layout(key), self.loaded
            if self.pattern is not None:
                traced = with_first_layers(traced, self.pattern.traced)
            stepped = SteppedModel(traced, self._pools, layout.value(S))
            self._traces = ModelTraces(stepped, layout)
        return self._traces

    @torch.no_grad()
    def all_layers(self, graph: StepGraph) -> StepGraph | None:
        """A rewritten graph with the layers that were not traced, verified.

        None where its calls do not repeat: from now on every layer is traced.
        """
        if self.pattern is None:
            return graph
        start, before = time.perf_counter(), graph.num_nodes
        whole = repeat_layers(graph, self.pattern, self.shared)
        if whole is None:
            self.pattern, self._traces = None, None
            return None
        copies, seconds = self.pattern.copies, time.perf_counter() - start
        whole.history.append(PassRecord(COPY_LAYERS, copies, seconds, before, whole.num_nodes))
        Verifier(propagate=False)(whole, COPY_LAYERS)  # Values follow from verified ones.
        return whole

    def rewrite(
        self, graph: StepGraph, until: str | None = None, seen: Seen = lambda name, graph: None
    ) -> StepGraph:
        """Run the pass pipeline in place; see `Lowering.rewrite`."""
        return self._lowering.rewrite(graph, until, seen)

    def capture(self, key: StepKey) -> CapturedStep:
        """Trace, rewrite, lower and capture one step."""
        graph = self.rewritten(key)
        if self.backend.package is None:
            pack_results(graph)
        return self.capture_graph(key, graph)

    @torch.no_grad()
    def rewritten(self, key: StepKey) -> StepGraph:
        """One step after all passes; that of `rewrite_all`, once, where there is one."""
        if key in self._kept:
            return self._kept.pop(key)
        self.tell("trace", key)
        graph = self.trace(key)
        self.tell("rewrite", key)
        whole = self.all_layers(self.rewrite(graph))
        if whole is None:
            return self.rewritten(key)
        if self._ranks is not None:
            agree_on_calls(whole, self._ranks)
        return whole

    def rewrite_all(self) -> Mapping[StepKey, StepGraph]:
        """Every step after all passes. They are kept, and `capture` takes them."""
        for key in self.keys:
            self._kept[key] = self.rewritten(key)
        return self._kept

    def capture_graph(self, key: StepKey, graph: StepGraph) -> CapturedStep:
        """Lower and capture one step, or a part of one, after all passes."""
        return self._lowering.capture(graph, self.shared, lambda stage: self.tell(stage, key))

    @torch.no_grad()
    def compile(self) -> Program:
        """Every step of `keys`, the largest bucket first."""
        steps: dict[StepKey, CapturedStep] = {}
        for key in largest_first(self.keys):
            steps[key] = self.capture(key)
            self.finished()
        return Program(steps, self.shared)


def _rows_of_one_request(key: StepKey) -> int:
    """The most: a prefill step may give all its rows to one request."""
    return key.bucket.num_tokens if key.phase == "prefill" else key.bucket.query_len
