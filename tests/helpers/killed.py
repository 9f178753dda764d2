"""Processes that are killed in the middle of what they do."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any


def in_a_child(run: Callable[[], Any]) -> None:
    """Run until a system call that the caller has replaced kills the process."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_at(call: int, before: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """What kills its process when it is called that often, and else does what `before` does."""
    calls = iter(range(1, call + 1))

    def count(*given: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*given)

    return count
