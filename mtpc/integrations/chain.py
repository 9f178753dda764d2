"""The draft chain as one graph over page pools that the host owns.

The host runs verify, acceptance and the first draft (the pass over the verified rows). The other
drafts of the chain are one step graph here: K - 1 single-row draft steps, with their attention
metadata and token choices. The same passes rewrite it as mtpc's own steps, and the same backends
lower and capture it, once per bucket of requests. Layers that the host computes, cut among ranks or
quantised, are calls of the host's modules in this graph. This module depends on no particular host.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from mtpc import CompileOptions
from mtpc.backends import Backend
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.capture.trace import TRACE_REQS, TRACE_TOKENS, LeafTracer, export_piece
from mtpc.errors import CapacityError, UnsupportedModelError
from mtpc.integrations.draft import TracedDraft
from mtpc.integrations.host_calls import HostCall, with_host_calls
from mtpc.layout import HOST, BufferSpec, Layout, StepKey
from mtpc.models.caches import CachePool
from mtpc.models.hf import MTPLayer, run_mtp_layer
from mtpc.models.seams import StepContext
from mtpc.plan import make_plan
from mtpc.program.compiler import Lowering
from mtpc.program.program import CapturedStep
from mtpc.step.choose import Pick
from mtpc.step.metadata import ChainMetadata
from mtpc.step.records import Chained, Rows, unpack
from mtpc.weights.weights import Weights

aten = torch.ops.aten


@dataclass(frozen=True)
class HostPools:
    """A host's cache of one attention layer, and how it is addressed.

    Attributes:
        tensors: "k" and "v" [pages, page size, H_kv, D], or "latent" [pages, page size, rank +
            rope]; views of the host's memory, which must not move. No request uses page 0.
        num_blocks: columns of a block table: the most pages of a request.
    """

    tensors: Mapping[str, Tensor]
    num_blocks: int

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.like.shape[1]

    @property
    def like(self) -> Tensor:
        """A tensor of the pools, whose dtype and device are the weights', too."""
        return next(iter(self.tensors.values()))


@dataclass(frozen=True)
class ChainPlan:
    """Sizes of the graphs to capture.

    Attributes:
        steps: drafts after the first one.
        buckets: numbers of requests; each has its own graph.
        vocab_size: rows of the head that are tokens. Hosts pad heads with more rows.
    """

    steps: int
    buckets: tuple[int, ...]
    vocab_size: int


