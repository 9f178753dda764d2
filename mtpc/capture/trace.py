"""Tracing: the model's pieces once with symbolic sizes, the step around them once per bucket.

The pieces of the model (target, heads, MTP layers) are expensive to trace. A program exports them
once, with symbolic numbers of flat tokens and of requests. The other pieces (metadata, acceptance,
advance) are small. `capture.inline` traces them at the exact shapes of each bucket. `trace_step`
records `Step.forward` with all pieces as leaves. Its result is a StepGraph of a few dozen
`call_module` nodes, which passes turn into one flat graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from mtpc.capture.graph import StepGraph, module_of
from mtpc.capture.step_mode import nominal
from mtpc.layout import NO_SLOT, PROMPT_EMBEDS, Layout, StepKey
from mtpc.layout.buffers import K_MAX, P
from mtpc.layout.specs import DRAFT_COUNTS, SAMPLING_INTS, SYNTHETIC_DRAWS, TEXT_IDS
from mtpc.step.accept import Accept, AcceptPrefill
from mtpc.step.advance import Advance
from mtpc.step.choose import Choice, Choose, Pick
from mtpc.step.metadata import BeginDecode, BeginPrefill, LogitsRows
from mtpc.step.model import StepModel
from mtpc.step.records import Metadata
from mtpc.step.sampling import Record, SampleChoice, SampledChoice, SampleDraft
from mtpc.step.step import Step, StepPieces
from mtpc.weights.weights import Weights

TRACE_REQS, TRACE_TOKENS = 3, 7
"""Numbers of requests and of tokens while tracing: different, above 1, and no other size of a
model."""


class ModelTraces(nn.Module):
    """A model's pieces as GraphModules with symbolic T and R, traced once per program."""

    def __init__(self, model: StepModel, layout: Layout):
        super().__init__()
        device = next(model.target.parameters()).device
        metadata = tuple(_example_metadata(layout, device))
        ids = torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=device)
        given = _symbolic(layout)
        self.target = export_piece(model.target, (ids, *metadata), ({0}, *given))
        features = fed = _example(self.target)
        self.drafting = model.drafting
        if TEXT_IDS in layout:
            from mtpc.step.copying import Copying  # Not above: few models draft so.

            self.drafting = Copying.beside(model.drafting, layout.value(K_MAX))
        if model.draft_entry is not None:
            self.draft_entry = export_piece(model.draft_entry, (_example(self.target, 1),))
            fed = _example(self.draft_entry)
        self.target_head = export_piece(model.target_head, (features,))
        self.drafts = nn.ModuleList(
            export_piece(draft, (ids, fed, *metadata), ({0}, {0}, *given)) for draft in model.drafts
        )
        if model.later_draft is not None:
            example, sizes = (ids, *metadata), ({0}, *given)
            if self.drafting.hands_on:
                example = (ids, fed, *metadata, _example(self.drafts[-1], 1))
                handed = enumerate(_result(self.drafts[-1], 1).shape)
                is_open = {dim for dim, size in handed if isinstance(size, torch.SymInt)}
                sizes = ({0}, {0}, *given, {0, *is_open})
            self.later_draft = export_piece(model.later_draft, example, sizes)
        place = model.drafting.head_reads
        read = _example(self.drafts[0], place) if place else fed
        self.draft_heads = nn.ModuleList(
            self.target_head if head is model.target_head else export_piece(head, (read,))
            for head in model.draft_heads
        )
        if model.draft_bias is not None:
            example = (_example(self.draft_heads[0]), read, ids)
            self.draft_bias = export_piece(model.draft_bias, example)
        if model.draft_tokens is not None and model.draft_logits is not None:
            logits = _example(self.draft_heads[0])
            self.draft_tokens = export_piece(model.draft_tokens, (torch.zeros_like(ids),))
            self.draft_logits = export_piece(model.draft_logits, (logits,))
        self.vocab_size = model.vocab_size


def _example_metadata(layout: Layout, device: torch.device) -> Metadata:
    """Metadata of the sizes used while tracing; no row has a slot."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Metadata(
        positions=zeros(TRACE_TOKENS, dtype=torch.int64),
        slot_mapping=zeros(TRACE_TOKENS, dtype=torch.int64).fill_(NO_SLOT),
        seq_lens=zeros(TRACE_REQS),
        query_start_loc=zeros(TRACE_REQS + 1),
        block_table=zeros(TRACE_REQS, layout.shape("state.block_table")[1]),
        state_slots=zeros(TRACE_REQS, dtype=torch.int64),
        certain_lens=zeros(TRACE_REQS),
    )


def _symbolic(layout: Layout) -> tuple[set[int], ...]:
    """Dimensions of metadata that are symbolic: rows or requests, and a request's blocks."""
    blocks = {0, 1} if layout.shape("state.block_table")[1] > 1 else {0}  # 1 would be a constant.
    return tuple(blocks if field.name == "block_table" else {0} for field in fields(Metadata))


