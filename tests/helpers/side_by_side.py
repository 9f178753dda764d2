"""Compares transformers' own `generate` with mtpc's."""

from __future__ import annotations

from typing import Any

import tokenizers
import torch
import transformers
from transformers import generation

from helpers.theorem import PROMPTS

EOS = [17, 24, 46]
"""Ids that the trained models emit often, so that rows end at different steps."""


def batch(*prompts: list[int]) -> dict[str, torch.Tensor]:
    """A left-padded batch, as a tokenizer makes it."""
    length = max(map(len, prompts))
    pads = [length - len(prompt) for prompt in prompts]
    rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (length - pad) for pad in pads]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


RAGGED = batch(PROMPTS[5], PROMPTS[2], PROMPTS[8])


class Streamer(generation.BaseStreamer):
    """A streamer that records its calls."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def same(generator: Any, **arguments: Any) -> torch.Tensor:
    """Assert that output and stream of both loops are equal."""
    plain, ours = Streamer(), Streamer()
    wanted = generator.model.generate(**arguments, streamer=plain)
    found = generator.generate(**arguments, streamer=ours)
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype
    assert ours.got == plain.got
    assert ours.got[-1] == "end"
    return found


def letters() -> Any:
    """A tokenizer of one character a token."""
    alphabet = [chr(code) for code in range(33, 127)] + ["\u0100", "\u0101"]
    bpe = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
