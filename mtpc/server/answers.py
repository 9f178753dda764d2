"""Encodes answers as OpenAI's JSON: one body, or the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from mtpc.engine.text import Decode
from mtpc.sampling_params import TokenLogprobs
from mtpc.server.chat_parser import CallPart

DONE = b"data: [DONE]\n\n"
_HALF = "\ufffd"


@dataclass(frozen=True)
class Unscored:
    """The first token of a prompt. It has no log-probability, because nothing predicts it."""

    token_id: int


@dataclass(frozen=True)
class Piece:
    """New text of one choice; it may be empty.

    Attributes:
        logprobs: one entry per new token, if the client asked for log-probabilities.
        finish_reason: "stop", "length" or "tool_calls" in the last piece, else None.
        token_ids: the new tokens, if the client asked for them.
    """

    text: str
    logprobs: Sequence[TokenLogprobs | Unscored]
    finish_reason: str | None
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    token_ids: Sequence[int] = ()

    @property
    def is_empty(self) -> bool:
        said = self.text or self.reasoning or self.calls
        return not (said or self.finish_reason or self.logprobs or self.token_ids)


@dataclass(frozen=True)
class Usage:
    """The token counts of a request: of its prompts, of its answer, and of its prompts those that
    the prefix cache had."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Answer:
    """The format of an answer, and the fields that all of its chunks share.

    Attributes:
        model: the model's name in the request.
        wants_usage: whether a stream ends with a usage chunk.
        prompt_ids: the prompt of each choice if the client asked for token ids, else empty.
        created: Unix time, in seconds.
        token: the random part of the answer's id.
    """

    is_chat: bool
    model: str
    decode: Decode
    wants_logprobs: bool
    wants_usage: bool
    prompt_ids: Sequence[list[int]] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    token: str = field(default_factory=lambda: uuid4().hex)

    def head(self, is_stream: bool) -> dict[str, Any]:
        """What every chunk, or the body, begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.token}",
            "object": f"{kind}.chunk" if is_stream and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The body of an answer without a stream, of all pieces of each choice.

        Each choice is encoded separately, because the JSON encoder holds the GIL during a call.
        """
        head = self.head(False)
        if self.is_chat and self.prompt_ids:
            head["prompt_token_ids"] = self.prompt_ids[0]
        frame = json.dumps(head)[:-1]
        encoded = ", ".join(json.dumps(self._choice(i, each)) for i, each in enumerate(choices))
        return f'{frame}, "choices": [{encoded}], "usage": {json.dumps(usage.json())}}}'.encode()

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return {
            "index": index,
            **({"message": _message(text, pieces)} if self.is_chat else {"text": text}),
            **self.ids(index, pieces, is_first=True),
            "logprobs": self.logprobs(entries, 0)[0] if self.wants_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def ids(self, index: int, pieces: Sequence[Piece], is_first: bool) -> dict[str, Any]:
        """Token ids of pieces, and before the first ones those of a completion's prompt."""
        if not self.prompt_ids:
            return {}
        found = {"token_ids": [i for piece in pieces for i in piece.token_ids]}
        if is_first and not self.is_chat:
            found["prompt_token_ids"] = self.prompt_ids[index]
        return found

    def logprobs(
        self, entries: Sequence[TokenLogprobs | Unscored], offset: int
    ) -> tuple[dict[str, Any], int]:
        """OpenAI's `logprobs` object with one entry per token, and the offset after these tokens (0
        for a chat). `offset` counts the characters of a completion's text before them."""
        if self.is_chat:
            content = [
                {
                    **self._chat_token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._chat_token(*pair) for pair in entry.top],
                }
                for entry in entries
                if isinstance(entry, TokenLogprobs)
            ]
            return {"content": content, "refusal": None}, 0
        tokens = [self.decode([entry.token_id]) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        numbers = [None if isinstance(entry, Unscored) else entry.logprob for entry in entries]
        shape = {
            "tokens": tokens,
            "token_logprobs": numbers,
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }
        return shape, offset

    def _top(self, entry: TokenLogprobs | Unscored) -> dict[str, float] | None:
        """Log-probabilities by text. A text that another token has is `token_id:ID`, as in vLLM."""
        if isinstance(entry, Unscored):
            return None
        found: dict[str, float] = {}
        for token_id, logprob in {entry.token_id: entry.logprob, **dict(entry.top)}.items():
            text = self.decode([token_id])
            found[f"token_id:{token_id}" if text in found else text] = logprob
        return found

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """A token's entry. `bytes` is null if the token is a part of a character, as OpenAI allows,
        because the decoded text does not show its bytes.
        """
        text = self.decode([token_id])
        parts = None if _HALF in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": parts}


def _message(text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The assistant's message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reasoning = "".join(piece.reasoning for piece in pieces)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for piece in pieces for part in piece.calls):
        if part.id is not None:
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.id, "type": "function", "function": function}
        calls[part.index]["function"]["arguments"] += part.arguments
    if calls:
        message |= {"content": text or None, "tool_calls": [*calls.values()]}
    return message


def _part_json(part: CallPart) -> dict[str, Any]:
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


class Chunks:
    def __init__(self, answer: Answer, index: int):
        self._answer, self._index, self._offset, self._is_first = answer, index, 0, True

    def encode(self, piece: Piece) -> bytes:
        """Encode a piece as an event. In a chat, an event with the role precedes the first one."""
        answer, role, logprobs = self._answer, b"", None
        if self._is_first and answer.is_chat:
            ids = {"prompt_token_ids": answer.prompt_ids[self._index]} if answer.prompt_ids else {}
            role = self._event({"delta": {"role": "assistant", "content": ""}}, ids)
        if answer.wants_logprobs and piece.logprobs:
            logprobs, self._offset = answer.logprobs(piece.logprobs, self._offset)
        choice: dict[str, Any] = answer.ids(self._index, [piece], self._is_first)
        choice |= {"delta": _delta(piece)} if answer.is_chat else {"text": piece.text}
        self._is_first = False
        more = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        return role + self._event(choice | more, {})

    def _event(self, choice: dict[str, Any], ids: Mapping[str, Any]) -> bytes:
        said = {"index": self._index, "logprobs": None, "finish_reason": None, **choice}
        body = {**self._answer.head(True), **ids, "choices": [said]}
        usage = {"usage": None} if self._answer.wants_usage else {}
        return f"data: {json.dumps(body | usage)}\n\n".encode()


def _delta(piece: Piece) -> dict[str, Any]:
    """What a piece adds to a message."""
    is_parsed = piece.reasoning or piece.calls
    delta: dict[str, Any] = {} if is_parsed and not piece.text else {"content": piece.text}
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.calls:
        delta["tool_calls"] = [_part_json(part) for part in piece.calls]
    return delta


def usage_chunk(answer: Answer, usage: Usage) -> bytes:
    """The event with the token counts of a whole stream."""
    body = {**answer.head(True), "choices": [], "usage": usage.json()}
    return f"data: {json.dumps(body)}\n\n".encode()