def _example(piece: Any, place: int = 0) -> Tensor:
    """Zeros of the shape and dtype of one result of a traced piece."""
    value = _result(piece, place)
    shape = (TRACE_TOKENS, *map(nominal, value.shape[1:]))
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _result(piece: Any, place: int) -> Tensor:
    """One result of a traced piece, without contents."""
    output = next(n for n in piece.graph.nodes if n.op == "output").args[0]
    value: Tensor = (output[place] if isinstance(output, (tuple, list)) else output).meta["val"]
    return value


def export_piece(
    module: nn.Module, example: Sequence[Tensor], symbolic: Sequence[set[int]] | None = None
) -> fx.GraphModule:
    """Non-strict export, with some dimensions of each argument symbolic; the first where none are
    named.

    The get_attr nodes of the result refer to the module's own tensors, which are named as in
    `module`, below "inner.".
    """
    wrapped = _Positional(module)
    symbolic = symbolic or [{0}] * len(example)
    with torch.no_grad(), _use_lazy_graph_module(True):  # Graphs are read, and not called.
        program = torch.export.export(
            wrapped,
            tuple(example),
            dynamic_shapes=(tuple(dict.fromkeys(dims, Dim.DYNAMIC) for dims in symbolic),),
            strict=False,
        )
    traced = program.module(check_guards=False)
    assert isinstance(traced, fx.GraphModule)
    return traced


class _Positional(nn.Module):
    """Calls a module with positional arguments only, whatever its forward's signature."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args)


class LeafTracer(fx.Tracer):
    """Records `Step.forward`: each piece is a leaf, each buffer a get_attr node."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.startswith("pieces.")


def trace_step(
    key: StepKey, traces: ModelTraces, layout: Layout, shared: nn.Module, weights: Weights
) -> StepGraph:
    """Trace one iteration of one bucket.

    The result's pieces are `call_module` nodes. With K > 0 it is not valid yet: its metadata
    buffers have one row per request, as plain decoding needs, until the pass `resize-metadata` has
    run. The submodule `state` of `shared` holds the shared state tensors.
    """
    buffers = nn.Module()
    buffers.add_module("state", shared.get_submodule("state"))
    device = next(shared.buffers()).device
    batch = nn.Module()
    for name, spec in layout.items():
        if not spec.shared:
            batch.register_buffer(
                name.removeprefix("batch."), layout.allocate(name, device), persistent=False
            )
    buffers.add_module("batch", batch)
    drafts = key.spec_tokens > 0
    has = (SYNTHETIC_DRAWS in layout and drafts, DRAFT_COUNTS in layout)
    pieces = _pieces(key, traces, layout)
    choice = Choice()
    if SAMPLING_INTS in layout:
        choice = SampledChoice("batch.token_mask" in layout, "batch.draft_mask" in layout)
    step = Step(key, pieces, buffers, choice, traces.drafting, *has, layout.is_ragged)
    graph = LeafTracer().trace(step)
    return StepGraph(module_of(step, graph), key, layout, weights)


def _pieces(key: StepKey, traces: ModelTraces, layout: Layout) -> StepPieces:
    """The step's leaves: the model's traces, and the other pieces for this bucket."""
    page_size = layout.value(P)
    is_decode = key.phase == "decode"
    ends: tuple[type[nn.Module], type[nn.Module]] = (BeginPrefill, AcceptPrefill)
    if is_decode and not layout.is_ragged:
        ends = (BeginDecode, Accept)
    elif is_decode:
        from mtpc.step.budget import AcceptPacked, BeginPacked  # Not above: few plans pack rows.

        ends = (BeginPacked, AcceptPacked)
    pieces = StepPieces()
    for name, piece in traces.named_children():
        pieces.add_module(name, piece)
    more = layout.shape(PROMPT_EMBEDS)[0] if not is_decode and PROMPT_EMBEDS in layout else 0
    pieces.begin = ends[0](key, page_size, traces.vocab_size + more)
    pieces.accept, pieces.logits_rows = ends[1](), LogitsRows(key)
    for name, piece in traces.drafting.pieces(key, page_size, traces.vocab_size).items():
        pieces.add_module(name, piece)
    samples = SAMPLING_INTS in layout
    pieces.choose, pieces.pick = (SampleChoice(), SampleDraft()) if samples else (Choose(), Pick())
    marks_unused = SYNTHETIC_DRAWS in layout or DRAFT_COUNTS in layout
    pieces.record, pieces.advance = Record(), Advance(marks_unused)
    if SYNTHETIC_DRAWS in layout:
        from mtpc.step.synthetic import Dictate

        pieces.dictate = Dictate(key.max_emitted)
    if DRAFT_COUNTS in layout:
        from mtpc.step.budget import CountDrafts

        pieces.count_drafts = CountDrafts()
    return pieces
