"""Turns messages into a prompt with the checkpoint's own Jinja template, run in a sandbox.

The variables, filters and options are those of transformers' `apply_chat_template`, for which
templates are written (huggingface.co/docs/transformers, "Chat templates"). This module reads the
template from the checkpoint's files and does not import transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import TemplateSyntaxError

from mtpc.errors import CheckpointError, RequestError
from mtpc.server.sandbox import Sandbox, check_size

_TRAINING_MARKS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""transformers' tags around the assistant's text. Only training uses them."""
_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
    MemoryError,
)
"""Exceptions that templates raise for messages or variables that they do not expect."""


class ChatTemplate:
    """Renders conversations as prompts.

    Args:
        source: the Jinja template.
        special_tokens: texts of special tokens by the template's variable names ("bos_token").

    Attributes:
        source: the Jinja template.

    Raises:
        CheckpointError: `source` is not a valid Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
        try:
            self._template = environment.from_string(_without_marks(source))
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is broken in line {error.lineno}: {error}"
            ) from None
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> str:
        """The prompt of a conversation, up to the start of the assistant's next message.

        Args:
            messages: the messages, each with a role and a content.
            kwargs: further variables of the template, such as enable_thinking.

        Raises:
            RequestError: the template refuses these messages, violates the sandbox, or makes more
                than `MAX_RENDERED` characters of them.
        """
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": True,
        }
        try:
            return self._render(variables)
        except _FAULTS as error:
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {reason}") from error

    def _render(self, variables: dict[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            check_size(size)
        return "".join(pieces)


def load_chat_template(directory: Path, file: Path | None) -> ChatTemplate | None:
    """Load a checkpoint's chat template.

    The first of these counts: `file`, chat_template.jinja, the entry in tokenizer_config.json.

    Args:
        directory: the checkpoint's directory.
        file: a template to use instead of the checkpoint's, or None.

    Returns:
        The template, or None if the checkpoint has none.

    Raises:
        CheckpointError: a file cannot be read, or the template is invalid.
    """
    config = _read_json(directory / "tokenizer_config.json")
    path = file or directory / "chat_template.jinja"
    if file is not None or path.is_file():
        try:
            source: str | None = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read the chat template {path}: {error}") from None
    else:
        source = _default(config.get("chat_template"))
    if source is None:
        return None
    tokens = {name: _text(token) for name, token in config.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def _default(entry: Any) -> str | None:
    """The template in a checkpoint's entry, which may be a list of named templates."""
    if isinstance(entry, list):
        return next((e["template"] for e in entry if e.get("name") == "default"), None)
    return entry


def _text(token: Any) -> str | None:
    """The text of a special token, whose entry is the text or an object with a `content`.

    Returns None for other entries with such a name, for example the boolean `add_bos_token`.
    """
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _without_marks(source: str) -> str:
    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}"

    return _TRAINING_MARKS.sub(replace, source)


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
