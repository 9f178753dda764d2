"""The texts that MTP layers are trained on, and the held-out prompts that measure acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpc.engine.stats import DraftCounts
from mtpc.errors import RequestError
from mtpc.weights.plain_file import read_text
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc import SpecModel

HELD_OUT = 10
"""If no held-out text is given, the last 1/HELD_OUT of each text is held out."""
PROMPT_TOKENS = 64
"""Tokens of a held-out prompt."""
_CHARACTERS = 16
"""Characters of a token, at most on average: a file is read no further than its rows need."""
KNOWN_SHARE = 4
"""The target is given the first 1/KNOWN_SHARE of a text, and writes the rest."""


@dataclass(frozen=True)
class Texts:
    """Token ids of a run.

    Attributes:
        rows: int64 [M + N, C], beginnings of held-out texts and then of training ones, in no order:
            the first of them stand for all.
        held_out: M.
        prompts: int64 [M', P], beginnings of held-out text.
    """

    rows: Tensor
    held_out: int
    prompts: Tensor

    @property
    def trained(self) -> int:
        return len(self.rows) - self.held_out


@dataclass(frozen=True)
class Limits:
    """How much text a run takes: rows of `known` tokens, spread evenly over the texts, held-out
    ones among them; and prompts, spread evenly over the held-out text."""

    known: int
    rows: int
    held_out: int
    prompts: int


def read_texts(
    paths: Sequence[Path], held_out: Sequence[Path], served: ServedModel, limits: Limits
) -> Texts:
    """Read UTF-8 texts and cut them into rows. Without files of held-out text, the end of each text
    is held out.

    Raises:
        RequestError: a file cannot be read, is empty, or there is less text than a row or a prompt.
    """
    tokens = limits.rows * limits.known + HELD_OUT * limits.prompts * PROMPT_TOKENS
    most = tokens * _CHARACTERS
    known = [_encode(path, served, most) for path in paths]
    if held_out:
        unseen = [_encode(path, served, most) for path in held_out]
    else:
        cuts = [len(ids) - len(ids) // HELD_OUT for ids in known]
        unseen = [ids[cut:] for ids, cut in zip(known, cuts, strict=True)]
        known = [ids[:cut] for ids, cut in zip(known, cuts, strict=True)]
    rows = _cut(known, limits.known, "to learn from")
    pieces = _cut(unseen, PROMPT_TOKENS, "held out")
    ids = pieces.flatten()
    ids = ids.repeat(-(-limits.known // len(ids)))  # A short text is told again.
    tests = ids[: len(ids) // limits.known * limits.known].view(-1, limits.known)
    tests = _spread(tests, max(1, min(limits.held_out, limits.rows // 2)))
    rows = _spread(rows, limits.rows - len(tests))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return Texts(torch.cat([tests, rows]), len(tests), _spread(pieces, limits.prompts))


def _spread(rows: Tensor, most: int) -> Tensor:
    """At most so many of some rows, evenly."""
    return rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()]


def _encode(path: Path, served: ServedModel, most: int) -> list[int]:
    """The tokens of a file's first `most` characters."""
    text = read_text(path, most)
    if not text.strip():
        raise RequestError(f"{path} is empty; expected text that suits the model")
    return served.encode(text)


def known_tokens(length: int) -> int:
    """Tokens of a text of `length` that the target is given."""
    return max(1, length // KNOWN_SHARE)


def _cut(texts: Sequence[list[int]], length: int, what: str) -> Tensor:
    """The concatenated texts as rows [N, length]; a rest at the end is dropped."""
    ids = [token for text in texts for token in text]
    count = len(ids) // length
    if count == 0:
        raise RequestError(
            f"the text {what} has {len(ids)} tokens; expected {length} at least: give more text"
        )
    return torch.tensor(ids[: count * length]).view(count, length)


def measure_drafts(model: SpecModel, prompts: Tensor, new_tokens: int) -> DraftCounts:
    """Decode greedily after prompts [M, P], and count the engine's drafts."""
    before = model.stats.drafts
    model.generate(prompts.tolist(), new_tokens, ignore_eos=True)
    return model.stats.drafts - before