class DraftChain:
    """The drafts of a chain after the first one, for each request of a batch, as one replay.

    Args:
        draft: the traced draft, with its embedding set and its weights loaded. If the host has its
            layers, it has its embedding, too.
        head: the output head, [V or more, H]; or the host's module, which maps [R, H] to the logits
            of all ranks, [R, V].
        pools: the host's cache of the draft's one attention layer.
        plan: sizes of the graphs.
        backend: lowers and captures the graphs.

    Raises:
        UnsupportedModelError: the draft has not exactly one attention layer, or one whose keys are
            its values.
    """

    def __init__(
        self,
        draft: TracedDraft,
        head: Tensor | nn.Module,
        pools: HostPools,
        plan: ChainPlan,
        backend: Backend,
    ):
        if len(draft.sites) != 1:
            raise UnsupportedModelError(
                f"{draft.family.name}: its MTP layer has {len(draft.sites)} attention layers; a "
                "chain over a host's pools supports one"
            )
        if draft.sites[0].kind == "shared":
            raise UnsupportedModelError(
                f"{draft.family.name}: the keys of its MTP layer are its values, which hosts store "
                "in formats of their own; a chain needs a pool of K and V or of latents"
            )
        self.plan, self.pools = plan, pools
        layer = _ChainedLayer(draft, pools)
        heads = _Head(head, plan.vocab_size, None if draft.returns_normed else draft.final_norm)
        self._buffer_names = layer.buffer_names()
        self._lowering = Lowering(backend, self._buffer_names, make_plan(CompileOptions()))
        self._weights = Weights(_weights(layer, heads, self._buffer_names))
        self._width = draft.config.get_text_config(decoder=True).hidden_size
        self._pieces = _export(layer, heads, pools, self._width)
        self._called = (draft, head)  # The graphs call their modules by number.
        with torch.no_grad():
            self._captured = {
                count: self._capture(count) for count in sorted(plan.buckets, reverse=True)
            }

    def propose(
        self, first_ids: Tensor, features: Tensor, context_lens: Tensor, block_table: Tensor
    ) -> Tensor:
        """Draft the tokens after the first draft.

        This writes the pools' rows at positions context_lens to context_lens + steps - 1.

        Args:
            first_ids: int64 [R], the first draft of each request.
            features: [R, H], what the draft returned in the row that proposed `first_ids`.
            context_lens: int [R], the position of the first draft, which is the number of tokens
                whose rows in the pool are final.
            block_table: int [R, columns], the pages of each request.

        Returns:
            int64 [R, steps], the drafts after the first one. The next call overwrites it.

        Raises:
            CapacityError: more requests than the largest bucket holds, or wider block tables.
        """
        count, columns = block_table.shape
        bucket = min((b for b in self._captured if b >= count), default=None)
        if bucket is None or columns > self.pools.num_blocks:
            raise CapacityError(
                f"a chain for {count} requests of {columns} pages; expected at most "
                f"{max(self._captured)} of {self.pools.num_blocks}"
            )
        captured = self._captured[bucket]
        buffers = captured.buffers
        buffers["batch.first_ids"][:count].copy_(first_ids)
        buffers["batch.features"][:count].copy_(features)
        buffers["batch.context_lens"][:count].copy_(context_lens)
        buffers["batch.block_table"][:count, :columns].copy_(block_table)
        buffers["batch.block_table"][:count, columns:].zero_()
        buffers["batch.active"][:count].fill_(True)
        buffers["batch.active"][count:].fill_(False)
        captured.replay()
        return buffers["batch.drafts"][:count]

    @property
    def graphs(self) -> dict[int, StepGraph]:
        """The rewritten graph of each bucket."""
        graphs = {bucket: captured.graph for bucket, captured in self._captured.items()}
        return {bucket: graph for bucket, graph in graphs.items() if graph is not None}

    def _layout(self, num_reqs: int) -> Layout:
        host = [
            BufferSpec(f"batch.{name}", (num_reqs, *width), dtype, 0, HOST)
            for name, width, dtype in (
                ("first_ids", (), torch.int64),
                ("features", (self._width,), self.pools.like.dtype),
                ("context_lens", (), torch.int32),
                ("active", (), torch.bool),
                ("block_table", (self.pools.num_blocks,), torch.int32),
            )
        ]
        drafts = BufferSpec("batch.drafts", (num_reqs, self.plan.steps), torch.int64)
        names = self._buffer_names.values()
        pools = [
            BufferSpec(name, tuple(pool.shape), pool.dtype)
            for name, pool in zip(names, self.pools.tensors.values(), strict=True)
        ]
        return Layout([*host, drafts, *pools], {})

    def _capture(self, num_reqs: int) -> CapturedStep:
        key, layout = StepKey.decode(num_reqs, self.plan.steps), self._layout(num_reqs)
        chain = _Chain(key, self._pieces, layout, self.pools.page_size, self.pools.like.device)
        graph = StepGraph(
            fx.GraphModule(chain, LeafTracer().trace(chain)),
            key,
            layout,
            self._weights,
            [],
            "propose",
        )
        self._lowering.rewrite(graph)
        start, opening = time.perf_counter(), partial(get_tensor, graph.module)
        sizes = {str(symbol): number for symbol, number in layout.sizes.items()}
        with torch.no_grad():
            opened = self._lowering.backend.build(graph).open(opening, sizes)
        seconds, own = time.perf_counter() - start, opened.graph or graph
        return CapturedStep(key, layout, graph.buffers(), opened.run, seconds, own)


