"""Splits a model's text into reasoning, content and tool calls, as the text arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from mtpc.engine.text import overlap
from mtpc.server.tool_formats import Call, Schema, ToolFormat, without_tail

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class CallPart:
    """A new part of a call: the call's number in its choice, from 0; in the first part its id and
    the function's name; and more of the arguments' JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass
class Delta:
    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class ChatParser:
    """The parser of one choice.

    The result does not depend on how the text is cut into pieces, except for the number of parts.

    Args:
        form: how the model writes tool calls; None leaves them in the content.
        schemas: the schema of each function's arguments.
        thinks: whether to separate reasoning from the content; `is_thinking`: the prompt opened it.
        is_single: whether to drop calls after the first.
        is_forced: whether a grammar allows calls alone. Other text is then a call that the end cuts
            before its arguments, and no content.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        schemas: Mapping[str, Schema],
        thinks: bool,
        is_thinking: bool,
        is_single: bool = False,
        is_forced: bool = False,
    ):
        self._form, self._schemas, self._is_single = form, schemas, is_single
        self._is_forced = is_forced
        self._state = "reasoning" if is_thinking else "start" if thinks else "content"
        self._held = ""
        self._call: _OpenCall | None = None
        self._num_calls = 0
        self._is_empty = is_thinking  # While true, leading space is dropped.

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str, last: bool = False) -> Delta:
        """Add text. At the last, nothing is held back."""
        delta, self._held = Delta(), self._held + text
        states = {
            "start": self._start,
            "reasoning": self._reason,
            "content": self._content,
            "call": self._in_call,
        }
        while states[self._state](delta, last):
            pass
        if self._is_forced:
            delta.content = ""
        return delta

    def _start(self, delta: Delta, last: bool) -> bool:
        """Find out whether the model itself opens a reasoning section."""
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held, self._state, self._is_empty = begun[len(THINK) :], "reasoning", True
        elif last or not THINK.startswith(begun):
            self._state = "content"
        else:
            return False
        return True

    def _reason(self, delta: Delta, last: bool) -> bool:
        text, mark = self._until((END_THINK,), last)
        delta.reasoning += self._trimmed(text, mark is not None or last)
        if mark is None:
            return False
        self._state, self._is_empty = "content", True
        return True

    def _content(self, delta: Delta, last: bool) -> bool:
        form = self._form
        if form is None:
            delta.content += self._drop_leading(self._held)
            self._held = ""
            return False
        marks = tuple(m for m in (form.begin, form.opening, form.closing) if m)
        text, mark = self._until(marks, last)
        is_end = last and mark is None
        delta.content += (
            self._drop_leading(text) if is_end else self._trimmed(text, mark is not None)
        )
        if mark is None:
            return False
        if mark == form.begin:
            self._state, self._call = "call", _OpenCall(form)
        return True

    def _in_call(self, delta: Delta, last: bool) -> bool:
        form, call = self._form, self._call
        assert form is not None
        assert call is not None
        text, mark = self._until((form.end,), last)
        call.text += text
        index = self._num_calls
        is_dropped = self._is_single and index > 0
        if not is_dropped:
            delta.calls += call.parts(index, self._schemas, mark is not None, last)
        if mark is None and not last:
            return False
        if call.name is None and not is_dropped:
            delta.content += form.begin + call.text + (mark or "")
        elif call.name is not None:
            self._num_calls += 1
        self._state, self._call, self._is_empty = "content", None, True
        return mark is not None

    def _until(self, marks: tuple[str, ...], last: bool) -> tuple[str, str | None]:
        """Take the text up to the first mark; without one, all text that cannot begin a mark."""
        found = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
        if found:
            place, mark = min(found)
            text, self._held = self._held[:place], self._held[place + len(mark) :]
            return text, mark
        held = 0 if last else max(overlap(self._held, mark) for mark in marks)
        cut = len(self._held) - held
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def _trimmed(self, text: str, ends: bool) -> str:
        """A section's text without leading space and, if the section ends here, trailing space."""
        text = self._drop_leading(text)
        kept = text.rstrip()
        if not ends:
            self._held = text[len(kept) :] + self._held
        return kept

    def _drop_leading(self, text: str) -> str:
        if self._is_empty:
            text = text.lstrip()
            self._is_empty = not text
        return text


class _OpenCall:
    def __init__(self, form: ToolFormat):
        self._form, self.text, self._sent = form, "", 0
        self.name: str | None = None
        self._start = 0

    def parts(
        self, index: int, schemas: Mapping[str, Schema], is_whole: bool, last: bool
    ) -> list[CallPart]:
        """The new parts of the call since the last time."""
        found: list[CallPart] = []
        ends = is_whole or last
        head = self._form.head.match(self.text) if self._form.head else None
        if self.name is None and head is not None and head.end() < len(self.text):
            self.name, self._start = head[1], head.end()
            found.append(CallPart(index, f"call_{uuid4().hex}", self.name, ""))
        if self.name is not None:
            arguments = self._arguments(ends)
            if len(arguments) > self._sent:
                found.append(CallPart(index, None, None, arguments[self._sent :]))
                self._sent = len(arguments)
        elif ends:
            call: Call | None = self._form.parse(self.text, schemas)
            longer = None if is_whole else self._form.parse(self.text + "x", schemas)
            is_cut = call and longer and call.name != longer.name  # Within its name.
            if call is not None and not is_cut:
                self.name = call.name
                found.append(CallPart(index, f"call_{uuid4().hex}", call.name, call.arguments))
        return found

    def _arguments(self, ends: bool) -> str:
        """The arguments so far, without characters that may belong to the end of the call."""
        text = self.text[self._start :]
        if ends:
            return without_tail(text, self._form.tail)
        return text.rstrip("}`\n\t ")
