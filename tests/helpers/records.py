"""A grammar of records, and plain decoding under it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import mtpc
from helpers.sampling_oracle import SamplingOracle
from helpers.schedules import PRESSED
from mtpc import SamplingParams
from mtpc.engine.sampling_rows import pack_bits

V, NEW, STOP = 96, 22, 1
DIGITS = range(20, 60)
STATES: dict[str, dict[int, str]] = {
    "open": {2: "key"},
    "key": dict.fromkeys((10, 11, 12), "colon"),
    "colon": {3: "first"},
    "first": dict.fromkeys(DIGITS, "more"),
    "more": {**dict.fromkeys(DIGITS, "last"), 4: "key", 5: "done"},
    "last": {4: "key", 5: "done"},
    "done": {STOP: "over"},
}
"""Records { key : digits , key : digits }: some states allow one token, some few, some many."""
MASKED = {**PRESSED, "num_pages": 14, "batch_buckets": (3,), "sampling": True, "token_mask": True}


class Records:
    """The grammar of the table above: `mtpc.Grammar`, and methods for the oracle."""

    def __init__(self) -> None:
        self.states = ["open"]

    @property
    def allowed(self) -> dict[int, str]:
        return STATES[self.states[-1]]

    def fill_mask(self, words: torch.Tensor) -> None:
        assert words.is_contiguous()
        assert (words == -1).all()
        words.copy_(pack_bits(self.allowed, V))

    def advance(self, token_id: int) -> bool:
        assert token_id != STOP, "tokens that end the request are the engine's"
        if token_id in self.allowed:
            self.states.append(self.allowed[token_id])
            return True
        return False

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self.states)
        del self.states[-count:]


def wanted(plain: SamplingOracle, prompt: list[int], params: SamplingParams) -> list[int]:
    """Plain constrained decoding: one token after the other, each under its mask."""
    grammar, out = Records(), list[int]()
    while len(out) < NEW:
        only = dataclasses.replace(params, allowed_ids=tuple(grammar.allowed))
        out.append(plain.choose(prompt, out, only))
        if out[-1] == STOP:
            break
        assert grammar.advance(out[-1])
    return out


def run(spec: mtpc.SpecModel) -> dict[int, Any]:
    """Run to the end; returns tokens, finish reasons and errors."""
    found: dict[int, Any] = {}
    while spec.engine.has_work:
        for output in spec.engine.step():
            text, *_ = found.setdefault(output.request_id, ([], None, None))
            end = (output.finish_reason, output.error)
            found[output.request_id] = (text + output.token_ids, *end)
    return found
