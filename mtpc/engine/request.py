"""A generation request and its life: waiting -> prefilling -> decoding -> finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mtpc.sampling_params import SamplingParams, TokenLogprobs

FinishReason = Literal["length", "stop", "nonfinite", "aborted"]


@dataclass
class Request:
    """One prompt being continued.

    Attributes:
        request_id: unique within an engine.
        prompt_ids: token ids, not empty.
        max_new_tokens: upper limit of new tokens.
        stop_ids: token ids that end the request; the stop token is part of the output.
        sampling: how its tokens are chosen; with a seed once the engine has it.
        slot: row of the state buffers while running, else None.
        pages: KV pages held, in sequence order.
        num_prefilled: prompt tokens whose KV is final.
        output_ids: new tokens so far.
        logprobs: of output_ids, where they were asked for.
        finish_reason: why it ended, or None.
    """

    request_id: int
    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled >= len(self.prompt_ids)
