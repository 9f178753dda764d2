"""Outputs that a step has decided and that are not handed out yet.

The engine appends an output here before it changes the request. The append is the moment at which
the output counts. Whatever interrupts the engine later, `Emission.settle` repeats the change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from mtpc.engine.request import Request, StepOutput
from mtpc.errors import ServingError


@dataclass(frozen=True)
class Emission:
    """A request and an output that a step gave it.

    Attributes:
        request: the request.
        output: its new tokens, and why it ended, if it did.
        start: number of the request's new tokens before this output.
    """

    request: Request
    output: StepOutput
    start: int

    def settle(self) -> None:
        """Give the request its tokens and its end. A second call changes nothing."""
        request, output = self.request, self.output
        request.output_ids[self.start :] = output.token_ids
        if output.logprobs is not None:
            request.logprobs[self.start :] = output.logprobs
        request.error = request.error or output.error
        request.finish_reason = request.finish_reason or output.finish_reason

    @property
    def is_void(self) -> bool:
        """Whether the request was aborted after the step, so that its callback knows already."""
        return self.output.finish_reason is None and self.request.finish_reason is not None


class Outbox:
    """The outputs that are not handed out yet, in order.

    Args:
        blame: called with a request whose callback raised. It counts the error, and ends the
            request unless it has ended. Its second argument is the interrupt that the callback
            must be told of by a last output, or None.
    """

    def __init__(self, blame: Callable[[Request, BaseException | None], None]):
        self._blame, self._emissions = blame, deque[Emission]()
        self._blamed = 0  # Identifies the exception that has ended a request already.

    @property
    def has_any(self) -> bool:
        """Whether an output waits. It does between two steps only if one was interrupted."""
        return bool(self._emissions)

    def put(self, request: Request, output: StepOutput) -> None:
        """Add an output, and change its request accordingly."""
        emission = Emission(request, output, len(request.output_ids))
        self._emissions.append(emission)
        emission.settle()

    def put_failure(self, request: Request, error: BaseException) -> None:
        """Add the last output of a request that ends because the engine raised this error."""
        name = f"request {request.request_id}"
        told = ServingError(f"{name} ended, because the engine raised {error!r}")
        told.__cause__ = error
        self.put(request, StepOutput(request.request_id, [], "error", error=told))

    def settle(self) -> None:
        """Repeat all changes of requests, after an interrupt."""
        for emission in list(self._emissions):
            emission.settle()

    def hand_out(self) -> list[StepOutput]:
        """Call the requests' callbacks, in order. An interrupt leaves the rest for the next call.

        Returns:
            The outputs.
        """
        handed = []
        self._blamed = 0
        while self._emissions:
            emission = self._emissions[0]
            try:
                output = emission.output
                if not emission.is_void:
                    output = self.call_back(emission.request, output)
                handed.append(output)
            finally:
                self._emissions.popleft()
        return handed

    def call_back(self, request: Request, output: StepOutput) -> StepOutput:
        """Call a request's callback, if it has one. If it raises, only its own request ends.

        An interrupt is raised again. It is unknown whether the callback took its output, so the
        request ends, and the next step says so to its callback.
        """
        if request.on_output is None:
            return output
        try:
            request.on_output(output)
        except BaseException as error:
            if isinstance(error, Exception):
                self._blame(request, None)
                return replace(output, finish_reason="error", error=error)
            if self._blamed != id(error):  # Else another request's callback raised it, by `abort`.
                self._blamed = id(error)
                self._blame(request, error)
            raise
        return output
