"""transformers' decoding loop over tokens that an engine makes.

Rows of a batch come at their own pace: one row's drafts are accepted, another's are not. What
transformers' loop does after each token of the whole batch (criteria, streamer, padding) is done
here in the same order, column by column, as soon as every row has its token of that column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtpc.engine.engine import Engine
from mtpc.engine.request import Request
from mtpc.engine.stream import check_all, stream
from mtpc.errors import ServingError
from mtpc.integrations.transformers.stopping import StopPlan


class Columns:
    """The batch as transformers' loop would have it at this moment.

    Args:
        input_ids: int64 [rows, length], padding included.
        plan: when rows end.
        streamer: transformers' streamer, or None.

    Attributes:
        is_running: per row, whether its tokens still count.
        arrived: per row, the tokens that have come; some may be ahead of the columns.
    """

    def __init__(self, input_ids: Tensor, plan: StopPlan, streamer: Any | None):
        rows, self._length = input_ids.shape
        self.plan, self._streamer = plan, streamer
        # Criteria of the user's find ids where transformers has them; nobody else needs a device.
        self._home = input_ids.device
        size = (rows, self._length + plan.max_new_tokens)
        self._ids = input_ids.new_empty(size, device=self._home if plan.asked else "cpu")
        self._ids[:, : self._length] = input_ids
        self._count = 0
        self.is_running = [True] * rows
        self.arrived: list[list[int]] = [[] for _ in range(rows)]

    @property
    def is_done(self) -> bool:
        """Whether no row runs."""
        return not any(self.is_running)

    @property
    def sequences(self) -> Tensor:
        """int64 [rows, length + new tokens], as `generate` returns it."""
        return self._ids[:, : self._length + self._count].to(self._home, copy=True)

    def begin(self) -> None:
        """Hand the prompt to the streamer, padding included, as transformers does."""
        if self._streamer is not None:
            self._streamer.put(self._ids[:, : self._length].to("cpu", copy=True))

    def end(self) -> None:
        """Tell the streamer that there is no more."""
        if self._streamer is not None:
            self._streamer.end()

    def needs(self, row: int) -> bool:
        """Whether a row's tokens still go into columns."""
        return self.is_running[row] or (self.plan.pad_id is None and not self.is_done)

    def advance(self) -> None:
        """Fill columns as far as all rows have come."""
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
        engine: others may use it meanwhile.
        requests: one a row, not added yet.
        columns: the batch, before its first new token.

    Returns:
        int64 [rows, length + new tokens].

    Raises:
        RequestError: a row cannot be served; none has run then.
        CapacityError: a row needs more pages than the pool has; none has run then.
        NumericsError: the model produced non-finite logits.
        ServingError: somebody aborted a row.
    """
    check_all(engine, requests)
    columns.begin()
    outputs = stream(engine, requests, [None] * len(requests))
    let_go: set[int] = set()
    try:
        for output in outputs:
            if output.index in let_go:
                continue
            columns.arrived[output.index] += output.token_ids
            if output.finish_reason == "aborted":
                raise ServingError(f"row {output.index} was aborted while `generate` ran")
            columns.advance()
            if columns.is_done:
                break
            for row, request in enumerate(requests):
                if row not in let_go and not columns.needs(row):
                    let_go.add(row)
                    engine.abort(request.request_id, "stop")
    finally:
        outputs.close()
    columns.end()
    return columns.sequences
