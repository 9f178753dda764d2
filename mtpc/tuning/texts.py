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
from mtpc.weights.served_model import ServedModel

if TYPE_CHECKING:
    from mtpc import SpecModel

HELD_OUT = 10
"""If no held-out text is given, the last 1/HELD_OUT of each text is held out."""
PROMPT_TOKENS = 64
"""Tokens of a held-out prompt."""
KNOWN_SHARE = 4
"""If the target continues a text, it keeps the first 1/KNOWN_SHARE of it."""


@dataclass(frozen=True)
class Texts:
    """Token ids of a run.

    Attributes:
        rows: int64 [N, L], training texts.
        prompts: int64 [M, P], beginnings of held-out text.
    """

    rows: Tensor
    prompts: Tensor


def read_texts(
    paths: Sequence[Path],
    held_out: Sequence[Path],
    served: ServedModel,
    length: int,
    prompts: int,
) -> Texts:
    """Read texts and cut them into rows.

    Args:
        paths: UTF-8 files to train on.
        held_out: files of held-out text; () holds out the end of each of `paths`.
        served: has the tokenizer.
        length: L.
        prompts: the largest M. The prompts are spread evenly over the held-out text.

    Raises:
        RequestError: a file cannot be read, is empty, or there is less text than a row or a prompt.
    """
    known = [_encode(path, served) for path in paths]
    if held_out:
        unseen = [_encode(path, served) for path in held_out]
    else:
        cuts = [len(ids) - len(ids) // HELD_OUT for ids in known]
        unseen = [ids[cut:] for ids, cut in zip(known, cuts, strict=True)]
        known = [ids[:cut] for ids, cut in zip(known, cuts, strict=True)]
    rows = _cut(known, length, "to learn from")
    pieces = _cut(unseen, PROMPT_TOKENS, "held out")
    chosen = torch.linspace(0, len(pieces) - 1, min(prompts, len(pieces))).long()
    return Texts(rows, pieces[chosen])


def _encode(path: Path, served: ServedModel) -> list[int]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}; expected a text in UTF-8") from None
    if not text.strip():
        raise RequestError(f"{path} is empty; expected text that suits the model")
    return served.encode(text)


def _cut(texts: Sequence[list[int]], length: int, what: str) -> Tensor:
    """The concatenated texts as rows [N, length]; a rest at the end is dropped."""
    ids = [token for text in texts for token in text]
    count = len(ids) // length
    if count == 0:
        raise RequestError(
            f"the text {what} has {len(ids)} tokens; expected {length} at least: give more text"
        )
    return torch.tensor(ids[: count * length]).view(count, length)


def continue_rows(model: SpecModel, rows: Tensor, count: int) -> Tensor:
    """Let the target write the rest of some rows, greedily, after the beginning of each.

    In decoding, drafts follow text that the target has written, which may differ from the user's.

    Args:
        model: decodes with the target.
        rows: [N, L].
        count: number of rows to change, spread evenly; at most N.

    Returns:
        int64 [N, L].
    """
    length = rows.shape[1]
    known = max(1, length // KNOWN_SHARE)
    places = torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()
    if len(places) == 0:
        return rows
    new = model.generate(rows[places, :known].tolist(), length - known, ignore_eos=True)
    changed = rows.clone()
    changed[places, known:] = torch.tensor(new)
    return changed


def measure_drafts(model: SpecModel, prompts: Tensor, new_tokens: int) -> DraftCounts:
    """Decode greedily after prompts [M, P], and count the engine's drafts."""
    before = model.stats.drafts
    model.generate(prompts.tolist(), new_tokens, ignore_eos=True)
    return model.stats.drafts - before