class _ChainedLayer(nn.Module):
    """The MTP layer over single rows: (ids, features, *Rows, block_table) -> features.

    Its cache is the host's pools.
    """

    def __init__(self, draft: TracedDraft, pools: HostPools):
        super().__init__()
        self.rotary, self.normed = draft.graph.get_submodule("inner.rotary"), draft.returns_normed
        text = draft.config.get_text_config(decoder=True)
        self.layer: MTPLayer
        self.embedding: nn.Module
        if draft.hosted:
            self.layer = with_host_calls(draft, pools.like)
            self.embedding = HostCall(draft.embedding, text.hidden_size, pools.like.dtype)
        else:
            self.layer = draft.layer
            self.embedding = nn.Embedding.from_pretrained(draft.embedding.weight.detach())
        index = text.num_hidden_layers + draft.index
        named = {f"kv.{index}.{role}": tensor for role, tensor in pools.tensors.items()}
        self.pool = CachePool(named, num_slots=1)
        self._names = list(named)

    def buffer_names(self) -> dict[int, str]:
        """Layout name by tensor id, for the pools."""
        return {id(b): n for b, n in zip(self.pool.buffers(), self._names, strict=True)}

    def forward(
        self,
        ids: Tensor,
        features: Tensor,
        *rows_and_table: Tensor,
    ) -> Tensor:
        rows, block_table = Rows(*rows_and_table[:-1]), rows_and_table[-1]
        none = torch.zeros_like(rows.seq_lens)  # No state by request slot, and no row is certain.
        metadata = (*rows, block_table, none, none)
        context = StepContext.of(metadata, self.pool.layers())
        hidden, _ = run_mtp_layer(self.layer, self.rotary, self.embedding(ids), features, context)  # type: ignore[arg-type]
        return self.layer.final_norm(hidden) if self.normed else hidden


class _Head(nn.Module):
    """Features [R, H] -> logits [R, V]."""

    def __init__(self, head: Tensor | nn.Module, vocab_size: int, norm: nn.Module | None):
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.vocab_size = vocab_size
        self.logits: nn.Module
        if isinstance(head, nn.Module):
            self.logits = HostCall(head, vocab_size)
        else:
            rows, width = head.shape
            self.logits = nn.Linear(width, rows, bias=False, device="meta")
            self.logits.weight = nn.Parameter(head.detach(), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(features))
        return logits[:, : self.vocab_size]


class _Chain(nn.Module):
    """The chain as a program over buffers; `forward` takes and returns nothing."""

    def __init__(
        self,
        key: StepKey,
        traced: tuple[fx.GraphModule, fx.GraphModule],
        layout: Layout,
        page_size: int,
        device: torch.device,
    ):
        super().__init__()
        self.steps = key.spec_tokens
        self.pieces: Any = nn.Module()
        self.pieces.drafts, self.pieces.draft_heads = (nn.ModuleList([t]) for t in traced)
        self.pieces.chain_metadata, self.pieces.pick = ChainMetadata(key, page_size), Pick()
        self.batch: Any = nn.Module()
        for name in layout:
            if name.startswith("batch."):
                buffer = layout.allocate(name, device)
                self.batch.register_buffer(name.removeprefix("batch."), buffer, persistent=False)

    def forward(self) -> None:
        batch, pieces = self.batch, self.pieces
        ids, features, lens = batch.first_ids, batch.features, batch.context_lens
        drafts = []
        for _ in range(self.steps):
            results = pieces.chain_metadata(lens, batch.active, batch.block_table)
            *rows, lens = unpack(Chained, results)
            features = pieces.drafts[0](ids, features, *rows, batch.block_table)
            ids = pieces.pick(pieces.draft_heads[0](features))
            drafts.append(ids)
        aten.copy_.default(batch.drafts, aten.stack.default(drafts, 1))


def _weights(layer: nn.Module, head: nn.Module, buffers: Mapping[int, str]) -> dict[str, Tensor]:
    """All tensors of layer and head except the host's pools, by name."""
    named = {}
    for prefix, module in (("draft", layer), ("draft_head", head)):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in buffers:
                named[f"{prefix}.{name}"] = tensor
    return named


def _export(
    layer: _ChainedLayer, head: _Head, pools: HostPools, width: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Trace layer and head with symbolic numbers of rows and requests, once for all buckets."""
    rows = torch.zeros(TRACE_TOKENS, dtype=torch.int64, device=pools.like.device)
    requests = torch.zeros(TRACE_REQS, dtype=torch.int32, device=pools.like.device)
    features = pools.like.new_zeros(TRACE_TOKENS, width)
    tables = requests.new_zeros(TRACE_REQS, pools.num_blocks)
    starts = requests.new_zeros(TRACE_REQS + 1)
    where = Rows(rows.clone(), rows.clone(), requests, starts)
    example = (rows, features, *where, tables)
    return export_piece(layer, example), export_piece(head, (features,))
