"""What the target writes and says of it, in files: each is whole or absent.

The target writes its texts once, and nobody reads them again: while the engine decodes, it keeps
what a drafter is fed, and reports the most probable tokens. Both lie in chunks of texts, which are
mapped into memory and not held there. A killed run makes the chunks that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from mtpc.tuning.files import replacing, unreadable
from mtpc.weights.tensor_file import save_tensors

if TYPE_CHECKING:
    from mtpc import SpecModel

CHUNK_ROWS = 32
"""Texts in a chunk, which the target writes together."""
MOST_PROBABLE = 64
"""Tokens of the target's distribution that are kept for a position."""


class Rows(NamedTuple):
    """What is kept of some texts.

    Attributes:
        ids: the texts, int64 [B, L].
        fed: what the drafter is fed, [B, L, F].
        tokens: the most probable tokens after each of the last W positions, the first one first,
            int32 [B, W, N].
        logprobs: their log-probabilities, float32 [B, W, N].
    """

    ids: Tensor
    fed: Tensor
    tokens: Tensor
    logprobs: Tensor


def write_rows(model: SpecModel, known: Tensor, length: int) -> Rows:
    """Let the target write texts of `length` tokens, greedily, after beginnings [B, C].

    W is length - C + 1. The model was compiled with `hidden_state_layers`.
    """
    count = min(MOST_PROBABLE, model.served.vocab_size)
    new = length - known.shape[1] + 1  # What follows the last token is said, and not kept.
    done = model.generate(known.tolist(), new, ignore_eos=True, logprobs=count)
    ids = torch.cat([known, torch.tensor(done)], 1)[:, :length]
    fed = [text.hidden_states for text in done if text.hidden_states is not None]
    top = [[entry.top for entry in text.logprobs or ()] for text in done]
    tokens, logprobs = torch.tensor(top, dtype=torch.float64).unbind(-1)
    return Rows(ids, torch.stack(fed), tokens.int(), logprobs.float())


class TargetRows:
    """The texts of a run, which begin with `known` [N, C], in files of `CHUNK_ROWS` texts.

    A chunk of other texts is missing: when a run is resumed with more texts, what was made of fewer
    is kept where it is the same.
    """

    def __init__(self, directory: Path, known: Tensor):
        self._directory, self._known = directory, known
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._known)

    def fill(self, write: Callable[[Tensor], Rows], tell: Callable[[float], None]) -> None:
        """Make the chunks that are missing, of beginnings [B, C]. `tell` gets the share that is
        done.

        Raises:
            CheckpointError: a chunk is damaged, or cannot be written.
        """
        for chunk, known in enumerate(self._known.split(CHUNK_ROWS)):
            if not self._is_made(chunk, known):
                tell(chunk * CHUNK_ROWS / len(self))
                rows = zip(Rows._fields, write(known), strict=True)
                with replacing(self._path(chunk)) as scratch:
                    save_tensors({name: tensor.contiguous() for name, tensor in rows}, scratch)

    @property
    def is_whole(self) -> bool:
        return all(self._is_made(*part) for part in enumerate(self._known.split(CHUNK_ROWS)))

    def _is_made(self, chunk: int, known: Tensor) -> bool:
        path = self._path(chunk)
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                return torch.equal(file.get_slice("ids")[:, : known.shape[1]], known)
        except Exception as error:  # A file of another kind lacks anything.
            raise unreadable(path, error) from error

    def get(self, places: Tensor) -> Rows:
        """What is kept of the texts at `places` [B].

        Raises:
            CheckpointError: a chunk is damaged.
        """
        return Rows(*(self._rows(name, places) for name in Rows._fields))

    def _rows(self, name: str, places: Tensor) -> Tensor:
        return torch.stack([self._row(name, *divmod(row, CHUNK_ROWS)) for row in places.tolist()])

    def _row(self, name: str, chunk: int, row: int) -> Tensor:
        try:
            if chunk not in self._open:
                self._open[chunk] = safe_open(self._path(chunk), framework="pt")
            found: Tensor = self._open[chunk].get_slice(name)[row]
            return found
        except Exception as error:  # A file of another kind lacks anything.
            raise unreadable(self._path(chunk), error) from error

    def _path(self, chunk: int) -> Path:
        return self._directory / f"target-{chunk:05}.safetensors"

    def frequent(self, count: int, first: int, size: int) -> Tensor:
        """The target's most frequent choices in the texts from `first` on, ascending: [<= count].

        They are of a vocabulary of `size`. Of equally frequent tokens those with lower ids come
        first.
        """
        parts = torch.arange(first, len(self)).split(CHUNK_ROWS)
        chosen = [self._rows("tokens", part)[..., 0].flatten() for part in parts]
        counts = torch.bincount(torch.cat(chosen).long(), minlength=size)
        return counts.argsort(descending=True, stable=True)[:count].sort().values


def row_bytes(length: int, width: int, itemsize: int) -> int:
    """At most so many bytes on disk of one text of `length` tokens, with rows of `width` fed to the
    drafter."""
    return length * (width * itemsize + MOST_PROBABLE * (4 + 4) + 8)
