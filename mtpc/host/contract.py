"""The contract with hosts: what each buffer holds and who writes it (docs/embedding.md)."""

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
"""Who writes a buffer: the host, or one half of the step. With K = 0 there is only `verify`."""


@dataclass(frozen=True)
class Term:
    """One row of the contract.

    Attributes:
        pattern: name of the buffers; `*` stands for the index of a layer or the name of a value.
        dims: shape in symbols.
        dtype: element type; "model" is the dtype of the weights.
        pad: initial value, and value of unused rows; None if any value will do.
        by: who writes the buffer.
        meaning: what it holds, and when the host writes it.
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
         "pages of a request in order; 0 after its last page. Written at join, and one entry "
         "when the request gets a page"),
    Term("state.committed_lens", "[S]", "int32", 0, ("host", "propose"),
         "number of tokens whose cache rows are final. Written at join: 0"),
    Term("state.token_ids", "[S, K+1]", "int64", 0, ("host", "propose"),
         "the last emitted token, then the drafts to verify next. The last prefill chunk fills "
         "it; the host may write other drafts to columns 1 to K"),
    Term("state.remaining_tokens", "[S]", "int32", 0, ("host", "propose"),
         "number of tokens that the request may still emit; 0: its row is inactive. Written at "
         "join"),
    Term("state.stop_ids", "[S, 8]", "int64", -1, ("host",),
         "token ids that end the request; -1: unused. Written at join"),
    Term("state.chain_*", "[S, ...]", "int64 or model", None, ("propose",),
         "with several MTP layers: what they keep of the last rows"),
    Term("state.sampling_floats", "[S, 6]", "float64", 0, ("host",),
         "with sampling: the columns `mtpc.sampling_params.FLOATS`. Written at join"),
    Term("state.sampling_ints", "[S, 6]", "int64", 0, ("host",),
         "with sampling: the columns `mtpc.sampling_params.INTS`. Written at join"),
    Term("state.bias_ids", "[S, 256]", "int64", -1, ("host",),
         "with sampling: token ids with a bias; -1: unused. Written at join"),
    Term("state.bias_values", "[S, 256]", "float64", 0, ("host",),
         "with sampling: the biases of `bias_ids`. Written at join"),
    Term("state.allowed_tokens", "[S, V/32]", "int32", -1, ("host",),
         "with sampling: one bit per token, set if it is allowed; read only where the column "
         "`masked` is 1. Written at join"),
    Term("state.prompt_tokens", "[S, V/32]", "int32", 0, ("host",),
         "with sampling: one bit per token, set if it is in the prompt; read only where the "
         "column `penalised` is 1. Written at join"),
    Term("state.output_counts", "[S, V]", "int32", 0, ("host", "propose"),
         "with sampling: how often each token was emitted; read only where the column "
         "`penalised` is 1. Written at join: 0, or the counts so far"),
    Term("kv.*.k", "[N, P, H, D]", "model", None, _HALVES,
         "keys by page. `verify` writes those of the target's layers, `propose` those of MTP "
         "layers"),
    Term("kv.*.v", "[N, P, H, D]", "model", None, _HALVES, "values by page, likewise"),
    Term("kv.*.latent", "[N, P, D]", "model", None, _HALVES, "latents by page, likewise"),
    Term("kv.*.index", "[N, P, D]", "model", None, _HALVES,
         "DeepSeek-V3.2: indexer keys by page, likewise"),
    Term("kv.*.ring_k", "[(S-1)n+1, P, H, D]", "model", None, _HALVES,
         "keys of a sliding window: pages 1+(s-1)n to sn belong to slot s"),
    Term("kv.*.ring_v", "[(S-1)n+1, P, H, D]", "model", None, _HALVES,
         "values of a sliding window, likewise"),
    Term("kv.*.recurrent", "[S, H, D, D]", "float32 or float64", None, ("verify",),
         "Gated DeltaNet: state matrices by slot"),
    Term("kv.*.history", "[S, B, C]", "model", None, ("verify",),
         "Gated DeltaNet: the last inputs by slot"),
    Term("kv.*.standing", "[S]", "int32", None, ("verify",),
         "Gated DeltaNet: number of positions that are in the state"),
    Term("kv.*.window", "[S, n, D]", "model", None, _HALVES,
         "DeepSeek-V4: a ring of the last keys by slot"),
    Term("kv.*.raw", "[S, n, D]", "model", None, ("verify",),
         "DeepSeek-V4: inputs of the compressor by slot"),
    Term("kv.*.entries", "[S, n, D]", "model", None, ("verify",),
         "DeepSeek-V4: compressed entries by slot"),
    Term("kv.*.index_raw", "[S, n, D]", "model", None, ("verify",),
         "DeepSeek-V4: inputs of the indexer by slot"),
    Term("kv.*.index_entries", "[S, n, D]", "model", None, ("verify",),
         "DeepSeek-V4: compressed entries of the indexer by slot"),
    Term("batch.state_indices", "[R]", "int64", 0, ("host",),
         "slot of each row of the batch, each slot at most once; 0: the row is inactive. Written "
         "before a replay if it changed"),
    Term("batch.positions", "[T]", "int64", 0, _HALVES, "attention metadata, from lengths"),
    Term("batch.slot_mapping", "[T]", "int64", -1, _HALVES, "attention metadata, from lengths"),
    Term("batch.seq_lens", "[R]", "int32", 0, _HALVES, "attention metadata, from lengths"),
    Term("batch.query_start_loc", "[R+1]", "int32", 0, _HALVES,
         "attention metadata, from lengths"),
    Term("batch.out_token_ids", "[R, K+1]", "int64", 0, ("verify",),
         "result: emitted tokens, the first num_emitted of each row"),
    Term("batch.num_emitted", "[R]", "int32", 0, ("verify",),
         "result: number of emitted tokens, 1 to K+1. 0 for an inactive row, and for a chunk that "
         "is not the last of its prompt. Tokens from the first non-finite logits on do not count"),
    Term("batch.num_accepted", "[R]", "int32", 0, ("verify",),
         "result: number of accepted drafts"),
    Term("batch.stop_reason", "[R]", "int32", 0, ("verify",),
         "result: 0 the request goes on, 1 length, 2 stop token, 3 non-finite logits"),
    Term("batch.out_logprobs", "[R, K+1]", "float64", 0, ("verify",),
         "with sampling: log-probabilities of the emitted tokens"),
    Term("batch.out_top_ids", "[R, K+1, L]", "int64", 0, ("verify",),
         "with sampling: the most probable tokens"),
    Term("batch.out_top_logprobs", "[R, K+1, L]", "float64", 0, ("verify",),
         "with sampling: log-probabilities of the most probable tokens"),
    Term("batch.token_mask", "[R(K+1), V/32]", "int32", -1, ("host",),
         "with token_mask: one bit per token for each row of logits; a prompt has the first of "
         "its K + 1 rows. Written before each replay"),
    Term("batch.draft_mask", "[R(K+1), K, V/32]", "int32", -1, ("host",),
         "with token_mask: one bit per token for each draft. A request reads the row of its last "
         "accepted token, a prompt its first row. Written before `propose`"),
    Term("batch.prompt_ids", "[T]", "int64", 0, ("host",),
         "prefill: tokens of the chunks, packed; the rest may be anything"),
    Term("batch.num_input", "[R]", "int32", 0, ("host",),
         "prefill: number of tokens in each request's chunk"),
    Term("batch.next_prompt_id", "[R]", "int64", -1, ("host",),
         "prefill: the prompt's token after the chunk; -1 after the last chunk"),
    Term("batch.is_decoding", "[R]", "int32", 0, ("host",),
         "prefill: 1 if the request decodes in this step. It then has the K + 1 tokens of a "
         "decode step, and its num_input is ignored"),
    Term("batch.logits_start_loc", "[R+1]", "int32", 0, ("verify",),
         "prefill: where each request's rows of logits begin, and their total"),
    Term("cross.*", "any", "any", None, ("verify",),
         "values that `verify` passes to `propose`. `step_buffers` gives names and shapes"),
)  # fmt: skip
"""Every buffer that a host may have to provide."""


def term_of(name: str) -> Term:
    """The row of the contract for a buffer.

    Raises:
        GraphError: the contract has none.
    """
    for term in CONTRACT:
        if fnmatchcase(name, term.pattern):
            return term
    raise GraphError(f"the contract with hosts has no row for {name}; add one to CONTRACT")


def contract_table() -> str:
    """The contract as the Markdown table of docs/embedding.md."""
    lines = ["| buffer | shape | dtype | pad | written by | what |", "|---|---|---|---|---|---|"]
    for term in CONTRACT:
        pad = "any" if term.pad is None else term.pad
        by = ", ".join(term.by)
        name, dims = f"`{term.pattern}`", term.dims
        lines.append(f"| {name} | {dims} | {term.dtype} | {pad} | {by} | {term.meaning} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class HostBuffer:
    """A tensor that the host provides: contiguous, of exactly this shape and dtype.

    Attributes:
        name: buffer name.
        shape: sizes.
        dtype: element type.
        pad: initial value, and value of unused rows.
        by: who writes the buffer.
        meaning: what it holds, and when the host writes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int
    by: tuple[By, ...]
    meaning: str

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of a contiguous tensor of this shape, in elements."""
        sizes = [1]
        for size in reversed(self.shape[1:]):
            sizes.append(sizes[-1] * max(size, 1))
        return tuple(reversed(sizes)) if self.shape else ()

    @property
    def is_paged(self) -> bool:
        """Whether its rows are pages of the block table, so that it may be a host's own pool."""
        return self.name.startswith("kv.") and term_of(self.name).dims.startswith("[N,")

    def allocate(self, device: torch.device | str = "cpu") -> Tensor:
        """A new tensor for this buffer, filled with `pad`."""
        return torch.full(self.shape, self.pad, dtype=self.dtype, device=device)


def host_buffers(layout: Layout, names: Iterable[str]) -> dict[str, HostBuffer]:
    """The named buffers of a layout, by name, with their rows of the contract."""
    buffers = {}
    for name in names:
        term, spec = term_of(name), layout[name]
        buffers[name] = HostBuffer(
            name, layout.shape(name), spec.dtype, spec.pad, term.by, term.meaning
        )
    return buffers
