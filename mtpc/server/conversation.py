"""Turns a chat request into a prompt, a grammar and a parser of the answer.

The checkpoint's chat template shows how the model writes tool calls and reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtpc.engine.image_files import MOST_PIXELS
from mtpc.engine.vision import count_images, split_images
from mtpc.errors import RequestError
from mtpc.server.chat import ChatTemplate
from mtpc.server.chat_parser import END_THINK, THINK, ChatParser
from mtpc.server.errors import ApiError
from mtpc.server.lark import ANY_OBJECT, Lark
from mtpc.server.tool_formats import PARSERS, Schema, ToolFormat, find_format
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from PIL.Image import Image

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that names no parameters, as at OpenAI."""


@dataclass(frozen=True)
class Conversation:
    """A chat request, ready to run.

    Attributes:
        lark: a grammar of the answer, or None; `param` is the field that it comes from.
        parser: makes the parser of a choice; None if the text is the content.
        texts: texts of special tokens that the parser needs.
        images: the images, in the order of their marks in the prompt.
    """

    prompt: str
    lark: str | None
    param: str
    parser: Callable[[], ChatParser] | None
    texts: tuple[str, ...]
    images: tuple[Image, ...] = ()


class Conversations:
    """Turns the fields of chat requests into `Conversation`s, of at most `most_images` images: 0 if
    the model takes none. The parsers are of `PARSERS` and of `mtpc.server.options.REASONING`."""

    def __init__(
        self,
        template: ChatTemplate,
        served: ServedModel,
        tool_parser: str,
        reasoning_parser: str,
        most_images: int = 0,
    ):
        self._template, self._served, self._most_images = template, served, most_images
        self._form = find_format(tool_parser, template.source)
        has_section = reasoning_parser != "auto" or END_THINK in template.source
        self._thinks = has_section and reasoning_parser != "none"

    def make(self, fields: Mapping[str, Any]) -> Conversation:
        """The conversation of a request, from what `check_fields` returned.

        Raises:
            ApiError: tools are given, and the format of tool calls is unknown; or images are
                refused.
            RequestError: the template refuses the messages.
        """
        tools: list[dict[str, Any]] = fields.get("tools") or []
        choice = fields.get("tool_choice", "auto") if tools else "none"
        form = self._form if choice != "none" else None
        if choice != "none" and form is None:
            raise ApiError(
                400,
                "this server knows no format of tool calls in the chat template; start it with "
                f"--tool-call-parser, one of {', '.join(PARSERS[2:])}",
                "tools",
                "no_tool_format",
            )
        given, images = self._images(fields["messages"])
        messages = [self._message(message) for message in given]
        effort = fields.get("reasoning_effort")  # A hint, which templates may read.
        hints = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            hints["enable_thinking"] = False
        kwargs = {**hints, **fields.get("chat_template_kwargs", {})}
        prompt = self._template.render(messages, {"tools": tools or None, **kwargs})
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or NO_ARGUMENTS
            for tool in tools
        }
        is_single = fields.get("parallel_tool_calls") is False or isinstance(choice, dict)
        is_forced = choice not in ("none", "auto")
        is_thinking = self._thinks and prompt.rstrip().endswith(THINK)
        may_think = self._thinks and not prompt.rstrip().endswith(END_THINK)

        def parser() -> ChatParser:
            return ChatParser(form, schemas, may_think, is_thinking, is_single, is_forced)

        writer = _Writer(Lark(self._served.own_tokens), form, schemas, is_single)
        body, param = writer.body(choice, fields)
        # Reasoning up to its end, and the line breaks after it.
        thinking = f'{writer.lark.until(END_THINK)} ("\\n" "\\n"?)?'
        think = f"({'' if is_thinking else writer.lark.text(THINK)} {thinking})"
        start = f"{think}{'' if is_thinking else '?'} {body}" if may_think else body
        return Conversation(
            prompt,
            None if body is None else writer.lark.grammar(start or ""),
            param,
            parser if form or may_think else None,
            (THINK, END_THINK, *(form.texts() if form else ())),
            tuple(images),
        )

    def _images(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image]]:
        """The messages, with marks in place of images, and the images."""
        count = count_images(messages)
        if not count:
            return messages, []
        if not self._most_images:
            raise ApiError(
                400,
                "the messages have images, which this model was compiled without; start the server "
                "with --images",
                "messages",
                "no_images",
            )
        if count > self._most_images:
            raise ApiError(
                400,
                f"the messages have {count} images; this server takes at most {self._most_images}",
                "messages",
                "too_many_images",
            )
        try:
            return split_images(messages, MOST_PIXELS)
        except RequestError as error:
            raise ApiError(400, str(error), "messages", "invalid_image") from None

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with arguments of tool calls in the template's form: text or an object."""
        if "tool_calls" not in message or (self._form and self._form.takes_text):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": _read(call["function"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}


def _read(function: Mapping[str, Any]) -> Any:
    """The arguments of an earlier call as an object; text that is not JSON stays text."""
    try:
        return json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return function["arguments"]


@dataclass
class _Writer:
    lark: Lark
    form: ToolFormat | None
    schemas: Mapping[str, Schema]
    is_single: bool

    def body(
        self, choice: str | dict[str, Any], fields: Mapping[str, Any]
    ) -> tuple[str | None, str]:
        """The grammar of the answer after the reasoning (None if it is free), and its field."""
        structured, wanted = fields.get("structured_outputs"), fields.get("response_format")
        if isinstance(choice, dict):
            return self._calls([choice["function"]["name"]]), "tool_choice"
        if choice == "required":
            return self._calls([*self.schemas]), "tool_choice"
        if structured:
            found, param = self.lark.structured(structured), "structured_outputs"
        elif wanted is None or wanted["type"] == "text":
            return None, "response_format"
        else:
            given = (
                wanted["json_schema"].get("schema", {}) if "json_schema" in wanted else ANY_OBJECT
            )
            found, param = self.lark.json(given), "response_format"
        if self.form is not None:
            found = f"({found} | {self._calls([*self.schemas])})"
        return found, param

    def _calls(self, names: list[str]) -> str:
        """A grammar of one or more calls of these functions."""
        form, lark = self.form, self.lark
        assert form is not None
        calls = " | ".join(f"({form.grammar(lark, name, self.schemas[name])})" for name in names)
        one = f"{lark.text(form.begin)} ({calls}) {lark.text(form.end)}"
        rest = "" if self.is_single else f"({lark.text(form.between)} {one})*"
        opening, closing = (
            lark.text(text) if text else "" for text in (form.opening, form.closing)
        )
        return f"({opening} {one} {rest} {closing})"
