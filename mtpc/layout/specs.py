"""Buffers of a step: each size is written once and checked everywhere.

A captured step owns no hidden memory. Everything it reads or writes between steps is a named
buffer declared by a `BufferSpec`; a `Layout` binds the symbols of its sizes (see `buffers`) to
numbers for one bucket. In a program from the cache they are numbers: sympy is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from mtpc.errors import CapacityError
from mtpc.weights.packing import allocate, zeros

if TYPE_CHECKING:
    import sympy

Dim: TypeAlias = "int | sympy.Expr"
Writer = Literal["host", "verify", "propose"]
HOST: tuple[Writer, ...] = ("host",)
VERIFY: tuple[Writer, ...] = ("verify",)
PROPOSE: tuple[Writer, ...] = ("propose",)
STEP = VERIFY + PROPOSE
"""Both halves of a split step: each writes its own layers' caches, or its own metadata."""
SCRATCH_SLOT = 0
"""Request slot that padded rows of a bucket point at. It never holds a request."""
NULL_PAGE = 0
"""KV page that unused block-table entries point at. It is never written."""
NO_SLOT = -1
"""slot_mapping value that means: write nowhere."""
NO_TOKEN = -1
"""The id of a draft that does not exist, or has no row; no choice equals it."""
PROMPT_EMBEDS, ROPE_OFFSETS = "state.prompt_embeds", "state.rope_offsets"
CHAIN_EMBEDS = "state.chain_embeds"
SAMPLING_INTS, SYNTHETIC_DRAWS = "state.sampling_ints", "state.synthetic_draws"
TEXT_IDS, NUM_DRAFTS = "state.text_ids", "batch.num_drafts"
"""Buffers that copies add."""
COPY_COUNTS, DRAFT_SOURCE = "state.copy_counts", "state.draft_source"
"""Buffers that copies beside another drafter add."""
HIDDEN = "hidden"
"""The role of the layer that holds what `CompileOptions.hidden_state_layers` names."""
LOGITS_STARTS = "batch.logits_start_loc"
"""The buffer that ragged steps add: where each request's rows of logits begin, and their total."""
DRAFT_COUNTS = "state.draft_counts"
NUM_VERIFIED, DRAFT_CHANCES = "batch.num_verified", "batch.draft_chances"
"""Buffers that a budget of rows adds."""
NUM_SOURCES = 5
"""Sources of drafts that are counted: the other drafter, and copies by the length of a match."""
IMAGE_STATE = (PROMPT_EMBEDS, ROPE_OFFSETS, CHAIN_EMBEDS)
"""Buffers that images add."""
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
"""Their names on the host."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class BufferSpec:
    """One named buffer, and everything that is known about it.

    The contract with hosts, the rows that the engine rebuilds and the results that it reads are
    derived from these fields.

    Attributes:
        name: dotted name: `state.*` (rows by request slot, shared by all buckets), `kv.*` (page
            pools, rings and recurrent state of layers, shared), `batch.*` (one set per bucket),
            `cross.*` (what `verify` hands to `propose`).
        dims: sizes as integers or expressions over the symbols of `buffers`.
        dtype: element type.
        pad: the value of unused rows; also the initial value.
        writers: what writes it between steps. A step without drafts has no `propose`.
        meaning: what it holds, and when the host writes it.
        needs_pad: whether unused rows must hold `pad`. Otherwise they may hold anything.
        is_result: whether the host reads it after a step, or after `verify`.
        is_rebuilt: whether the host can write a request's row for any committed length, from the
            request's tokens and parameters alone.
        is_paged: whether its rows are pages, which only block tables refer to.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype
    pad: int = 0
    writers: tuple[Writer, ...] = STEP
    meaning: str = ""
    needs_pad: bool = True
    is_result: bool = False
    is_rebuilt: bool = False
    is_paged: bool = False

    @property
    def shared(self) -> bool:
        return not self.name.startswith("batch.")


class Layout(Mapping[str, BufferSpec]):
    """The buffers of one step and the numbers behind their symbols (immutable). The step leaves
    `open_sizes` open if it can, to serve other numbers, too."""

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        sizes: Mapping[sympy.Symbol, int],
        open_sizes: Iterable[sympy.Symbol] = (),
    ):
        self._specs, self._values = {spec.name: spec for spec in specs}, dict[Dim, int]()
        self.sizes, self.open_sizes = dict(sizes), tuple(open_sizes)

    def __getitem__(self, name: str) -> BufferSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def value(self, dim: Dim) -> int:
        """The number a dimension has at this bucket."""
        if dim not in self._values:
            self._values[dim] = dim if isinstance(dim, int) else int(dim.subs(self.sizes))
        return self._values[dim]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.value(dim) for dim in self[name].dims)

    def nbytes(self, name: str) -> int:
        return prod(self.shape(name)) * self[name].dtype.itemsize

    @property
    def is_ragged(self) -> bool:
        """Whether requests may have different numbers of rows."""
        return LOGITS_STARTS in self

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that a host reads after a step."""
        return tuple(name for name, spec in self.items() if spec.is_result)

    def resized(self, name: str, dims: tuple[Dim, ...]) -> Layout:
        """A layout in which one buffer has other dimensions."""
        specs = dict(self._specs)
        specs[name] = replace(specs[name], dims=dims)
        return Layout(specs.values(), self.sizes, self.open_sizes)

    def extended(self, specs: Iterable[BufferSpec]) -> Layout:
        return Layout([*self._specs.values(), *specs], self.sizes, self.open_sizes)

    def allocate(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor for one buffer, filled with its padding value.

        On a CPU, pages of a cache that no request uses take no memory.

        Raises:
            CapacityError: the device lacks the memory.
        """
        spec = self[name]
        try:
            if torch.device(device).type == "cpu" and spec.pad == 0:
                return zeros(self.shape(name), spec.dtype)
            return torch.full(self.shape(name), spec.pad, dtype=spec.dtype, device=device)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a subclass.
            raise CapacityError(
                f"no memory for {name}: {self.nbytes(name) / 2**30:.1f} GiB on {device}; lower "
                "max_len, batch_buckets or num_pages"
            ) from error

    def reserve(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor for one buffer, not filled.

        On a CPU, memory that nothing touches costs nothing, even if it is more than there is.
        """
        if torch.device(device).type == "cpu":
            return allocate(self.shape(name), self[name].dtype)
        return torch.empty(self.shape(name), dtype=self[name].dtype, device=device)


def is_buffer_name(name: str) -> bool:
    """Whether a name is that of a buffer of the layout, as opposed to a weight."""
    return name.split(".", 1)[0] in ("state", "batch", "kv", "cross")
