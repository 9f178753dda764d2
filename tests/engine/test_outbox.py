"""An interrupt between any two instructions of the outbox loses no output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from mtpc.engine import outbox
from mtpc.engine.outbox import Outbox
from mtpc.engine.request import Request, StepOutput


class Desk:
    """Three requests of an outbox, and what their callbacks got.

    Args:
        raising: the request whose callback raises KeyboardInterrupt once it has got its tokens.
    """

    def __init__(self, raising: int = 0) -> None:
        self.got: dict[int, list[StepOutput]] = {1: [], 2: [], 3: []}
        self.raising, self.box = raising, Outbox(self._blame)
        self.requests = {
            number: Request(number, [3], 8, on_output=self._take) for number in self.got
        }
        self.emissions = {
            number: self.box.put(request, StepOutput(number, [number, number], None))
            for number, request in self.requests.items()
        }

    def _take(self, output: StepOutput) -> None:
        self.got[output.request_id].append(output)
        if output.request_id == self.raising and output.token_ids:
            raise KeyboardInterrupt

    def _blame(self, request: Request, interrupt: BaseException | None) -> None:
        assert interrupt is not None
        self.box.put_failure(request, interrupt)

    def check(self) -> None:
        """Each callback got its tokens once; or its call had begun, and it was told so."""
        for number, outputs in self.got.items():
            tokens = [output.token_ids for output in outputs if output.finish_reason is None]
            failed = bool(outputs) and outputs[-1].finish_reason == "error"
            assert tokens == [[number, number]] or (failed and not tokens), (number, outputs)
            assert not failed or self.emissions[number].is_begun
            assert failed or number != self.raising
        assert not self.box.has_any


def was_interrupted(action: Callable[[], object], moment: int) -> bool:
    """Run the action, and raise KeyboardInterrupt before this instruction of the module."""
    left = moment

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != outbox.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("second", [0, 1, 20, 45, 70])
def test_an_interrupt_loses_no_output(second: int) -> None:
    """At each moment in turn; unless `second` is 0, it interrupts the next call, too."""
    for moment in range(1, 1000):
        desk = Desk()
        went_on = was_interrupted(desk.box.hand_out, moment)
        was_interrupted(desk.box.hand_out, second)
        desk.box.hand_out()
        desk.check()
        if not went_on:
            break
    assert 100 < moment < 999


def test_an_interrupt_in_a_callback_and_another_after_it() -> None:
    for moment in range(1, 250):
        desk = Desk(raising=2)
        assert was_interrupted(desk.box.hand_out, moment)
        was_interrupted(desk.box.hand_out, 0)
        desk.box.hand_out()
        desk.check()


def test_an_abort_is_told_after_an_interrupt() -> None:
    for moment in range(1, 1000):
        desk = Desk()
        aborted = desk.box.put(desk.requests[1], StepOutput(1, [], "aborted"))
        went_on = was_interrupted(lambda: desk.box.hand(aborted), moment)  # noqa: B023
        desk.box.hand_out()
        assert desk.got[1][0].finish_reason in ("aborted", "error"), moment
        assert desk.got[1][0].finish_reason == "aborted" or went_on
        if not went_on:
            break
    assert 30 < moment < 999
