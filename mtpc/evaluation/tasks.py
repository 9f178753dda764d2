"""Tasks in files: each line is a JSON object with a question and its answer.

The object has `prompt` (text) or `messages` (a conversation), and `answer`: a right answer, or a
list of them. `stop` may hold strings that end the text, and `id` is ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpc.errors import OptionError
from mtpc.server.chat import ChatTemplate
from mtpc.weights.served_model import ServedModel

FIELDS = ("prompt", "messages", "answer", "stop", "id")


@dataclass(frozen=True)
class Question:
    """One line of a task: text or a conversation, the right answers, and strings that end the
    text."""

    prompt: str | list[dict[str, Any]]
    answers: tuple[str, ...]
    stop: tuple[str, ...] = ()

    def is_right(self, text: str) -> bool:
        """Whether the text equals one of the answers, apart from space at both ends."""
        return text.strip() in [answer.strip() for answer in self.answers]


def read_task(path: Path, limit: int | None = None) -> list[Question]:
    """Read the questions of a file. With `limit`, only so many.

    Raises:
        OptionError: the file cannot be read or has no question, or a line (named by its number) is
            not a question.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the task {path}: {error}") from None
    questions = [
        _question(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise OptionError(f"{path} has no questions; expected one in each line, as JSON")
    return questions[:limit]


def _question(line: str, place: str) -> Question:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict) or set(fields) - set(FIELDS):
        found = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
        raise OptionError(f"{place} has {found}; expected an object of {', '.join(FIELDS)}")
    if ("prompt" in fields) == ("messages" in fields):
        raise OptionError(f"{place}: expected one of prompt and messages")
    prompt = fields["prompt"] if "prompt" in fields else fields["messages"]
    if "prompt" in fields and not (isinstance(prompt, str) and prompt):
        raise OptionError(f"{place}: prompt is {prompt!r}; expected text")
    if "messages" in fields and not (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    ):
        raise OptionError(f"{place}: messages is {prompt!r}; expected objects of role and content")
    answers = _texts(fields.get("answer", []), f"{place}: answer")
    if not answers:
        raise OptionError(f"{place}: answer is missing; expected a text, or several")
    return Question(prompt, answers, _texts(fields.get("stop", []), f"{place}: stop"))


def _texts(value: Any, name: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise OptionError(f"{name} is {value!r}; expected a text, or several, none of them empty")
    return tuple(texts)


def encode_all(
    questions: list[Question], served: ServedModel, template: ChatTemplate | None
) -> list[list[int]]:
    """The token ids of each question's prompt. All engines get the same ids.

    Raises:
        RequestError: the checkpoint has no tokenizer.
        OptionError: a question has messages, and the checkpoint has no chat template.
    """
    rows = []
    for question in questions:
        if isinstance(question.prompt, str):
            rows.append(served.encode(question.prompt))
        elif template is None:
            raise OptionError(
                f"the task has messages, and {served.source} has no chat template; give prompts"
            )
        else:
            rows.append(served.encode(template.render(question.prompt, {}), special_tokens=False))
    return rows
