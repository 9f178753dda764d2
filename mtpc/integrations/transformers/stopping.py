"""transformers' stopping criteria: which the step decides, and which are asked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import generation

from mtpc.errors import RequestError


@dataclass(frozen=True)
class StopPlan:
    """When rows end.

    Attributes:
        max_new_tokens: limit of all rows.
        stop_ids: ids that end a row, decided in the step.
        pad_id: what stands in a row that has ended; None where rows go on until all have ended,
            as transformers does where no criterion is about end-of-sequence tokens.
        asked: criteria that the host asks after each token of the batch.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int | None
    asked: generation.StoppingCriteriaList

    def fired(self, ids: Tensor) -> list[bool]:
        """Per row whether a criterion of the host's fires.

        Args:
            ids: int64 [rows, length], prompt and padding included.
        """
        if not self.asked:
            return [False] * ids.shape[0]
        return self.asked(ids, None).tolist()


def stop_plan(criteria: Sequence[Any], pad: Tensor | None, length: int) -> StopPlan:
    """Read the criteria that `generate` made and the user's own.

    Args:
        criteria: of any class; `MaxLengthCriteria` and `EosTokenCriteria` go into the step.
        pad: transformers' padding id as a tensor, or None.
        length: of the prompt tensor, padding included.

    Raises:
        RequestError: rows are to be padded, and there is no padding id.
    """
    limits = [c.max_length for c in criteria if type(c) is generation.MaxLengthCriteria]
    ends = [c for c in criteria if type(c) is generation.EosTokenCriteria]
    stop_ids = {int(i) for criterion in ends for i in criterion.eos_token_id.tolist()}
    decided = (generation.MaxLengthCriteria, generation.EosTokenCriteria)
    asked = [c for c in criteria if type(c) not in decided]
    if not limits:
        raise RequestError("no criterion limits the length; give max_new_tokens")
    pads = any(hasattr(c, "eos_token_id") for c in criteria)
    if pads and pad is None:
        raise RequestError("rows may end apart, and pad_token_id is not set; give one")
    # One token at least: transformers asks only once it has one.
    return StopPlan(
        max(min(limits) - length, 1),
        tuple(sorted(stop_ids)),
        int(pad) if pads and pad is not None else None,
        generation.StoppingCriteriaList(asked),
    )
