"""Requests served to their end on an engine that others may use, their outputs as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from mtpc.engine.engine import Engine
from mtpc.engine.request import FinishReason, OnOutput, Request, StepOutput
from mtpc.engine.text import TextAssembler
from mtpc.errors import GrammarError, NumericsError, RequestError
from mtpc.sampling_params import TokenLogprobs


@dataclass(frozen=True)
class Output:
    """What one prompt got since its last output.

    Attributes:
        index: which prompt, in the order given.
        token_ids: new tokens; with a stop string, its tokens and those accepted behind it included.
        text: new text, for text prompts; it may lag behind the tokens (half a character, what may
            become a stop string) but never ends in something that is taken back.
        finish_reason: why it ended with this output, or None: "length", "stop" (a stop id or stop
            string), or "aborted" (by somebody who knew the request's id).
        logprobs: an entry per token where the prompt's parameters ask for them, else None.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None


def assemble(index: int, output: StepOutput, text: TextAssembler | None) -> Output:
    """A prompt's output of an engine's step; ended where a stop string came."""
    if text is None:
        return Output(index, output.token_ids, None, output.finish_reason, output.logprobs)
    piece = text.push(output.token_ids, last=output.finish_reason is not None)
    reason: FinishReason | None = "stop" if text.is_stopped else output.finish_reason
    return Output(index, output.token_ids, piece, reason, output.logprobs)


def check_served(output: Output, request: Request) -> None:
    """Refuse to go on where a model computes nonsense, or a grammar fails.

    Not before the output with which that came, nor where a stop string had ended the text.

    Raises:
        NumericsError: the request ended with non-finite logits.
        GrammarError: its grammar ended it; the cause is what that raised.
    """
    new, index = len(request.output_ids), output.index
    if output.finish_reason == "nonfinite":
        raise NumericsError(
            f"prompt {index}: the model's logits became NaN or infinite after "
            f"{new} new tokens; check the weights or use a wider dtype"
        )
    if output.finish_reason == "error":
        raise GrammarError(
            f"prompt {index}: its grammar failed after {new} new tokens: {request.error!r}"
        ) from request.error


def check_all(engine: Engine, requests: Sequence[Request]) -> None:
    """Refuse requests, before any of them runs, that `stream` could not serve to their end.

    Raises:
        RequestError: one cannot be served; or the engine has requests added by hand, which
            stepping it for others would serve unseen.
        CapacityError: one needs more pages than the pool has.
    """
    if engine.has_requests_by_hand:
        raise RequestError(
            "the engine holds requests added by hand, whose outputs would be swallowed; step "
            "the engine until it has no work, abort them, or add them with on_output"
        )
    for request in requests:
        engine.check(request)


def stream(
    engine: Engine, requests: Sequence[Request], texts: Sequence[TextAssembler | None]
) -> Generator[Output, None, None]:
    """Serve requests, stepping the engine whenever nothing is there to hand out.

    Requests that are not finished when the iterator is closed or raises are aborted.

    Args:
        engine: where to; others may add to it and step it meanwhile.
        requests: not added yet.
        texts: per request, what makes its text.

    Raises:
        NumericsError: the model produced non-finite logits.
        GrammarError: a request's grammar failed.
    """
    ready: deque[tuple[int, StepOutput]] = deque()
    unfinished = set(range(len(requests)))
    try:
        for index, request in enumerate(requests):
            request.on_output = _sink(ready, index)
            engine.submit(request)
        while unfinished:
            while not ready:
                engine.step()
            index, step_output = ready.popleft()
            if index not in unfinished:  # What a stop string had cut off.
                continue
            output = assemble(index, step_output, texts[index])
            check_served(output, requests[index])
            if output.finish_reason is not None:
                unfinished.remove(index)
                engine.abort(requests[index].request_id, output.finish_reason)
            yield output
    finally:
        for index in unfinished:
            engine.abort(requests[index].request_id)


def _sink(ready: deque[tuple[int, StepOutput]], index: int) -> OnOutput:
    return lambda output: ready.append((index, output))
