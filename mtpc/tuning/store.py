"""What the target says of the texts of a run, in files: each is whole or absent.

A run reads its target once. What the drafter is fed and the target's most probable tokens lie in
chunks of rows, which are mapped into memory and not held there. A killed run makes the chunks that
are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from mtpc.tuning.chain import Teacher
from mtpc.tuning.files import replacing, unreadable
from mtpc.weights.tensor_file import save_tensors

CHUNK_ROWS = 16
"""Texts in a chunk."""
MOST_PROBABLE = 64
"""Tokens of the target's distribution that are kept for a position."""


class Rows(NamedTuple):
    """What is kept of some texts.

    Attributes:
        ids: the texts, int64 [B, L].
        fed: what the drafter is fed, [B, L, F].
        tokens: the most probable next tokens, the first one first, int32 [B, L, N].
        logprobs: their log-probabilities, float32 [B, L, N].
    """

    ids: Tensor
    fed: Tensor
    tokens: Tensor
    logprobs: Tensor


class Chunks:
    """Tensors by rows, in one file for every `CHUNK_ROWS` rows, whose names begin with `name`. One
    of them is `ids`, whose rows begin with `given` [N, L_0]. A chunk of other rows is missing: when
    a run is resumed with more texts, what was made of fewer is kept where it is the same."""

    def __init__(self, directory: Path, name: str, given: Tensor):
        self._directory, self._name, self._given = directory, name, given
        self._open: dict[int, Any] = {}

    @property
    def is_whole(self) -> bool:
        return all(map(self._is_made, range(-(-len(self._given) // CHUNK_ROWS))))

    def _is_made(self, chunk: int) -> bool:
        given = self._given[chunk * CHUNK_ROWS :][:CHUNK_ROWS]
        path = self._path(chunk)
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                return torch.equal(file.get_slice("ids")[:, : given.shape[1]], given)
        except Exception as error:  # A file of another kind lacks anything.
            raise unreadable(path, error) from error

    def fill(
        self,
        make: Callable[[slice], Mapping[str, Tensor]],
        tell: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Make the chunks that are missing: of the rows of each, tensors [rows, ...]. `tell` gets
        the share that is done.

        Raises:
            CheckpointError: a chunk cannot be written.
        """
        count = len(self._given)
        for chunk, start in enumerate(range(0, count, CHUNK_ROWS)):
            if not self._is_made(chunk):
                tell(start / count)
                tensors = make(slice(start, min(start + CHUNK_ROWS, count)))
                with replacing(self._path(chunk)) as scratch:
                    save_tensors({n: t.contiguous() for n, t in tensors.items()}, scratch)

    def get(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a tensor, by their numbers [B]: [B, ...].

        Raises:
            CheckpointError: a chunk is damaged.
        """
        found = [self._file(row // CHUNK_ROWS, name, row % CHUNK_ROWS) for row in rows.tolist()]
        return torch.stack(found)

    def _file(self, chunk: int, name: str, row: int) -> Tensor:
        try:
            if chunk not in self._open:
                self._open[chunk] = safe_open(self._path(chunk), framework="pt")
            found: Tensor = self._open[chunk].get_slice(name)[row]
            return found
        except Exception as error:  # A file of another kind lacks anything.
            raise unreadable(self._path(chunk), error) from error

    def _path(self, chunk: int) -> Path:
        return self._directory / f"{self._name}-{chunk:05}.safetensors"


class TargetRows:
    """What the target says of all texts of a run, int64 [N, L]."""

    def __init__(self, directory: Path, ids: Tensor):
        self.ids, self._chunks = ids, Chunks(directory, "target", ids)

    def fill(self, teacher: Teacher, tell: Callable[[float], None]) -> None:
        """Let the target read the texts that it has not read."""

        def make(rows: slice) -> dict[str, Tensor]:
            ids = self.ids[rows]
            fed, features = teacher.read(ids)
            count = min(MOST_PROBABLE, teacher.model.get_input_embeddings().weight.shape[0])
            found = teacher.most_probable(features.flatten(0, 1), count)
            tokens, logprobs = (each.unflatten(0, ids.shape).cpu() for each in found)
            return {"ids": ids, "fed": fed.cpu(), "tokens": tokens, "logprobs": logprobs}

        self._chunks.fill(make, tell)

    def get(self, places: Tensor) -> Rows:
        """What is kept of the texts at `places` [B]."""
        found = (self._chunks.get(name, places) for name in Rows._fields[1:])
        return Rows(self.ids[places], *found)

    def frequent(self, count: int, first: int, size: int) -> Tensor:
        """The target's most frequent choices in the texts from `first` on, ascending: [<= count].

        They are of a vocabulary of `size`. Of equally frequent tokens those with lower ids come
        first.
        """
        parts = torch.arange(first, len(self.ids)).split(CHUNK_ROWS)
        chosen = [self._chunks.get("tokens", part)[..., 0].flatten() for part in parts]
        counts = torch.bincount(torch.cat(chosen).long(), minlength=size)
        return counts.argsort(descending=True, stable=True)[:count].sort().values


def row_bytes(length: int, width: int, itemsize: int) -> int:
    """Bytes on disk of one text of `length` tokens, with rows of `width` fed to the drafter."""
    return length * (width * itemsize + MOST_PROBABLE * (4 + 4) + 8)
