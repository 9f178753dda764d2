"""Outputs that a step has decided and that are not handed out yet.

The engine appends an output here before it changes the request. The append is the moment at which
the output counts. Whatever interrupts the engine later, `Emission.settle` repeats the change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtpc.engine.request import OnOutput, Request, StepOutput
from mtpc.errors import ServingError

MAX_TOLD = 2
"""How often a callback is told that its request ended, if an interrupt comes meanwhile."""


@dataclass(eq=False)
class Emission:
    """A request and an output that a step or `abort` gave it.

    Attributes:
        request: the request.
        output: its new tokens, and why it ended, if it did.
        start: number of the request's new tokens before this output.
        is_begun: whether the call of the request's callback has begun.
        handed: the output that the engine's caller gets. None until the callback has returned.
    """

    request: Request
    output: StepOutput
    start: int
    is_begun: bool = False
    handed: StepOutput | None = None

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
        self._blame, self._emissions = blame, list[Emission]()
        self._blamed = 0  # Identifies the exception that has ended a request already.

    @property
    def has_any(self) -> bool:
        """Whether an output waits. It does between two steps only if one was interrupted."""
        return bool(self._emissions)

    def put(self, request: Request, output: StepOutput) -> Emission:
        """Add an output, and change its request accordingly."""
        emission = Emission(request, output, len(request.output_ids))
        self._emissions.append(emission)
        emission.settle()
        return emission

    def put_failure(self, request: Request, error: BaseException) -> None:
        """Add the last output of a request that ends because the engine raised this error."""
        name = f"request {request.request_id}"
        told = ServingError(f"{name} ended, because the engine raised {error!r}")
        told.__cause__ = error
        self.put(request, StepOutput(request.request_id, [], "error", error=told))

    def settle(self) -> None:
        """Repeat all changes of requests, after an interrupt."""
        for emission in self._emissions:
            emission.settle()

    def hand_out(self) -> list[StepOutput]:
        """Call the requests' callbacks, in order. After an interrupt, the next call goes on.

        Returns:
            The outputs. After an interrupt they begin with those that were handed out before it.
        """
        self._blamed = 0
        handed = [self._hand(emission) for emission in self._emissions]  # Callbacks may add some.
        self._emissions.clear()
        return handed

    def hand(self, emission: Emission) -> None:
        """Call the callback of one emission, before those that wait."""
        self._hand(emission)
        self._emissions.remove(emission)

    def _hand(self, emission: Emission) -> StepOutput:
        """Call a request's callback once, if it has one. If it raises, only its own request ends.

        An interrupt is raised again. It is unknown whether the callback took its output, so the
        request ends, and a later output says so to its callback.
        """
        request, output = emission.request, emission.output
        if emission.handed is not None:
            return emission.handed
        if emission.is_void or request.on_output is None:
            emission.handed = output
        elif emission.is_begun:  # A second interrupt came before the request had ended.
            self._blame(request, KeyboardInterrupt())
            emission.handed = output
        else:
            self._call_back(emission, request.on_output)
        assert emission.handed is not None
        return emission.handed

    def _may_tell(self, emission: Emission) -> bool:
        """Whether to tell a callback once more that its request ended. One that raises at that,
        too, would keep other requests waiting for ever."""
        told = [one for one in self._emissions if one.request is emission.request]
        return sum(one.output.error is not None for one in told) < MAX_TOLD

    def _call_back(self, emission: Emission, on_output: OnOutput) -> None:
        try:
            emission.is_begun = True
            on_output(emission.output)
            emission.handed = emission.output
        except Exception as error:
            self._blame(emission.request, None)
            emission.handed = replace(emission.output, finish_reason="error", error=error)
        except BaseException as error:
            if emission.is_begun and emission.handed is None:
                if self._blamed != id(error):  # Else another's callback raised it, by `abort`.
                    self._blamed = id(error)
                    self._blame(emission.request, error if self._may_tell(emission) else None)
                emission.handed = emission.output
            raise
