"""What a host must know of each buffer: the table of docs/embedding.md, and its rows in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from mtpc.errors import GraphError
from mtpc.layout import Layout

By = Literal["host", "verify", "propose"]
"""Who writes: the host, or one of the halves (with K = 0 there is only `verify`)."""


@dataclass(frozen=True)
class Term:
    """One row of the contract.

    Attributes:
        pattern: buffers it is of; `*` stands for a layer's index or a value's name.
        dims: shape in symbols.
        dtype: element type; "model" is the weights'.
        pad: what makes a row that is not used harmless, and the value before anything is written;
            None where it may be anything.
        by: who writes it.
        meaning: what it holds, and when it is written.
    """

    pattern: str
    dims: str
    dtype: str
    pad: int | None
    by: tuple[By, ...]
    meaning: str


_HALVES: tuple[By, ...] = ("verify", "propose")
CONTRACT = (
    Term("state.block_table", "[S, M]", "int32", 0, ("host",),
         "pages of a request in order; 0 after the last one it owns. At join, and an entry when "
         "it gets a page"),
    Term("state.committed_lens", "[S]", "int32", 0, ("host", "propose"),
         "tokens whose cache rows are final. The host writes 0 at join"),
    Term("state.token_ids", "[S, K+1]", "int64", 0, ("host", "propose"),
         "the last emitted token, then the drafts to verify next. The prefill's last chunk makes "
         "it; the host may put other drafts in columns 1 to K"),
    Term("state.remaining_tokens", "[S]", "int32", 0, ("host", "propose"),
         "new tokens the request may still emit; 0: its row is off. The host writes it at join"),
    Term("state.stop_ids", "[S, 8]", "int64", -1, ("host",),
         "token ids that end the request, -1 where unused. At join"),
    Term("state.chain_*", "[S, ...]", "int64 or model", None, ("propose",),
         "what several MTP layers keep of the last rows"),
    Term("state.sampling_floats", "[S, 6]", "float64", 0, ("host",),
         "with sampling: `mtpc.sampling_params.FLOATS`, by column. At join"),
    Term("state.sampling_ints", "[S, 6]", "int64", 0, ("host",),
         "with sampling: `mtpc.sampling_params.INTS`, by column. At join"),
    Term("state.bias_ids", "[S, 256]", "int64", -1, ("host",),
         "with sampling: token ids with a bias, -1 where unused. At join"),
    Term("state.bias_values", "[S, 256]", "float64", 0, ("host",),
         "with sampling: their biases. At join"),
    Term("state.allowed_tokens", "[S, V/32]", "int32", -1, ("host",),
         "with sampling: a bit a token; read where column `masked` is 1. At join"),
    Term("state.prompt_tokens", "[S, V/32]", "int32", 0, ("host",),
         "with sampling: a bit a token; read where column `penalised` is 1. At join"),
    Term("state.output_counts", "[S, V]", "int32", 0, ("host", "propose"),
         "with sampling: how often each token was emitted; read where column `penalised` is 1. "
         "At join, 0 or the counts so far"),
    Term("kv.*.k", "[N, P, H, D]", "model", None, _HALVES,
         "keys by page. `verify` writes the target's layers, `propose` the MTP layers'"),
    Term("kv.*.v", "[N, P, H, D]", "model", None, _HALVES, "values by page, likewise"),
    Term("kv.*.latent", "[N, P, D]", "model", None, _HALVES, "latents by page, likewise"),
    Term("kv.*.index", "[N, P, D]", "model", None, _HALVES,
         "DeepSeek-V3.2: its indexer's keys by page, likewise"),
    Term("kv.*.ring_k", "[(S-1)n+1, P, H, D]", "model", None, _HALVES,
         "keys of a sliding window: pages 1+(s-1)n to sn belong to slot s"),
    Term("kv.*.ring_v", "[(S-1)n+1, P, H, D]", "model", None, _HALVES, "its values, likewise"),
    Term("kv.*.recurrent", "[S, H, D, D]", "float32 or float64", None, ("verify",),
         "Gated DeltaNet: state matrices by slot"),
    Term("kv.*.history", "[S, B, C]", "model", None, ("verify",), "its last inputs, by slot"),
    Term("kv.*.standing", "[S]", "int32", None, ("verify",), "positions its state has seen"),
    Term("kv.*.window", "[S, n, D]", "model", None, _HALVES,
         "DeepSeek-V4: a ring of the last keys, by slot"),
    Term("kv.*.raw", "[S, n, D]", "model", None, ("verify",), "its compressor's inputs, by slot"),
    Term("kv.*.entries", "[S, n, D]", "model", None, ("verify",),
         "its compressed entries, by slot"),
    Term("kv.*.index_raw", "[S, n, D]", "model", None, ("verify",),
         "its indexer's inputs, by slot"),
    Term("kv.*.index_entries", "[S, n, D]", "model", None, ("verify",), "its indexer's entries"),
    Term("batch.state_indices", "[R]", "int64", 0, ("host",),
         "slot of each row of the batch, each slot once; 0: the row is off. Before a replay, "
         "where it changed"),
    Term("batch.positions", "[T]", "int64", 0, _HALVES, "metadata of attention, from lengths"),
    Term("batch.slot_mapping", "[T]", "int64", -1, _HALVES, "likewise"),
    Term("batch.seq_lens", "[R]", "int32", 0, _HALVES, "likewise"),
    Term("batch.query_start_loc", "[R+1]", "int32", 0, _HALVES, "likewise"),
    Term("batch.out_token_ids", "[R, K+1]", "int64", 0, ("verify",),
         "result: emitted tokens; the first num_emitted count"),
    Term("batch.num_emitted", "[R]", "int32", 0, ("verify",),
         "result: 1 to K+1; 0 for a row that is off and a chunk that is not a prompt's last; where "
         "logits are not finite, those before"),
    Term("batch.num_accepted", "[R]", "int32", 0, ("verify",), "result: drafts that were right"),
    Term("batch.stop_reason", "[R]", "int32", 0, ("verify",),
         "result: 0 goes on, 1 length, 2 stop token, 3 non-finite logits"),
    Term("batch.out_logprobs", "[R, K+1]", "float64", 0, ("verify",),
         "with sampling: log-probabilities of the emitted tokens"),
    Term("batch.out_top_ids", "[R, K+1, L]", "int64", 0, ("verify",),
         "with sampling: most probable tokens"),
    Term("batch.out_top_logprobs", "[R, K+1, L]", "float64", 0, ("verify",), "their own"),
    Term("batch.token_mask", "[R(K+1), V/32]", "int32", -1, ("host",),
         "with token_mask: a bit a token, for each row of logits, of which a prompt's is the first "
         "of its K + 1. Before each replay"),
    Term("batch.draft_mask", "[R(K+1), K, V/32]", "int32", -1, ("host",),
         "with token_mask: a bit a token, for each draft to be made, by the row that was accepted "
         "last, of a prompt the first. Before `propose`"),
    Term("batch.prompt_ids", "[T]", "int64", 0, ("host",),
         "prefill: the chunk's tokens; what is behind num_input may be anything"),
    Term("batch.num_input", "[R]", "int32", 0, ("host",), "prefill: how many they are"),
    Term("batch.next_prompt_id", "[R]", "int64", -1, ("host",),
         "prefill: the prompt's token after the chunk; -1 after the last"),
    Term("batch.is_decoding", "[R]", "int32", 0, ("host",),
         "prefill: 1 in the row of a request that decodes in this step: it has the K + 1 tokens of "
         "a decode step, and its num_input counts for nothing"),
    Term("batch.logits_start_loc", "[R+1]", "int32", 0, ("verify",),
         "prefill: rows of logits, up to each request"),
    Term("cross.*", "any", "any", None, ("verify",),
         "what `verify` hands to `propose`; opaque. Names and shapes are those of `step_buffers`"),
)  # fmt: skip
"""Every buffer a host may be asked for."""


def term_of(name: str) -> Term:
    """The contract's row of a buffer."""
    for term in CONTRACT:
        if fnmatchcase(name, term.pattern):
            return term
    raise GraphError(f"{name} is in no row of the contract with hosts (mtpc/host/contract.py)")


