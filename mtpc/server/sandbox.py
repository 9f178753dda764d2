"""The process that renders a chat template: Jinja's sandbox within limits of time and memory.

A checkpoint's template is not trusted. Jinja's sandbox hides Python's internals from it, but a
filter or method may take unlimited time or memory. So a template runs in its own process. If it
exceeds its limits, the system ends that process or refuses it memory.

    caller: the template, then variables as JSON ->  | child: `serve`
    <- b"+" and the prompt, or b"-" and a reason     | each message: one answer, or it ends
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED = 2**24
"""The longest text, in characters, that a template may make."""
CPU_SECONDS = 2.0
"""Time of the processor for one text. Templates of released models take milliseconds."""
MEMORY_BYTES = 2**30
"""Address space of the process. Linux enforces this limit; macOS does not."""
_MAX_REASON = 500


def serve(handle: int) -> None:
    """The child's side: compile the one template, then render until the caller is gone. `handle` is
    the file descriptor of its end of the pipe."""
    pipe, compiled = Connection(handle), list[Template]()
    # The default action ends the process, even within a call of Python's own C code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # A lower limit holds already.
            resource.setrlimit(kind, (most, most))
    with contextlib.suppress(EOFError, OSError):  # The caller is gone.
        while True:
            data = pipe.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            answer = _answer(compiled, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(answer)


def _answer(compiled: list[Template], data: bytes) -> bytes:
    """The answer to one message: the first one is the template."""
    try:
        if compiled:
            pieces, size = [], 0
            for piece in compiled[0].generate(json.loads(data)):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise TemplateError(f"it makes a text of more than {MAX_RENDERED} characters")
            return b"+" + "".join(pieces).encode()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
        compiled.append(environment.from_string(data.decode()))
        return b"+"
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error}"
    except MemoryError:
        reason = f"it needs more than {MEMORY_BYTES} bytes of memory"
    except Exception as error:  # A template may raise any exception.
        reason = str(error) or type(error).__name__
    return b"-" + reason[:_MAX_REASON].encode(errors="backslashreplace")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own `tojson` filter, which escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
