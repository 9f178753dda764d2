"""Buffers of a step: each size is written once, as a symbol, and checked everywhere.

A captured step owns no hidden memory. Everything it reads or writes between steps is a named
buffer declared here by a `BufferSpec`; a `Layout` binds the symbols to numbers for one bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import sympy
import torch

from mtpc.errors import GraphError

R, Q, K, M, P, N, S, E = sympy.symbols("R Q K M P N S E", integer=True, nonnegative=True)
"""num_reqs, query_len, drafts, blocks a request, page size, pages, request slots, stop ids."""
K_MAX = sympy.Symbol("K_max", integer=True, nonnegative=True)
"""The largest K of a program: state rows are wide enough for it."""
T = R * Q
"""Flat tokens of a bucket: num_reqs * query_len."""

Dim: TypeAlias = int | sympy.Expr
Writer = Literal["host", "step", "both"]
Phase = Literal["decode", "prefill"]

SCRATCH_SLOT = 0
"""Request slot that padded rows of a bucket point at. It never holds a request."""
NULL_PAGE = 0
"""KV page that unused block-table entries point at. It is never written."""
NO_SLOT = -1
"""slot_mapping value that means: write nowhere."""


@dataclass(frozen=True, order=True)
class Bucket:
    """A captured shape: `num_reqs` rows of at most `query_len` tokens each."""

    num_reqs: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.query_len


@dataclass(frozen=True, order=True)
class StepKey:
    """What selects a captured step: its shape, its number of drafts, and its phase.

    A decode step has query_len == spec_tokens + 1 tokens in every row (the last emitted token
    and the drafts to verify). A prefill step packs up to num_reqs * query_len prompt tokens.
    """

    phase: Phase
    bucket: Bucket
    spec_tokens: int

    def __post_init__(self) -> None:
        if self.phase == "decode" and self.bucket.query_len != self.spec_tokens + 1:
            raise GraphError(
                f"decode step with query_len {self.bucket.query_len} and spec_tokens "
                f"{self.spec_tokens}; query_len must be spec_tokens + 1"
            )

    @classmethod
    def decode(cls, num_reqs: int, spec_tokens: int) -> StepKey:
        return cls("decode", Bucket(num_reqs, spec_tokens + 1), spec_tokens)

    @classmethod
    def prefill(cls, num_reqs: int, chunk: int, spec_tokens: int) -> StepKey:
        return cls("prefill", Bucket(num_reqs, chunk), spec_tokens)

    def __str__(self) -> str:
        b = self.bucket
        return f"{self.phase}[R={b.num_reqs},Q={b.query_len},K={self.spec_tokens}]"


@dataclass(frozen=True)
class BufferSpec:
    """One named buffer.

    Attributes:
        name: dotted name: `state.*` (rows by request slot, shared by all buckets), `kv.*` (page
            pools, shared), `batch.*` (one set per bucket).
        dims: sizes as integers or expressions over the symbols of this module.
        dtype: element type.
        pad: value that makes a padded row harmless; also the initial value.
        writer: who writes it between steps: the host, the step itself, or both.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype
    pad: int = 0
    writer: Writer = "step"

    @property
    def shared(self) -> bool:
        """Whether all buckets use the same tensor."""
        return not self.name.startswith("batch.")


class Layout(Mapping[str, BufferSpec]):
    """The buffers of one step and the numbers behind their symbols (immutable)."""

    def __init__(self, specs: Iterable[BufferSpec], sizes: Mapping[sympy.Symbol, int]):
        self._specs = {spec.name: spec for spec in specs}
        self.sizes = dict(sizes)

    def __getitem__(self, name: str) -> BufferSpec:
        return self._specs[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def value(self, dim: Dim) -> int:
        """The number a dimension has at this bucket."""
        return int(sympy.sympify(dim).subs(self.sizes))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.value(dim) for dim in self[name].dims)

    def nbytes(self, name: str) -> int:
        count = 1
        for size in self.shape(name):
            count *= size
        return count * self[name].dtype.itemsize

    def resized(self, name: str, dims: tuple[Dim, ...]) -> Layout:
        """A layout in which one buffer has other dimensions."""
        specs = dict(self._specs)
        specs[name] = replace(specs[name], dims=dims)
        return Layout(specs.values(), self.sizes)

    def extended(self, specs: Iterable[BufferSpec]) -> Layout:
        """A layout with further buffers."""
        return Layout([*self._specs.values(), *specs], self.sizes)

    def allocate(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor for one buffer, filled with its padding value."""
        spec = self[name]
        return torch.full(self.shape(name), spec.pad, dtype=spec.dtype, device=device)


def state_specs() -> tuple[BufferSpec, ...]:
    """Per-request rows that live on the device between steps, indexed by request slot."""
    return (
        BufferSpec("state.block_table", (S, M), torch.int32, NULL_PAGE, "host"),
        BufferSpec("state.committed_lens", (S,), torch.int32, 0, "both"),
        BufferSpec("state.token_ids", (S, K_MAX + 1), torch.int64, 0, "both"),
        BufferSpec("state.remaining_tokens", (S,), torch.int32, 0, "both"),
        BufferSpec("state.stop_ids", (S, E), torch.int64, -1, "host"),
    )


def batch_specs(phase: Phase) -> tuple[BufferSpec, ...]:
    """Per-bucket buffers, with metadata sized as PLAIN DECODING has it: one token a request.

    The pass `resize-metadata` grows what a multi-token step needs to num_reqs * query_len.
    """
    common = (
        BufferSpec("batch.state_indices", (R,), torch.int64, SCRATCH_SLOT, "host"),
        BufferSpec("batch.positions", (R,), torch.int64, 0),
        BufferSpec("batch.slot_mapping", (R,), torch.int64, NO_SLOT),
        BufferSpec("batch.seq_lens", (R,), torch.int32, 0),
        BufferSpec("batch.query_start_loc", (R + 1,), torch.int32, 0),
        BufferSpec("batch.out_token_ids", (R, K + 1), torch.int64, 0),
        BufferSpec("batch.num_emitted", (R,), torch.int32, 0),
        BufferSpec("batch.num_accepted", (R,), torch.int32, 0),
        BufferSpec("batch.stop_reason", (R,), torch.int32, 0),
    )
    if phase == "decode":
        return common
    return (
        *common,
        BufferSpec("batch.prompt_ids", (T,), torch.int64, 0, "host"),
        BufferSpec("batch.num_input", (R,), torch.int32, 0, "host"),
        BufferSpec("batch.next_prompt_id", (R,), torch.int64, -1, "host"),
    )
