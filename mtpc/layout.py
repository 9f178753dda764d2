"""Shapes, keys and buffers of a step: each size is written once and checked everywhere.

A captured step owns no hidden memory. Everything it reads or writes between steps is a named
buffer declared by a `BufferSpec`; a `Layout` binds the symbols of its sizes (see `buffers`) to
numbers for one bucket. In a program from the cache they are numbers: sympy is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from mtpc.config import CompileOptions
from mtpc.errors import GraphError

if TYPE_CHECKING:
    import sympy

Dim: TypeAlias = "int | sympy.Expr"
Writer = Literal["host", "step", "both"]
Phase = Literal["decode", "prefill"]
Part = Literal["step", "verify", "propose"]
"""The whole step, or which half of a split one."""

RESULT_BUFFERS = (
    "batch.out_token_ids",
    "batch.num_accepted",
    "batch.num_emitted",
    "batch.stop_reason",
    "batch.out_logprobs",
    "batch.out_top_ids",
    "batch.out_top_logprobs",
)
"""What a host reads after a step, or after its `verify`; the last three where it samples."""
SCRATCH_SLOT = 0
"""Request slot that padded rows of a bucket point at. It never holds a request."""
NULL_PAGE = 0
"""KV page that unused block-table entries point at. It is never written."""
NO_SLOT = -1
"""slot_mapping value that means: write nowhere."""
MAX_STOP_IDS = 8
"""Stop-token ids a request may have."""
RUNNING, STOPPED_BY_LENGTH, STOPPED_BY_TOKEN, STOPPED_BY_NONFINITE = range(4)
"""Values of `batch.stop_reason`."""
StopReason = Literal["length", "stop", "nonfinite"]
STOP_REASONS: dict[int, StopReason] = {
    STOPPED_BY_LENGTH: "length",
    STOPPED_BY_TOKEN: "stop",
    STOPPED_BY_NONFINITE: "nonfinite",
}
"""What the host calls them."""


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
    and the drafts to verify). A prefill step packs up to num_reqs * query_len tokens, of prompts
    and of requests that decode.
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

    @property
    def max_emitted(self) -> int:
        """Tokens that the step can emit of a request."""
        return self.spec_tokens + 1

    @property
    def num_logits(self) -> int:
        """Rows of logits: of a prompt its last one, of who decodes all."""
        return self.bucket.num_reqs * self.max_emitted

    def __str__(self) -> str:
        b = self.bucket
        return f"{self.phase}[R={b.num_reqs},Q={b.query_len},K={self.spec_tokens}]"


def step_name(key: StepKey, part: Part) -> str:
    """What to call a step, or a half of one, in messages and file names."""
    return str(key) if part == "step" else f"{key}.{part}"


def step_keys(options: CompileOptions) -> tuple[StepKey, ...]:
    """The steps that options ask for: a decode step per bucket and tier, and a prefill step."""
    decode = tuple(
        StepKey.decode(num_reqs, k) for k in options.tiers for num_reqs in options.batch_buckets
    )
    return (*decode, StepKey.prefill(*options.prefill_shape, options.spec_tokens))


def largest_first(keys: Iterable[StepKey]) -> list[StepKey]:
    """The order to compile in: what takes longest, and most memory, comes first."""
    return sorted(keys, key=lambda key: key.bucket.num_tokens, reverse=True)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class BufferSpec:
    """One named buffer.

    Attributes:
        name: dotted name: `state.*` (rows by request slot, shared by all buckets), `kv.*` (layers'
            page pools and rings, shared), `batch.*` (one set per bucket).
        dims: sizes as integers or expressions over the symbols of `buffers`.
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
        return dim if isinstance(dim, int) else int(dim.subs(self.sizes))

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

    def reserve(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor for one buffer with any content; on a CPU untouched memory costs none."""
        return torch.empty(self.shape(name), dtype=self[name].dtype, device=device)
