"""transformers' stopping criteria: those that the step decides, and those that the host checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import generation

from mtpc.errors import RequestError


@dataclass(frozen=True)
class StopPlan:
    """Decides when rows end.

    Attributes:
        max_new_tokens: the most new tokens of each row.
        stop_ids: ids that end a row. The step checks them.
        pad_id: the id that fills a row after its end. None: rows continue until all have ended, as
            in transformers if no criterion concerns end-of-sequence tokens.
        host_criteria: criteria that the host checks after each token of the batch.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int | None
    host_criteria: generation.StoppingCriteriaList

    def fired(self, ids: Tensor) -> list[bool]:
        """For each row, whether a criterion that the host checks ends it.

        Args:
            ids: int64 [rows, length], including prompt and padding.
        """
        if not self.host_criteria:
            return [False] * ids.shape[0]
        return self.host_criteria(ids, None).tolist()


def stop_plan(criteria: Sequence[Any], pad: Tensor | None, length: int) -> StopPlan:
    """Make a plan from the criteria of `generate` and the user's own.

    Args:
        criteria: criteria of any class. The step decides `MaxLengthCriteria` and
            `EosTokenCriteria`; the host checks the others.
        pad: transformers' padding id as a tensor, or None.
        length: length of the prompt tensor, including padding.

    Raises:
        RequestError: no criterion limits the length; or rows need padding, and there is no padding
            id.
    """
    limits = [c.max_length for c in criteria if type(c) is generation.MaxLengthCriteria]
    ends = [c for c in criteria if type(c) is generation.EosTokenCriteria]
    stop_ids = {int(i) for criterion in ends for i in criterion.eos_token_id.tolist()}
    decided = (generation.MaxLengthCriteria, generation.EosTokenCriteria)
    host_criteria = [c for c in criteria if type(c) not in decided]
    if not limits:
        raise RequestError("no criterion limits the length; give max_new_tokens")
    pads = any(hasattr(c, "eos_token_id") for c in criteria)
    if pads and pad is None:
        raise RequestError("rows may end at different lengths, and pad_token_id is not set; set it")
    # At least one token, because transformers checks criteria only after the first one.
    return StopPlan(
        max(min(limits) - length, 1),
        tuple(sorted(stop_ids)),
        int(pad) if pads and pad is not None else None,
        generation.StoppingCriteriaList(host_criteria),
    )
