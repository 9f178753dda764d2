"""Renders a chat template in another process, which runs `mtpc.server.sandbox`."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from mtpc.errors import CheckpointError, RequestError, ServingError
from mtpc.program.processes import start_python
from mtpc.server.sandbox import CPU_SECONDS

_REFUSED = "the chat template refuses these messages"


class Renderer:
    """Renders one template. Any thread may call it; one text is made at a time.

    Args:
        source: the Jinja template.

    Raises:
        CheckpointError: `source` is not a template, or cannot be compiled within the limits.
        ServingError: the process cannot be started.
    """

    def __init__(self, source: str):
        self._source, self._lock = source, threading.Lock()
        self._child = self._start()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of these variables.

        A template that exceeds a limit ends its process. The next call starts another one.

        Raises:
            RequestError: the template fails with these variables, or takes too long.
            ServingError: the process cannot be started.
        """
        try:
            data = json.dumps(variables).encode()
        except RecursionError:
            raise RequestError(f"{_REFUSED}: they are nested too deeply") from None
        with self._lock:
            if self._child.has_ended:
                self._child = self._start()
            text, reason = self._child.ask(data)
        if text is None:
            raise RequestError(f"{_REFUSED}: {reason}")
        return text

    def _start(self) -> _Child:
        try:
            child = _Child()
        except OSError as error:
            raise ServingError(
                f"cannot start the process that renders the chat template: {error}; free "
                "memory, processes or file descriptors of this machine"
            ) from None
        text, reason = child.ask(self._source.encode(errors="surrogatepass"))
        if text is None:
            child.end()
            raise CheckpointError(f"the chat template is broken: {reason}")
        return child


class _Child:
    """A process that runs `mtpc.server.sandbox`, which imports little more than Jinja."""

    def __init__(self) -> None:
        self._process, self._pipe = start_python("mtpc.server.sandbox")
        self.end = weakref.finalize(self, _end, self._process, self._pipe)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, data: bytes) -> tuple[str | None, str]:
        """Send a message. Returns the answer's text, or None and the reason of the failure."""
        try:
            self._pipe.send_bytes(data)
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            self.end()
            return None, _how_it_ended(self._process.returncode)
        text = answer[1:].decode()
        return (text, "") if answer[:1] == b"+" else (None, text)


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()  # Nothing happens if it has ended.
    process.wait()


def _how_it_ended(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} s of the processor's time"
    return f"its process ended with status {status}, as a rule because memory ran out"
