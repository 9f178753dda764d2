"""A target's checkpoint together with a drafter's, read as one.

The drafter's tensors have their own names behind `DRAFT`. So headers, recipes, the graph cache's
key and the binding of weights see one checkpoint, whichever directory holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.checkpoint import DRAFT, Checkpoint, open_checkpoint
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES
from mtpc.weights.hub import Needs, find_directory
from mtpc.weights.tensor_file import TensorFile

if TYPE_CHECKING:
    from mtpc.weights.grouped_recipes import GroupSpec

Method = TypeVar("Method", bound=Callable[..., Any])
TOKEN_MAP, INVERSE_MAP = "d2t", "t2d"
"""Names of an EAGLE-3 head's map: what to add to a row of its head for the token id, int [V_d]; and
which tokens have a row, bool [V], which says no more and is not read."""
DRAFT_VOCAB = "draft_vocab.txt"
"""Beside MTP layers: the ids of the tokens that they were trained for, a line each."""
TOKEN_ORDER = "masked_embedding.token_ordering"
"""Name of the tokens by cluster that an assistant of Gemma 4 may have, int [V]."""


def _of_either(method: Method) -> Method:
    """A method of `Checkpoint` with a tensor's name: asked of the target, or of the drafter."""

    def ask(pair: PairedCheckpoint, name: str) -> Any:
        if name in pair.target_tensors or not name.startswith(DRAFT):
            return method(pair, name)
        return method(pair.draft, name.removeprefix(DRAFT))

    return cast(Method, ask)


class PairedCheckpoint(Checkpoint):
    """The weights of a target and of its drafter; all else is the target's.

    Args:
        directory: the target's path, or its id on the Hugging Face hub.
        draft: the drafter's.

    Attributes, in addition to those of `Checkpoint`:
        draft: the drafter's checkpoint, under the names that it has.

    Raises:
        CheckpointError: as `Checkpoint`, of either; or the map of the drafter's vocabulary names
            tokens that the target lacks, or a token twice; or its clusters do not name all once.
    """

    draft: Checkpoint

    def __init__(self, directory: Path, draft: Path):
        super().__init__(directory)
        self.draft = Checkpoint(draft)
        names = [name for name in self.draft.tensors if name != INVERSE_MAP]
        theirs = {DRAFT + name: self.draft.tensors[name] for name in names}
        self.tensors = {**self.target_tensors, **theirs}
        size = self.text_config.get("vocab_size")
        if type(size) is not int or size < 1:  # Reading the target's config refuses it.
            return
        if TOKEN_MAP in self.draft.tensors:
            # Before any step reads it.
            offsets = self.draft.tensor(TOKEN_MAP)
            is_row = offsets.dim() == 1 and not offsets.is_floating_point()
            ids = offsets.long() + torch.arange(len(offsets)) if is_row else offsets
            if (
                not is_row
                or len(ids.unique()) < len(ids)
                or not bool(((ids >= 0) & (ids < size)).all())
            ):
                raise CheckpointError(
                    f"{self.draft.directory}: {TOKEN_MAP} must name {len(offsets)} different "
                    f"tokens of the target's {size}; it has {offsets.dtype} "
                    f"{tuple(offsets.shape)}, and its ids are {_span(ids)}; use the drafter that "
                    "was trained for this target"
                )
        if TOKEN_ORDER in self.draft.tensors:
            self._check_token_order(self.draft.tensor(TOKEN_ORDER), size)

    @property
    def draft_vocab(self) -> tuple[int, ...]:
        """The tokens that the drafter was trained for, ascending; () if its files name none."""
        path = self.draft.directory / DRAFT_VOCAB
        if not path.is_file():
            return ()
        size = self.text_config.get("vocab_size") or 0
        try:
            ids = {int(line) for line in path.read_text(encoding="utf-8").split()}
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot read {path}: {error}; expected a token id a line"
            ) from None
        if not all(0 <= token < size for token in ids):
            raise CheckpointError(
                f"{path} names token {next(t for t in ids if not 0 <= t < size)}; the target has "
                f"{size}: use the drafter that was trained for this target"
            )
        return tuple(sorted(ids))

    def _check_token_order(self, ids: Tensor, size: int) -> None:
        """Refuse clusters that would name wrong tokens, before any step reads them."""
        if ids.is_floating_point() or not torch.equal(ids.long().sort().values, torch.arange(size)):
            raise CheckpointError(
                f"{self.draft.directory}: {TOKEN_ORDER} must name each of the target's {size} "
                f"tokens once; it has {ids.dtype} {tuple(ids.shape)}, and its ids are {_span(ids)};"
                " use the assistant that was made for this target"
            )

    @property
    def replaces_mtp(self) -> bool:
        """Whether the target's config announces MTP layers, which are not used."""
        return any(self.text_config.get(name) for name in MTP_COUNT_NAMES)

    @property
    def mtp_directory(self) -> Path:
        return self.draft.directory

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold tensors of either."""
        return (*super().paths, *self.draft.paths)

    @cached_property
    def specs(self) -> dict[str, GroupSpec]:
        theirs = {DRAFT + name: spec for name, spec in self.draft.specs.items()}
        return {**super().specs, **theirs}

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *(f"draft: {note}" for note in self.draft.notes))

    @property
    def files(self) -> Iterable[TensorFile]:
        return (*super().files, *self.draft.files)

    def parts_of(self, name: str) -> tuple[str, ...]:
        own = _of_either(Checkpoint.parts_of)(self, name)
        return own if name in self.target_tensors else tuple(DRAFT + part for part in own)

    tensor, meta_tensor = _of_either(Checkpoint.tensor), _of_either(Checkpoint.meta_tensor)
    grouped = _of_either(Checkpoint.grouped)
    read, pieces = _of_either(Checkpoint.read), _of_either(Checkpoint.pieces)
    spans, piece_spans = _of_either(Checkpoint.spans), _of_either(Checkpoint.piece_spans)
    is_plain, release = _of_either(Checkpoint.is_plain), _of_either(Checkpoint.release)


def _span(ids: Tensor) -> str:
    return f"{int(ids.min())}..{int(ids.max())}" if ids.numel() else "none"


def checkpoint_of(
    model: Any, is_needed: bool, draft: Path | str | None = None
) -> Checkpoint | None:
    """The checkpoint that a model object was loaded from: a directory, or a hub id in the cache;
    None if there is no such checkpoint, and none is needed. A drafter's `draft` has the place of
    its MTP tensors.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, and it is needed.
    """
    name = model.name_or_path
    if draft:
        Checkpoint(Path(draft))  # Its errors are its own.
    try:
        if not name:
            raise CheckpointError("a model that is made from a config has none")
        revision = getattr(model.config, "_commit_hash", None)
        needs: Needs = "all" if is_needed else "cached"
        return open_checkpoint(find_directory(name, revision, needs), draft)
    except CheckpointError as error:
        if not is_needed:
            return None
        raise CheckpointError(
            f"the model's name_or_path is {name!r}; expected a local directory or a hub id to "
            f"read the MTP tensors from, because transformers drops them: {error}; load the model "
            "from its checkpoint, or use spec_tokens=0"
        ) from None
