"""OpenAI's answers as JSON: whole, and as chunks of a stream.

What of a chunk does not change is written once per choice. A chunk then costs the encoding of its
text, whatever the step put into it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from mtpc.engine.text import Decode
from mtpc.sampling_params import TokenLogprobs

DONE = b"data: [DONE]\n\n"
_HALF = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """What one choice got.

    Attributes:
        text: new text; it may be empty.
        logprobs: of new tokens, where they were asked for.
        finish_reason: "stop" or "length" with the last piece.
    """

    text: str
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None


@dataclass(frozen=True)
class Usage:
    """Tokens of a whole answer."""

    prompt_tokens: int
    completion_tokens: int

    def json(self) -> dict[str, int]:
        """OpenAI's usage object."""
        total = self.prompt_tokens + self.completion_tokens
        return {**vars(self), "total_tokens": total}


@dataclass(frozen=True)
class Answer:
    """The frame of an answer.

    Attributes:
        is_chat: which of the two shapes.
        model: as the client called it.
        decode: ids to text, for log-probabilities.
        wants_logprobs: whether they were asked for.
        wants_usage: whether a stream ends with usage.
    """

    is_chat: bool
    model: str
    decode: Decode
    wants_logprobs: bool
    wants_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))
    token: str = field(default_factory=lambda: uuid4().hex)

    def _head(self, is_stream: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.token}",
            "object": f"{kind}.chunk" if is_stream and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The answer of a request that does not stream; all pieces of each choice.

        Each choice is encoded by itself: an encoder holds the interpreter from begin to end.
        """
        frame = json.dumps(self._head(False))[:-1]
        said = ", ".join(json.dumps(self._choice(i, each)) for i, each in enumerate(choices))
        return f'{frame}, "choices": [{said}], "usage": {json.dumps(usage.json())}}}'.encode()

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces for entry in piece.logprobs]
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = self.logprobs(entries, 0)[0] if self.wants_logprobs else None
        reason = pieces[-1].finish_reason
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
        """Log-probabilities in this answer's shape, and where the next token's text begins."""
        if self.is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}, 0
        tokens = [self.decode([entry.token_id]) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops = [{self.decode([i]): p for i, p in _likeliest_last(entry)} for entry in entries]
        shape = {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return shape, offset

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Bytes of a part of a character are not known from its text: null, as OpenAI allows."""
        text = self.decode([token_id])
        parts = None if _HALF in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": parts}


def _likeliest_last(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Of ids with the same text the likeliest stays; the emitted token is always there."""
    return [(entry.token_id, entry.logprob), *reversed(entry.top)]


class Chunks:
    """The chunks of one choice of a stream.

    Args:
        answer: the frame.
        index: which choice.
    """

    def __init__(self, answer: Answer, index: int):
        self._answer, self._offset, self._is_first = answer, 0, True
        frame = json.dumps(answer._head(True))[:-1]
        said = '"delta":{"content":' if answer.is_chat else '"text":'
        self._before = f'data: {frame}, "choices":[{{"index":{index},{said}'
        self._between = "}" if answer.is_chat else ""
        self._after = ',"usage":null}\n\n' if answer.wants_usage else "}\n\n"
        self._role = f'data: {frame}, "choices":[{{"index":{index},"delta":' + (
            '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' + self._after
        )

    def encode(self, piece: Piece) -> bytes:
        """A piece as an event; a chat's first one is preceded by one that says who speaks."""
        logprobs = "null"
        if self._answer.wants_logprobs and piece.logprobs:
            shape, self._offset = self._answer.logprobs(piece.logprobs, self._offset)
            logprobs = json.dumps(shape)
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        role = self._role if self._is_first and self._answer.is_chat else ""
        self._is_first = False
        return (
            f"{role}{self._before}{json.dumps(piece.text)}{self._between}"
            f',"logprobs":{logprobs},"finish_reason":{reason}}}]{self._after}'
        ).encode()


def usage_chunk(answer: Answer, usage: Usage) -> bytes:
    """The event with the usage of a whole stream."""
    body = {**answer._head(True), "choices": [], "usage": usage.json()}
    return f"data: {json.dumps(body)}\n\n".encode()


def error_event(body: bytes) -> bytes:
    """An error after the stream has begun: clients read it where a chunk would be."""
    return b"data: " + body + b"\n\n"
