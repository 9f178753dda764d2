"""A generation request and its states: waiting -> prefilling -> decoding -> finished.

When KV pages run short, a prefilling or decoding request is preempted. It waits again, and then
prefills its prompt and its output so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mtpc.engine.estimates import Acceptance
from mtpc.sampling_params import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from mtpc.engine.grammar import Grammar
    from mtpc.engine.prompt_images import Key, PromptImages

FinishReason = Literal["length", "stop", "nonfinite", "aborted", "error"]
"""Why a request ended. `error`: its callback, its grammar, or the engine at this request raised."""


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request after one step.

    Attributes:
        request_id: id of the request.
        token_ids: the tokens that the step emitted.
        finish_reason: why the request ended with this step, or None if it continues.
        logprobs: one entry per token if the request asked for log-probabilities, else None.
        error: the exception of the request's callback or grammar, or a `ServingError` whose cause
            is the engine's exception, if that ended the request.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


OnOutput = Callable[[StepOutput], None]


@dataclass(eq=False)
class Request:
    """One prompt that the engine continues.

    Attributes:
        request_id: unique within an engine, and ascending in order of arrival; -1 before the
            request is added.
        prompt_ids: token ids, at least one.
        max_new_tokens: the most new tokens.
        stop_ids: token ids that end the request, as those of `sampling` do. The stop token is part
            of the output.
        sampling: how tokens are chosen. It has a seed once the request is added.
        on_output: called with each output of the request, in the thread that steps the engine or
            aborts the request.
        grammar: decides which tokens may come next. Between steps it has taken `output_ids`,
            except for stop ids.
        images: the prompt's images; None: there are none.
        slot: row of the state buffers while the request runs, else None.
        pages: the request's KV pages, in sequence order. The first pages may be shared.
        num_input: tokens to prefill: the prompt, and the output before a preemption.
        num_prefilled: how many of these tokens have KV, including those in reused pages.
        num_indexed: how many of `pages` the prefix cache has in its index.
        last_block: the prefix cache's number of the last indexed block.
        num_cached: tokens of the prompt that were not prefilled when the request was first
            admitted, because they were reused; None before that.
        restored: the snapshot that the request's slot state begins with, or None.
        snapshots: snapshots of the request whose blocks are not in the index yet, by the length of
            the text they stand for.
        digests: what identifies its first blocks in files (`offload`).
        newest: the page with the request's last snapshot of decoded text, or None.
        num_unread: the most tokens that launched but unread steps may have emitted.
        num_drafts: drafts that the last step proposed for the next one to verify.
        draft_chances: with a budget of rows, the chance that each of these drafts and all before
            it are accepted, as the last step said.
        acceptance: which of its drafts were accepted lately.
        output_ids: new tokens so far.
        logprobs: one entry per token of `output_ids`, if the request asked for them.
        hidden_states: what the model kept of its tokens but the last one, [n - 1, F], once it has
            ended by a step; None: nothing.
        finish_reason: why the request ended, or None.
        error: the exception of the request's grammar, a `ServingError`, or None.
        last: the last output that a step or an abort has decided, and the number of new tokens
            before it.
        num_told: how many of the new tokens its caller was told.
        telling: the output that its caller is being told, or None.
        is_walking: whether its grammar is being used, and may stand elsewhere than at the end of
            `output_ids`.
    """

    request_id: int
    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    on_output: OnOutput | None = None
    grammar: Grammar | None = None
    images: PromptImages | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_input: int = 0
    num_prefilled: int = 0
    num_indexed: int = 0
    last_block: int = 0
    num_cached: int | None = None
    restored: int | None = None
    snapshots: dict[int, int] = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    newest: int | None = None
    num_unread: int = 0
    num_drafts: int = 0
    draft_chances: list[float] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_states: Tensor | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    last: tuple[int, StepOutput] | None = None
    num_told: int = 0
    telling: StepOutput | None = None
    is_walking: bool = False

    def __post_init__(self) -> None:
        self.num_input = self.num_tokens

    def emit(self, output: StepOutput) -> None:
        """Take the tokens and the end that a step or an abort has decided. They count from the
        moment that they are `last`."""
        self.last = (len(self.output_ids), output)
        self.settle()

    def settle(self) -> None:
        """Change the request as `last` says. A second call changes nothing."""
        if self.last is None:
            return
        start, output = self.last
        self.output_ids[start:] = output.token_ids
        if output.logprobs is not None:
            self.logprobs[start:] = output.logprobs
        self.error = output.error or self.error
        self.finish_reason = output.finish_reason or self.finish_reason

    @property
    def has_news(self) -> bool:
        """Whether there is something that its caller was not told. Its end is the last news."""
        return self.num_told < len(self.output_ids) or self.finish_reason is not None

    def news(self) -> StepOutput:
        """What its caller was not told yet."""
        start, wanted = self.num_told, self.sampling.logprobs is not None
        logprobs = self.logprobs[start:] if wanted else None
        ids = self.output_ids[start:]
        return StepOutput(self.request_id, ids, self.finish_reason, logprobs, self.error)

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids that end the request, each once."""
        return tuple(dict.fromkeys((*self.stop_ids, *self.sampling.stop_token_ids)))

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled >= self.num_input

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_committed(self) -> int:
        """Tokens whose KV is final. For a decoding request, these are all but the last token."""
        return self.num_tokens - 1 if self.is_prefilled else self.num_prefilled

    @property
    def most_committed(self) -> int:
        """The largest possible `num_committed` of a decode step after all launched ones."""
        longest = len(self.prompt_ids) + self.max_new_tokens - 2
        return min(self.num_committed + self.num_unread, longest)

    @property
    def is_surely_done(self) -> bool:
        """Whether an unread step must be the request's last, as it emits at least one token."""
        return self.num_unread > 0 and self.remaining_tokens <= 1

    @property
    def remaining_tokens(self) -> int:
        """The most new tokens that the request may still emit."""
        return self.max_new_tokens - len(self.output_ids)

    def token_ids(self, begin: int, end: int) -> list[int]:
        """Tokens `begin`..`end` - 1 of the prompt and the output together."""
        split = len(self.prompt_ids)
        output = self.output_ids[max(begin - split, 0) : max(end - split, 0)]
        return self.prompt_ids[begin:end] + output

    def keys(self, begin: int, end: int) -> list[Key]:
        """What identifies the tokens `begin`..`end` - 1: their ids, or the images they are of."""
        ids = self.token_ids(begin, end)
        return list(ids) if self.images is None else self.images.keys(ids, begin)
