"""transformers' decoding loop, with tokens from an mtpc engine.

The rows of a batch advance at different speeds, because each row's drafts are accepted or rejected
separately. transformers' loop checks criteria, calls the streamer and pads after each token of the
whole batch. This module does the same in the same order for each column, as soon as every row has
its token of that column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtpc import Engine
from mtpc.engine.request import Request
from mtpc.engine.stream import check_all, stream
from mtpc.errors import ServingError
from mtpc.integrations.transformers.stopping import StopPlan


class Columns:
    """The batch in the state that transformers' loop would have.

    Args:
        input_ids: int64 [rows, length], including padding.
        plan: decides when rows end.
        streamer: transformers' streamer, or None.

    Attributes:
        is_running: for each row, whether it has not ended yet.
        arrived: for each row, the new tokens so far. A row may have more tokens than columns are
            filled.
    """

    def __init__(self, input_ids: Tensor, plan: StopPlan, streamer: Any | None):
        rows, self._length = input_ids.shape
        self.plan, self._streamer = plan, streamer
        # The user's criteria expect ids on the input's device. Without criteria, the CPU suffices.
        self._device = input_ids.device
        size = (rows, self._length + plan.max_new_tokens)
        self._ids = input_ids.new_empty(size, device=self._device if plan.host_criteria else "cpu")
        self._ids[:, : self._length] = input_ids
        self._count = 0
        self.is_running = [True] * rows
        self.arrived: list[list[int]] = [[] for _ in range(rows)]

    @property
    def is_done(self) -> bool:
        """Whether all rows have ended."""
        return not any(self.is_running)

    @property
    def sequences(self) -> Tensor:
        """The result of `generate`: int64 [rows, length + new tokens]."""
        return self._ids[:, : self._length + self._count].to(self._device, copy=True)

    def begin(self) -> None:
        """Pass the prompt with its padding to the streamer, as transformers does."""
        if self._streamer is not None:
            self._streamer.put(self._ids[:, : self._length].to("cpu", copy=True))

    def end(self) -> None:
        """End the streamer."""
        if self._streamer is not None:
            self._streamer.end()

    def needs(self, row: int) -> bool:
        """Whether the next columns need tokens of this row.

        Without a padding id, a row that has ended continues until all rows have ended.
        """
        return self.is_running[row] or (self.plan.pad_id is None and not self.is_done)

    def advance(self) -> None:
        """Fill all columns for which every row has its token."""
        rows = range(len(self.arrived))
        while not self.is_done and all(
            len(self.arrived[row]) > self._count for row in rows if self.needs(row)
        ):
            self._fill([self._token(row) for row in rows])

    def _token(self, row: int) -> int:
        if self.is_running[row] or self.plan.pad_id is None:
            return self.arrived[row][self._count]
        return self.plan.pad_id

    def _fill(self, tokens: list[int]) -> None:
        column = torch.tensor(tokens, dtype=self._ids.dtype)
        end = self._length + self._count + 1
        self._ids[:, end - 1] = column
        self._count += 1
        is_last = self._count >= self.plan.max_new_tokens
        fired = self.plan.fired(self._ids[:, :end])
        for row, token in enumerate(tokens):
            if is_last or fired[row] or token in self.plan.stop_ids:
                self.is_running[row] = False
        if self._streamer is not None:
            self._streamer.put(column)


def decode(engine: Engine, requests: Sequence[Request], columns: Columns) -> Tensor:
    """Serve the rows of a batch until `generate` would end.

    Args:
        engine: the engine. Other callers may use it at the same time.
        requests: one request per row, not added yet.
        columns: the batch, before its first new token.

    Returns:
        int64 [rows, length + new tokens].

    Raises:
        RequestError: a row cannot be served. No row has run.
        CapacityError: a row needs more pages than the pool has. No row has run.
        NumericsError: the model produced non-finite logits.
        ServingError: another caller aborted a row.
    """
    check_all(engine, requests)
    columns.begin()
    outputs = stream(engine, requests, [None] * len(requests))
    ended: set[int] = set()
    try:
        for output in outputs:
            if output.index in ended:
                continue
            columns.arrived[output.index] += output.token_ids
            if output.finish_reason == "aborted":
                raise ServingError(f"row {output.index} was aborted while `generate` ran")
            columns.advance()
            if columns.is_done:
                break
            for row, request in enumerate(requests):
                if row not in ended and not columns.needs(row):
                    ended.add(row)
                    engine.abort(request.request_id, "stop")
    finally:
        outputs.close()
    columns.end()
    return columns.sequences
