"""From a loaded model to built steps: trace, rewrite, build an artifact, for every bucket.

loaded model -> ModelTraces (once) -> trace_step -> passes -> backend.build -> artifact and record
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mtpc.backends.base import Artifact, Backend
from mtpc.backends.package import TAPE
from mtpc.backends.pipeline import PACKING, select_passes
from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.capture.listing import listing
from mtpc.capture.step_mode import StepMode
from mtpc.capture.trace import ModelTraces, trace_step
from mtpc.certificate import Certificate, prove
from mtpc.errors import CapacityError, OptionError
from mtpc.layout import IMAGE_STATE, MAX_STOP_IDS, Layout, Part, StepKey, largest_first, step_keys
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
    budget_specs,
    copy_specs,
    sampling_specs,
    state_specs,
    synthetic_specs,
    text_of,
)
from mtpc.layout.open_sizes import shared_sizes
from mtpc.layout.specs import is_buffer_name
from mtpc.models.layer_pattern import find_pattern, with_first_layers
from mtpc.models.load import LoadedModel
from mtpc.models.stepped import SteppedModel
from mtpc.models.weight_recipes import stored_weights, weight_recipes
from mtpc.passes import Pass, Verifier, run_pipeline
from mtpc.passes.copy_layers import CopyLayers, LayersDiffer
from mtpc.plan import Plan
from mtpc.program.forecast import StageTimer
from mtpc.program.program import BuiltSteps, Program, bind_program
from mtpc.program.step_cache import CERTIFICATE, CONSTANTS, CachedStep, OwnSteps, Steps, graph_file
from mtpc.program.step_record import StepRecord, settled_buffers
from mtpc.sampling_params import MAX_LOGIT_BIAS
from mtpc.weights.recipes import Recipe, names
from mtpc.weights.weights import Weights

if TYPE_CHECKING:
    from mtpc.capture.split import SplitStep
    from mtpc.passes.shard import Sharding
    from mtpc.ranks.group import Ranks
    from mtpc.ranks.share import RankShare

Seen = Callable[[str, StepGraph], None]
"""Called with a pass's name and the graph after it."""


@dataclass(frozen=True)
class Lowering:
    """How graphs become steps of one backend.

    Attributes:
        backend: lowers and captures; its passes end the pipeline.
        buffer_names: layout name by tensor id, for state that model pieces hold.
        plan: says which passes run, and how each is verified.
        sharding: what this rank holds of the model; None is all.
    """

    backend: Backend
    buffer_names: Mapping[int, str]
    plan: Plan
    sharding: Sharding | None = None

    def rewrite(
        self,
        graph: StepGraph,
        copies: CopyLayers | None = None,
        ending: Sequence[Pass] = (),
        until: str | None = None,
        seen: Seen = lambda name, graph: None,
    ) -> StepGraph:
        """Run the pass pipeline in place, verifying after each pass.

        Args:
            graph: as traced.
            copies: adds layers: last or, if they are stored in other forms, before packing.
            ending: what follows.
            until: stop after this pass; None runs them all.
            seen: called with each pass's name and the graph after it.

        Raises:
            GraphError: a pass left an invalid graph.
        """
        passes = select_passes(self.plan, self.backend.enables, self.buffer_names, self.sharding)
        rewriting = [*passes, *self.backend.legalise()]
        last, is_early = rewriting[-1].name, copies is not None and not copies.pattern.stored_alike
        if copies:
            packs = (i for i, each in enumerate(rewriting) if is_early and each.name in PACKING)
            rewriting.insert(next(packs, len(rewriting)), copies)
        verify = Verifier(self.plan.verify_passes)

        def check(graph: StepGraph, name: str) -> None:
            nonlocal verify
            if name == CopyLayers.name:  # More layers have other effects, and verified values.
                verify = Verifier(is_early and self.plan.verify_passes)
            verify(graph, name)
            if name == last:
                Verifier(propagate=True)(graph, name)
            seen(name, graph)

        run_pipeline(graph, (*rewriting, *ending), check, until)
        return graph


Begins = Callable[[str, StepKey | None, Part], None]
"""Called with a stage that begins, and its step and part; None: it is for all steps."""
_Write = Callable[[int, str, StepGraph], None]
"""Called with the number and name of a pass, and the graph after it."""


