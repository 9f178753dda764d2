"""Tracing: model pieces once with a symbolic number of tokens, the step around them per bucket.

The expensive traces (target, heads, draft layers) are exported once per program, with the flat
token count and the request count left symbolic; the small glue (metadata, acceptance, advance)
is traced when it is inlined, at each bucket's exact shapes. `trace_step` then records
`Step.forward` with all of them as leaves: a StepGraph of a few dozen `call_module` nodes that
passes turn into one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from mtpc.buffers import P
from mtpc.capture.graph import StepGraph, WeightTable
from mtpc.layout import Layout, StepKey
from mtpc.step.accept import Accept, AcceptPrefill
from mtpc.step.advance import Advance
from mtpc.step.chaining import KeepLast, MoveUp, Widen
from mtpc.step.choose import Choose, Pick, Record, SampleChoice, SampleDraft
from mtpc.step.metadata import BeginDecode, BeginPrefill, ChainMetadata, LogitsRows
from mtpc.step.step import Step, StepModel, StepPieces

TRACE_REQS, TRACE_TOKENS = 3, 7
"""Sizes used while tracing; any two different numbers above 1 that nothing else in a model has."""


class ModelTraces(nn.Module):
    """A model's pieces as GraphModules with symbolic [T] and [R], traced once per program."""

    def __init__(self, model: StepModel, layout: Layout):
        super().__init__()
        device = next(model.target.parameters()).device
        metadata, metadata_dims = _example_metadata(layout, device)
        ids = torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=device)
        token_dim = {0: Dim.DYNAMIC}
        self.target = export_piece(model.target, (ids, *metadata), (token_dim, *metadata_dims))
        features = _example_features(self.target)
        self.target_head = export_piece(model.target_head, (features,), (token_dim,))
        self.drafts = nn.ModuleList(
            export_piece(draft, (ids, features, *metadata), (token_dim, token_dim, *metadata_dims))
            for draft in model.drafts
        )
        self.draft_heads = nn.ModuleList(
            self.target_head
            if head is model.target_head
            else export_piece(head, (features,), (token_dim,))
            for head in model.draft_heads
        )
        self.vocab_size = model.vocab_size
        self.draft_index: Callable[[int], int] = model.draft_index


def _example_metadata(
    layout: Layout, device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    blocks = layout.shape("state.block_table")[1]
    tensors = (
        torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=device),
        torch.full((TRACE_TOKENS,), -1, dtype=torch.int64, device=device),
        torch.zeros(TRACE_REQS, blocks, dtype=torch.int32, device=device),
        torch.zeros(TRACE_REQS, dtype=torch.int32, device=device),
        torch.zeros(TRACE_REQS + 1, dtype=torch.int32, device=device),
        torch.zeros(TRACE_REQS, dtype=torch.int64, device=device),
        torch.zeros(TRACE_REQS, dtype=torch.int32, device=device),
    )
    return tensors, tuple({0: Dim.DYNAMIC} for _ in tensors)


def _example_features(target: fx.GraphModule) -> Tensor:
    """Zeros of the shape and dtype that the traced target returns."""
    output = next(n for n in target.graph.nodes if n.op == "output").args[0]
    value = (output[0] if isinstance(output, (tuple, list)) else output).meta["val"]
    shape = (TRACE_TOKENS, *value.shape[1:])
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def export_piece(
    module: nn.Module, example: Sequence[Tensor], dims: Sequence[Any] | None
) -> fx.GraphModule:
    """Non-strict export to an FX module whose get_attr nodes refer to the module's own tensors.

    They are named as in `module`, below "inner.".
    """
    wrapped = _Positional(module)
    with torch.no_grad():
        program = torch.export.export(
            wrapped,
            tuple(example),
            dynamic_shapes=None if dims is None else (tuple(dims),),
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
    """Records `Step.forward` with every piece as a leaf and every buffer as a get_attr node."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.startswith("pieces.")


def trace_step(
    key: StepKey,
    traces: ModelTraces,
    layout: Layout,
    shared: nn.Module,
    weights: WeightTable,
) -> StepGraph:
    """Trace one iteration of one bucket.

    Args:
        key: phase, bucket and K.
        traces: the model's pieces.
        layout: buffers of this bucket, metadata as plain decoding has it.
        shared: module whose submodule `state` holds the shared state tensors.
        weights: the program's weight table.

    Returns:
        A StepGraph whose pieces are `call_module` nodes. It is not valid yet where K > 0: its
        metadata buffers are one row a request until the pass `resize-metadata` has run.
    """
    pieces = _pieces(key, traces, layout)
    buffers = nn.Module()
    buffers.add_module("state", shared.get_submodule("state"))
    buffers.add_module("batch", _allocate_batch(layout, shared))
    passes = max(key.spec_tokens, len(traces.drafts))
    draft_index = tuple(traces.draft_index(i) for i in range(passes))
    step = Step(key, pieces, buffers, draft_index)
    graph = LeafTracer().trace(step)
    return StepGraph(fx.GraphModule(step, graph), key, layout, weights)


def _allocate_batch(layout: Layout, shared: nn.Module) -> nn.Module:
    device = next(shared.buffers()).device
    batch = nn.Module()
    for name, spec in layout.items():
        if not spec.shared:
            batch.register_buffer(
                name.removeprefix("batch."), layout.allocate(name, device), persistent=False
            )
    return batch


def _pieces(key: StepKey, traces: ModelTraces, layout: Layout) -> StepPieces:
    """The step's leaves: the model's traces, and glue for this bucket."""
    page_size = layout.value(P)
    is_decode = key.phase == "decode"
    begin, accept = (BeginDecode, Accept) if is_decode else (BeginPrefill, AcceptPrefill)
    pieces = StepPieces()
    pieces.target, pieces.target_head = traces.target, traces.target_head
    pieces.drafts, pieces.draft_heads = traces.drafts, traces.draft_heads
    pieces.begin = begin(key, page_size, traces.vocab_size)
    pieces.accept, pieces.logits_rows = accept(), LogitsRows(key)
    pieces.chain_metadata = ChainMetadata(key, page_size)
    samples = "state.sampling_ints" in layout
    pieces.choose, pieces.pick = (SampleChoice(), SampleDraft()) if samples else (Choose(), Pick())
    pieces.record, pieces.advance = Record(), Advance()
    window = len(traces.drafts) - 1
    if window > 0:
        pieces.widen, pieces.move_up = Widen(key, window, page_size), MoveUp()
        pieces.keep_last = KeepLast(window)
    return pieces
