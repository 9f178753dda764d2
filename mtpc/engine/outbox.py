"""The requests of an engine, and what their callers are not told yet: each token once.

What is not told follows from the requests alone (`Request.num_told`, and `Request.telling` while a
callback runs). So after an interrupt the queue of the outbox is built anew from them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from mtpc.engine.request import FinishReason, Request, StepOutput
from mtpc.engine.scheduler import Scheduler
from mtpc.engine.stats import Stats
from mtpc.errors import ServingError


class Outbox:
    """Ends requests, and tells their callers what steps and aborts have decided. `requests` are, by
    id and in order of arrival, those whose end is not told yet."""

    def __init__(self, scheduler: Scheduler, stats: Stats):
        self._scheduler, self._stats = scheduler, stats
        self.requests: dict[int, Request] = {}
        self._untold = deque[Request]()
        # What the caller of `step` gets at its end: a request, how many of its tokens are told, and
        # the output. From the moment that it is here, it is told.
        self._told: list[tuple[Request, int, StepOutput]] = []

    @property
    def has_any(self) -> bool:
        """Whether an output waits. It does between two steps only if one was interrupted."""
        return bool(self._untold or self._told)

    def put(self, request: Request) -> None:
        self._untold.append(request)

    def end(
        self, request: Request, reason: FinishReason, error: ServingError | None = None
    ) -> None:
        """End a request at any moment. It leaves the queues."""
        was_live = request.finish_reason is None
        request.emit(StepOutput(request.request_id, [], reason, error=error))
        if was_live:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Take a request out of the queues after the output that ended it."""
        assert request.finish_reason is not None
        self._stats.finished[request.finish_reason] += 1
        self._scheduler.remove(request)

    def fail(self, request: Request, cause: BaseException) -> None:
        """End a request because of what the engine raised."""
        what = f"request {request.request_id} ended, because the engine raised {cause!r}"
        error = ServingError(what)
        error.__cause__ = cause
        self.end(request, "error", error)
        self.put(request)

    def hand_out(self) -> None:
        """Tell all news, in order."""
        while self._untold:
            request = self._untold[0]
            if request.request_id in self.requests:  # Else an earlier turn has told its end.
                output = self._tell(request)
                self._told.append((request, len(request.output_ids), output))
                self._note(*self._told[-1])
            self._untold.popleft()

    def tell_end(self, request: Request) -> None:
        """Tell a request's callback at once that the request was aborted."""
        if request.on_output is not None:
            self._tell(request)
        self.requests.pop(request.request_id, None)

    def take(self) -> list[StepOutput]:
        """What was told since the last call. After an interrupt it begins with what was told
        before."""
        outputs = [output for _, _, output in self._told]
        self._told = []
        return outputs

    def restart(self, cause: BaseException) -> None:
        """Build the queue anew from the requests, after a step or an abort that was interrupted.

        It is unknown whether a callback that was interrupted took its output. So its request ends,
        and one more output says so. If that is interrupted, too, the request is forgotten: it
        would keep the other requests waiting for ever.
        """
        for told in self._told:
            self._note(*told)
        cut = [each for each in self.requests.values() if each.telling is not None]
        for request in cut:
            assert request.telling is not None
            if request.on_output is not None and request.telling.error is not None:
                del self.requests[request.request_id]
            elif request.on_output is not None:
                request.num_told = len(request.output_ids)
                self._stats.callback_errors += 1
                self.fail(request, cause)
            request.telling = None
        self._untold = deque(each for each in self.requests.values() if each.has_news)

    def _tell(self, request: Request) -> StepOutput:
        """Call a request's callback, if it has one. If it raises, only its own request ends."""
        output = request.telling = request.news()
        try:
            if request.on_output is not None:
                request.on_output(output)
        except Exception as error:
            self._stats.callback_errors += 1
            if request.finish_reason is None:
                self.end(request, "error")
            output = replace(output, finish_reason="error", error=error)
        return output

    def _note(self, request: Request, count: int, output: StepOutput) -> None:
        """Note in a request what it was told. A second call changes nothing."""
        request.num_told, request.telling = count, None
        if output.finish_reason is not None:
            self.requests.pop(request.request_id, None)