def contract_table() -> str:
    """The contract as a Markdown table, as it stands in docs/embedding.md."""
    lines = ["| buffer | shape | dtype | pad | written by | what |", "|---|---|---|---|---|---|"]
    for term in CONTRACT:
        pad = "any" if term.pad is None else term.pad
        by = ", ".join(term.by)
        name, dims = f"`{term.pattern}`", term.dims
        lines.append(f"| {name} | {dims} | {term.dtype} | {pad} | {by} | {term.meaning} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class HostBuffer:
    """A tensor that the host is to provide: contiguous, of exactly this shape and dtype.

    Attributes:
        name: as in the contract.
        shape: sizes.
        dtype: element type.
        pad: the value of rows that are not used; see `Term.pad`.
        by: who writes it.
        meaning: what it holds, and when it is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int
    by: tuple[By, ...]
    meaning: str

    @property
    def strides(self) -> tuple[int, ...]:
        """Of a contiguous tensor, in elements."""
        sizes = [1]
        for size in reversed(self.shape[1:]):
            sizes.append(sizes[-1] * max(size, 1))
        return tuple(reversed(sizes)) if self.shape else ()

    @property
    def is_paged(self) -> bool:
        """Whether its rows are pages that the block table names: the host's own pool, or a part."""
        return self.name.startswith("kv.") and term_of(self.name).dims.startswith("[N,")

    def allocate(self, device: torch.device | str = "cpu") -> Tensor:
        """A new tensor that fits, filled with `pad`; for hosts that have none of their own."""
        return torch.full(self.shape, self.pad, dtype=self.dtype, device=device)


def host_buffers(layout: Layout, names: Iterable[str]) -> dict[str, HostBuffer]:
    """Buffers of a layout as the host sees them."""
    buffers = {}
    for name in names:
        term, spec = term_of(name), layout[name]
        buffers[name] = HostBuffer(
            name, layout.shape(name), spec.dtype, spec.pad, term.by, term.meaning
        )
    return buffers
