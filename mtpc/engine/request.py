"""A generation request and its life: waiting -> prefilling -> decoding -> finished.

Under pressure a request goes back from prefilling or decoding to waiting, and prefills what it
had: its prompt and its output so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mtpc.sampling_params import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from mtpc.engine.grammar import Grammar

FinishReason = Literal["length", "stop", "nonfinite", "aborted", "error"]
"""`error`: its callback or its grammar raised."""


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request after one step.

    Attributes:
        request_id: whose.
        token_ids: what the step emitted.
        finish_reason: why it ended with this step, or None.
        logprobs: an entry per token where the request asked for them, else None.
        error: what its callback or its grammar raised, where that is why it ended.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


OnOutput = Callable[[StepOutput], None]


@dataclass(eq=False)
class Request:
    """One prompt being continued.

    Attributes:
        request_id: unique within an engine, ascending in order of arrival; -1 until it is added.
        prompt_ids: token ids, not empty.
        max_new_tokens: upper limit of new tokens.
        stop_ids: token ids that end the request; the stop token is part of the output.
        sampling: how its tokens are chosen; with a seed once the engine has it.
        on_output: called with each of its outputs, by whoever steps the engine.
        grammar: which tokens may come next; it stands behind `output_ids` between steps.
        slot: row of the state buffers while running, else None.
        pages: KV pages held, in sequence order; the first ones may be shared.
        num_input: tokens to prefill: the prompt, and what was emitted before a preemption.
        num_prefilled: of these, how many have their KV, reused pages included.
        num_indexed: pages that the prefix cache knows.
        last_block: the prefix cache's number for the last of them.
        num_unread: tokens that launched steps, not yet read, may have emitted at most.
        num_drafts: drafts that its last step left for the next one to verify.
        output_ids: new tokens so far.
        logprobs: of output_ids, where they were asked for.
        finish_reason: why it ended, or None.
        error: what its grammar raised, if it did.
    """

    request_id: int
    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    on_output: OnOutput | None = None
    grammar: Grammar | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_input: int = 0
    num_prefilled: int = 0
    num_indexed: int = 0
    last_block: int = 0
    num_unread: int = 0
    num_drafts: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.num_input = self.num_tokens

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled >= self.num_input

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_committed(self) -> int:
        """Tokens whose KV is final: all but the last one, once it decodes."""
        return self.num_tokens - 1 if self.is_prefilled else self.num_prefilled

    @property
    def most_committed(self) -> int:
        """What `num_committed` may be once all steps launched are read."""
        longest = len(self.prompt_ids) + self.max_new_tokens - 1
        return min(self.num_committed + self.num_unread, longest)

    @property
    def is_surely_done(self) -> bool:
        """Whether a step that was not read yet, which emits a token at least, is its last."""
        return self.num_unread > 0 and self.remaining_tokens <= 1

    @property
    def remaining_tokens(self) -> int:
        """New tokens it may still emit."""
        return self.max_new_tokens - len(self.output_ids)

    def token_ids(self, begin: int, end: int) -> list[int]:
        """Tokens `begin`..`end` - 1 of prompt and output together."""
        split = len(self.prompt_ids)
        output = self.output_ids[max(begin - split, 0) : max(end - split, 0)]
        return self.prompt_ids[begin:end] + output
