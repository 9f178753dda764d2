"""Serves requests to their end, and yields their outputs as they arrive.

Other callers may use the engine at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpc.engine.engine import Engine
from mtpc.engine.request import FinishReason, Request, StepOutput
from mtpc.engine.text import TextAssembler
from mtpc.errors import GrammarError, NumericsError, RequestError, ServingError
from mtpc.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Output:
    """The new tokens and text of one prompt since its last output.

    Attributes:
        index: the prompt's index, in the order given.
        token_ids: new tokens. Those of a stop string are included, up to the one that completes
            it; a stop id is included, too.
        text: new text, or None for a prompt of ids. It may lag behind the tokens, while a character
            is incomplete or the text may be part of a stop string. It is final: no later output
            takes it back.
        finish_reason: why the prompt ended with this output, or None if it continues: "length",
            "stop" (a stop id or stop string), or "aborted" (by `Engine.abort`).
        logprobs: one entry per token if the prompt's parameters ask for log-probabilities, else
            None.
        num_cached_tokens: tokens of the prompt that were reused and not prefilled.
        hidden_states: with the last output and `hidden_state_layers`, the inputs of these layers at
            each token of prompt and output but the last, [n - 1, layers * H]; None where a stop
            string or an abort ended it.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    hidden_states: Tensor | None = None


def assemble(
    index: int, output: StepOutput, text: TextAssembler | None, request: Request
) -> Output:
    """Make a prompt's output from the engine's output of one step.

    If `text`, which turns the tokens into text, completes a stop string, the finish reason becomes
    "stop", and tokens that the same step emitted after it are left out.
    """
    ids, reason, logprobs = output.token_ids, output.finish_reason, output.logprobs
    piece, cached = None, request.num_cached or 0
    if text is not None:
        before = text.num_tokens
        # A token that ends the text is no part of it, as in vLLM.
        piece = text.push(ids[:-1] if reason == "stop" else ids, last=reason is not None)
        if text.is_stopped:
            count, reason = text.num_tokens - before, "stop"
            ids, logprobs = ids[:count], None if logprobs is None else logprobs[:count]
    return Output(index, ids, piece, reason, logprobs, cached, request.hidden_states)


def check_served(output: Output, request: Request) -> None:
    """Raise if the request ended with an error of the model, the engine or the grammar.

    It does not raise if a stop string has ended the text.

    Raises:
        NumericsError: the request ended with non-finite logits.
        GrammarError: the request's grammar failed. The cause is the grammar's exception.
        ServingError: the engine failed at this request. The cause is what the engine raised.
    """
    new, index = len(request.output_ids), output.index
    if output.finish_reason == "nonfinite":
        raise NumericsError(
            f"prompt {index}: the model's logits became NaN or infinite after "
            f"{new} new tokens; check the weights or use a wider dtype"
        )
    if output.finish_reason == "error" and isinstance(request.error, ServingError):
        raise request.error
    if output.finish_reason == "error":
        raise GrammarError(
            f"prompt {index}: its grammar failed after {new} new tokens: {request.error!r}"
        ) from request.error


def check_all(engine: Engine, requests: Sequence[Request]) -> None:
    """Check, before any request runs, that `stream` can serve all of them.

    Raises:
        RequestError: a request cannot be served; or the engine has requests without a callback,
            whose outputs would be lost because `stream` steps the engine.
        CapacityError: a request needs more pages than the pool has.
    """
    if engine.has_requests_by_hand:
        raise RequestError(
            "the engine holds requests added by hand, whose outputs would be lost; step the "
            "engine until it has no work, abort these requests, or add them with on_output"
        )
    for request in requests:
        engine.check(request)


def stream(
    engine: Engine, requests: Sequence[Request], texts: Sequence[TextAssembler | None]
) -> Generator[Output, None, None]:
    """Serve requests. Step the engine whenever there is no output to yield. Other callers may add
    to the engine and step it at the same time. Where a request has text, `texts` has the object
    that makes it.

    If the iterator is closed or raises, the unfinished requests are aborted.

    Raises:
        NumericsError: the model produced non-finite logits.
        GrammarError: a request's grammar failed.
    """
    ready: deque[tuple[int, StepOutput]] = deque()
    unfinished = set(range(len(requests)))
    try:
        for index, request in enumerate(requests):
            request.on_output = lambda output, index=index: ready.append((index, output))
            engine.submit(request)
        while unfinished:
            while not ready:
                engine.step()
            index, step_output = ready.popleft()
            if index not in unfinished:  # A stop string has ended this request.
                continue
            output = assemble(index, step_output, texts[index], requests[index])
            check_served(output, requests[index])
            if output.finish_reason is not None:
                unfinished.remove(index)
                engine.abort(requests[index].request_id, output.finish_reason)
            yield output
    finally:
        engine.abandon([requests[index].request_id for index in unfinished])
