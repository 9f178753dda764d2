"""The records that the pieces of a step hand to each other.

A record is a tuple of tensors whose entries have names. Each field is declared once, here: a
record that extends another one begins with its fields. A piece returns the fields in their order,
and a model's modules take `Metadata` in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor


@dataclass(frozen=True)
class TensorRecord:
    """A tuple of tensors with names; it iterates over its fields in the order of declaration."""

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, field.name) for field in fields(self))


AnyRecord = TypeVar("AnyRecord", bound=TensorRecord)


def unpack(record: type[AnyRecord], results: Any) -> AnyRecord:
    """The results of a piece as a record.

    While a step is traced, `results` is a proxy: its entries can be taken one by one, but it
    cannot be iterated.
    """
    return record(*(results[i] for i, _ in enumerate(fields(record))))


@dataclass(frozen=True)
class Rows(TensorRecord):
    """Where the T flat rows of one forward lie, for R requests.

    A step computes these fields anew for each forward, and writes them to the batch's buffers of
    the same names.

    Attributes:
        positions: int64 [T], 0 where a row is padding.
        slot_mapping: int64 [T], the place of a row in paged caches; NO_SLOT: write nowhere.
        seq_lens: int32 [R], tokens of a request after this forward; 0 where it is off.
        query_start_loc: int32 [R+1], the first row of each request, and the end of the last one.
    """

    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor


@dataclass(frozen=True)
class Metadata(Rows):
    """What attention needs to know of one forward; all tensors are on the device.

    Attributes:
        block_table: int32 [R, M], the pages of each request.
        state_slots: int64 [R], the rows of per-request state; SCRATCH_SLOT where a request is off.
        certain_lens: int32 [R], how many of a request's first rows in the target's forward no
            later step takes back: all rows of a prompt, the first row of a verify step, 0 where the
            request is off.
    """

    block_table: Tensor
    state_slots: Tensor
    certain_lens: Tensor


@dataclass(frozen=True)
class Begun(Metadata):
    """What a step starts from: metadata and inputs of the target's forward.

    Attributes:
        ids: int64 [T], token ids.
        context_lens: int32 [R], committed tokens before this step; 0 where a request is off.
        active: bool [R], whether a request takes part in this step.
    """

    ids: Tensor
    context_lens: Tensor
    active: Tensor


@dataclass(frozen=True)
class LogitsIndices(TensorRecord):
    """Which flat rows of a prefill step get logits; W = K + 1, N = R * W.

    Attributes:
        indices: int64 [N], flat rows, packed request by request. Entries after the last request's
            are padding.
        start_loc: int32 [R+1], where each request's entries begin in `indices`, and the end of the
            last.
        places: int64 [R*W], W positions in `indices` for each request; a prompt repeats its only
            one.
        is_first: bool [R*W], False where a place repeats an entry, or its request is off.
    """

    indices: Tensor
    start_loc: Tensor
    places: Tensor
    is_first: Tensor


@dataclass(frozen=True)
class Chosen(TensorRecord):
    """The token chosen for each of N rows of logits.

    Attributes:
        tokens: int64 [N].
        finite: bool [N], whether the logits were finite and left a choice.
    """

    tokens: Tensor
    finite: Tensor


@dataclass(frozen=True)
class Accepted(TensorRecord):
    """The outcome of acceptance.

    Attributes:
        next_ids: int64 [T], the token after each row: the inputs of the draft layer.
        anchors: int64 [R], the flat row of each request's last accepted token.
        remaining: int32 [R], how many more tokens a request may emit.
        lens: int32 [R], committed lengths after this step.
        chosen_rows: int64 [R], which row of the choices was the last one accepted.
    """

    next_ids: Tensor
    anchors: Tensor
    remaining: Tensor
    lens: Tensor
    chosen_rows: Tensor


@dataclass(frozen=True)
class Chained(Rows):
    """The single row of each request that one chained draft step works on.

    Attributes:
        lens: int32 [R], the lengths for the chained step after this one.
    """

    lens: Tensor


@dataclass(frozen=True)
class Blocked(Rows):
    """The rows of the blocks of a step, the same number for each request.

    Attributes:
        ids: int64 [T], the tokens of the rows.
    """

    ids: Tensor


@dataclass(frozen=True)
class Widened(Rows):
    """The T' rows that several MTP layers work on: earlier rows of a request, then this step's.

    Attributes:
        ids: int64 [T'], the token after each row.
        features: [T', ...], the target's.
        anchors: int64 [R], the row of each request's last accepted token.
    """

    ids: Tensor
    features: Tensor
    anchors: Tensor
