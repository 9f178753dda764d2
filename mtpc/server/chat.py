"""Turns messages into a prompt with the checkpoint's Jinja template, which runs in another process
(`mtpc.server.sandbox`).

The variables, filters and options are those of transformers' `apply_chat_template`, for which
templates are written (huggingface.co/docs/transformers, "Chat templates"). This module reads the
template from the checkpoint's files and does not import transformers.
"""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mtpc.errors import CheckpointError, RequestError, ServingError
from mtpc.program.processes import start_python
from mtpc.server.sandbox import CPU_SECONDS
from mtpc.weights.gguf import find_gguf
from mtpc.weights.gguf.file import chat_template
from mtpc.weights.json_file import CONFIG, read_json

_TRAINING_MARKS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""transformers' tags around the assistant's text. Only training uses them."""
_MOST_BYTES = 2**20
"""The largest template file. No released model has a tenth of this."""
_REFUSED = "the chat template refuses these messages"


class ChatTemplate:
    """Renders conversations as prompts. Any thread may call it; one text is made at a time.
    `source` is the Jinja template; `special_tokens` are texts by its variables' names
    ("bos_token").

    Raises:
        CheckpointError: `source` is not a template, or cannot be compiled within the limits.
        ServingError: the process that renders cannot be started.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        # Each mark becomes a condition that always holds.
        self._plain = _TRAINING_MARKS.sub(
            lambda mark: f"{mark[1]}{'endif' if mark[2] else 'if true'}{mark[3]}", source
        )
        self.source, self._special_tokens = source, dict(special_tokens)
        self._lock, self._child = threading.Lock(), self._start()

    def render(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> str:
        """The prompt of a conversation, up to the start of the assistant's next message.

        A template that exceeds a limit ends its process. The next call starts another one.

        `kwargs` are further variables of the template, such as enable_thinking.

        Raises:
            RequestError: the template refuses these messages, violates the sandbox, or goes beyond
                the limits of `mtpc.server.sandbox`.
            ServingError: the process that renders cannot be started again.
        """
        free = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        variables = {**free, "messages": messages, "add_generation_prompt": True}
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
        text, reason = child.ask(self._plain.encode(errors="surrogatepass"))
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


def load_chat_template(directory: Path, file: Path | None) -> ChatTemplate | None:
    """Load a checkpoint's chat template. None if it has none.

    The first of these counts: `file`, chat_template.jinja, the entry in tokenizer_config.json, that
    in a GGUF file's metadata. The files are in the directory, or beside the GGUF file.

    Raises:
        CheckpointError: a file cannot be read, or the template is invalid.
        ServingError: the process that renders cannot be started.
    """
    gguf = [] if _is_there(directory / CONFIG) else find_gguf(directory)
    directory = gguf[0].parent if gguf else directory
    place = directory / "tokenizer_config.json"
    config = read_json(place) if _is_there(place) else {}
    if gguf and not config:
        place = gguf[0]
        template, tokens_of_file = chat_template(place)
        config = {**tokens_of_file, "chat_template": template}
    path = file or directory / "chat_template.jinja"
    if file is not None or _is_there(path):
        source: str | None = _read(path)
    else:
        # An entry may be a list of named templates.
        source = config.get("chat_template")
        if isinstance(source, list):
            named = [e for e in source if isinstance(e, dict) and e.get("name") == "default"]
            source = named[0].get("template") if named else None
        if source is not None and not isinstance(source, str):
            raise CheckpointError(
                f"{place}: chat_template is of type {type(source).__name__}; expected a text, or a "
                "list of objects with name and template"
            )
    if source is None:
        return None
    tokens = {name: _text(token) for name, token in config.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def _is_there(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not stat.S_ISREG(mode):  # To open a pipe waits for ever.
        raise CheckpointError(f"{path} is no regular file; expected one, or none: remove it")
    return True


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        source = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the chat template {path}: {error}") from None
    if len(data) > _MOST_BYTES:
        raise CheckpointError(
            f"the chat template {path} has more than {_MOST_BYTES} bytes; expected a Jinja template"
        )
    return source


def _text(token: Any) -> str | None:
    """The text of a special token, whose entry is the text or an object with a `content`.

    Returns None for other entries with such a name, for example the boolean `add_bos_token`.
    """
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