class StepCompiler:
    """Builds steps of one model, or takes them from a cache.

    Args:
        loaded: the model.
        plan: sizes and choices.
        backend: what the steps are compiled for.
        begins: called with each stage.
        new_buffer: makes each shared buffer; `Layout.reserve` if steps are bound to other tensors.
        ranks: the processes that share the model; None: this one has all of it.
        cache: where steps are looked up and kept, of this very model and plan; None: nowhere.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        backend: Backend,
        begins: Begins = lambda stage, key, part: None,
        new_buffer: Callable[[Layout, str, torch.device], Tensor] = Layout.allocate,
        ranks: Ranks | None = None,
        cache: OwnSteps | None = None,
    ):
        self.plan = plan = plan.of_model(loaded.max_positions)
        loaded = loaded.for_length(plan.max_len)
        caches = (plan.kv_cache_dtype, not plan.facts.is_gpu)
        self.loaded = loaded.with_layers(plan.layer_drafts).with_kv_cache(*caches)
        self.backend = backend
        self.cache = OwnSteps(plan) if cache is None else cache
        self._check_draft_vocab()
        self.keys = step_keys(plan)
        self.share: RankShare | None = None
        if ranks is not None:
            from mtpc.ranks.share import RankShare  # Not above: few models are shared.

            self.share = RankShare(self.loaded, ranks)
        self._begins = begins
        self.weights = Weights(loaded.weights(), stored_weights(loaded), loaded.owned)
        self.shared, self.shared_module = self._make_shared(new_buffer)
        state = self.loaded.state_specs
        cut = {spec.name for spec in state if self.share and self.share.cuts(spec)}
        # The caches of which this rank has some heads.
        self._cut = {name: tensor for name, tensor in self.shared.items() if name in cut}
        self._pools = self._traced_pools()
        names = {id(t): name for name, t in (*self.shared.items(), *self._pools.items())}
        sharding = self.share.sharding(self._cut) if self.share else None
        # A rank that builds for the cache does so without the others.
        self._ranks = ranks if ranks and ranks.control and not backend.makes_files else None
        self._lowering = Lowering(backend, names, plan, sharding)
        self._traces: ModelTraces | None = None
        self._kept: dict[StepKey, StepGraph] = {}
        self._split: tuple[StepKey, SplitStep, dict[str, bytes]] | None = None
        self._timer = StageTimer()
        self.pattern = find_pattern(self.loaded, self.weights.spec)
        # Tapes are bound later, and to weights that are made then.
        self.weights.defers = backend.makes_files

    def _check_draft_vocab(self) -> None:
        largest, size = max(self.plan.draft_vocab, default=0), self.loaded.vocab_size
        if largest >= size:
            raise OptionError(
                f"draft_vocab names token {largest}; expected ids in 0..{size - 1}, the model's "
                "vocabulary"
            )
        if self.plan.draft_vocab and self.loaded.has_draft_vocabulary:
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
        plan = self.plan
        shared, pages = shared_sizes(plan), plan.num_pages
        if pages - 1 < plan.blocks_per_request(2):
            raise CapacityError(
                f"num_pages is {pages}, one of them reserved: too small for any request; expected "
                f"at least {plan.blocks_per_request(2) + 1}"
            )
        # A prefill step may give all its rows to one request.
        most_rows = [
            k.bucket.num_tokens if k.phase == "prefill" else k.max_emitted for k in self.keys
        ]
        sizes = {
            R: key.bucket.num_reqs,
            Q: key.bucket.query_len,
            K: key.spec_tokens,
            K_MAX: plan.spec_tokens,
            C: max(most_rows) + self.loaded.chain_window,
            **{symbol: shared[str(symbol)] for symbol in OPEN_SIZES},
            P: plan.page_size,
            E: MAX_STOP_IDS,
            V: self.loaded.vocab_size,
            B: MAX_LOGIT_BIAS,
            L: plan.max_logprobs,
        }
        of_layers = self.loaded.state_specs
        if self.share is not None and not whole:
            of_layers = self.share.specs(of_layers)
        specs = (*state_specs(), *batch_specs(key, plan.packs_drafts), *of_layers)
        if plan.images:
            from mtpc.models.vision import image_buffers  # Not above: few models take images.

            specs += image_buffers(self.loaded)
        if plan.copies:
            specs += copy_specs(plan.layer_drafts > 0)
        if plan.row_budgets:
            specs += budget_specs()
        if plan.synthetic_acceptance_rates:
            specs += synthetic_specs()
        if plan.sampling:
            specs += sampling_specs(key, plan.token_mask)
        return Layout(specs, sizes, OPEN_SIZES if self.backend.makes_files else ())

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

    def trace(self, key: StepKey) -> StepGraph:
        """The step as traced, before any pass; of layers that repeat, it has the first ones."""
        traces = self.trace_model(key)
        return trace_step(key, traces, self.layout(key), self.shared_module, self.weights)

    def trace_model(self, key: StepKey) -> ModelTraces:
        """The model's pieces; any step's key will do."""
        if self._traces is None:
            self._begins("trace model", None, "step")
            layout, traced = self.layout(key), self.loaded
            if self.pattern is not None:
                traced = with_first_layers(traced, self.pattern.traced)
            stepped = SteppedModel(traced, self._pools, layout.value(S))
            self._traces = ModelTraces(stepped, layout)
        return self._traces

    def drafter(self, key: StepKey) -> dict[str, str]:
        """`Drafting.declared`, with the tokens that the plan leaves to drafts."""
        says, chosen = self.trace_model(key).drafting.declared, len(self.plan.draft_vocab)
        named = {"head": f"{chosen} tokens of the vocabulary"}
        return says | named if chosen and "head" in says else says

    def rewrite(
        self, graph: StepGraph, until: str | None = None, seen: Seen = lambda name, graph: None
    ) -> StepGraph:
        """Run the pass pipeline in place; see `Lowering.rewrite`.

        A step whose calls do not repeat as its layers do is traced again, whole, as all after it.
        """
        copies = CopyLayers(self.pattern, self.shared) if self.pattern else None
        agrees: tuple[Pass, ...] = ()
        if self._ranks:
            from mtpc.ranks.share import AgreeOnCalls

            agrees = (AgreeOnCalls(self._ranks),)
        try:
            return self._lowering.rewrite(graph, copies, agrees, until, seen)
        except LayersDiffer:
            self.pattern, self._traces = None, None
            return self.rewrite(self.trace(graph.key), until, seen)

    @torch.no_grad()
    def rewritten(
        self, key: StepKey, part: Part = "step", write: _Write = lambda index, name, graph: None
    ) -> StepGraph:
        """One step after all passes; that of `rewrite_all`, once, where there is one.

        Otherwise `write` gets the graph as traced, and after each pass. `part` is what it is for.
        """
        if key in self._kept:
            return self._kept.pop(key)
        self._begins("trace", key, part)
        with self._timer("trace"):
            graph = self.trace(key)
        write(0, "traced", graph)
        self._begins("rewrite", key, part)
        with self._timer("rewrite"):
            return self.rewrite(
                graph, seen=lambda name, graph: write(len(graph.history), name, graph)
            )

    def rewrite_all(self) -> Mapping[StepKey, StepGraph]:
        """Every step after all passes. They are kept until they are built."""
        for key in self.keys:
            self._kept[key] = self.rewritten(key)
        return self._kept

    def compile(self) -> Program:
        """Every step of `keys`, over the shared buffers of the compiler."""
        steps = self.obtain_all([(key, "step") for key in largest_first(self.keys)])
        return bind_program(self.built(steps, self.shared))

    def built(self, steps: Steps, shared: Mapping[str, Tensor] | None = None) -> BuiltSteps:
        """Steps with the weights of this model.

        Args:
            steps: built by this compiler, or of its cache.
            shared: what they are bound to; None: state and caches of their own.
        """
        meet = self._ranks.meet if self._ranks else lambda: None
        return BuiltSteps(steps, self.weights, shared, meet)

    def obtain_all(self, wanted: Iterable[tuple[StepKey, Part]]) -> Steps:
        """Every step, in order: from the cache, or built."""
        return {(key, part): self.obtain(key, part) for key, part in wanted}

    def prepare(self, key: StepKey) -> None:
        """Trace the model, which all steps share. The next step's record gets the seconds."""
        with torch.no_grad(), self._timer("trace"):
            self.trace_model(key)

    def obtain(self, key: StepKey, part: Part = "step") -> CachedStep:
        """One step, built if the cache lacks it."""
        return self.cache.obtain(key, partial(self._build, key, part), part)

    @torch.no_grad()
    def _build(self, key: StepKey, part: Part) -> tuple[StepRecord, Artifact, Mapping[str, bytes]]:
        """Build a step: its record, its artifact, and all its files but the record."""
        graph, files = self._graph(key, part)
        self._begins("lower", key, part)
        with self._timer("lower"):
            artifact = self.backend.build(graph)
        record = self._record(graph, artifact)
        if part == "step" and (self.backend.makes_files or self.should_be_certified):
            certificate = certify(graph, artifact)
            files[CERTIFICATE] = certificate.encode()
            if self.should_be_certified:
                record = replace(record, uncertified=certificate.refusal)
        if not self.backend.makes_files:
            return record, artifact, {}
        constants = [n for n in artifact.package.tensors if self._is_constant(n)]
        tensors = {name: self.weights[name].detach().clone() for name in constants}
        return record, artifact, {**files, **artifact.files, CONSTANTS: save(tensors)}

    @property
    def should_be_certified(self) -> bool:
        """Whether the backend's steps are to be exact: a row's bits the same in any company."""
        is_exact = self.backend.makes_files and self.loaded.dtype == torch.bfloat16
        is_whole = self.share is None and not self.plan.synthetic_acceptance_rates
        return is_whole and (is_exact or self.plan.batch_invariant)

    def _graph(self, key: StepKey, part: Part) -> tuple[StepGraph, dict[str, bytes]]:
        """A step, or its half, after all passes; and files with its text after each pass.

        The halves of a step are cut from one graph if they are built one after the other.
        """
        texts: dict[str, bytes] = {}

        def write(index: int, name: str, graph: StepGraph) -> None:
            if self.backend.makes_files:
                last = graph.history[-1] if graph.history else None
                is_as_before = last is not None and last.name == name and not last.rewrites
                text = [*texts.values()][-1] if is_as_before else _packed_text(graph)
                texts[graph_file(index, name)] = text

        if part == "step":
            graph = self.rewritten(key, part, write)
        else:
            if self._split is None or self._split[0] != key:
                from mtpc.capture.split import split_step  # Not above: hosts split steps.

                whole = self.rewritten(key, part, write)
                with self._timer("split"):
                    self._split = key, split_step(whole), texts
            _, split, earlier = self._split
            graph = split.verify if part == "verify" else split.propose
            texts = {**earlier}
            write(len(graph.history) + 1, part, graph)
        return graph, texts

    def _record(self, graph: StepGraph, artifact: Artifact) -> StepRecord:
        """What binding needs to know of a built step."""
        mode, weights, loaded = fake_mode_of(graph.graph), self.weights, self.loaded
        held = [name for name in artifact.package.tensors if not is_buffer_name(name)]
        derived = {n: r for n, r in weights.recipes.items() if n in held}
        base = {name for n in held for name in (names(derived[n]) if n in derived else [n])}
        stored = {n: r for n, r in self._recipes.items() if n in base and r is not None}
        others = base - self._recipes.keys()
        seconds, self._timer = self._timer.seconds, StageTimer()
        settle = mode.form if isinstance(mode, StepMode) else graph.layout.value
        return StepRecord(
            step=graph.key,
            part=graph.part,
            buffers=settled_buffers(graph.layout, lambda dim: text_of(settle(dim))),
            package=artifact.package,
            derived=derived,
            stored=stored,
            unexplained=tuple(sorted(n for n in others if not self._is_constant(n))),
            ends=tuple(sorted(loaded.ends() & stored.keys())),
            max_positions=loaded.max_positions,
            vocab_size=loaded.served().vocab_size,
            history=tuple(graph.history),
            seconds=seconds,
            source=loaded.source,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @cached_property
    def _recipes(self) -> dict[str, Recipe | None]:
        return weight_recipes(self.loaded)

    def _is_constant(self, name: str) -> bool:
        """Whether no checkpoint holds a weight."""
        is_known = name in self._recipes and self._recipes[name] is None
        return name.startswith("constant.") or is_known


def _packed_text(graph: StepGraph) -> bytes:
    # A fourth of the time of gzip's best, and a third more bytes.
    return gzip.compress(graph.text().encode(), compresslevel=3, mtime=0)


def certify(graph: StepGraph, artifact: Artifact) -> Certificate:
    """What the checker proves of a whole step, and of what a backend has made of it."""
    return prove(listing(graph), artifact.files.get(TAPE), not artifact.files)
