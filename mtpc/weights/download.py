"""Downloads from the Hugging Face hub to its local cache, by huggingface_hub.

A checkpoint is config.json, what describes its tokenizer, and weights in safetensors files; or one
model in GGUF. Nothing else is downloaded. config.json comes last, so a snapshot that has it is
whole, wherever an earlier download ended. huggingface_hub shows the progress. A file is there when
all of it is; one of several processes downloads it, and the others wait.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mtpc.errors import CheckpointError
from mtpc.weights.gguf import SUFFIX, models_of, part_names
from mtpc.weights.json_file import CONFIG, INDEX, read_json, shard_names

_WEIGHTS = ".safetensors"
_DESCRIBING = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""How names of files end that describe a model, its tokenizer and its chat template."""
_TWICE = "consolidated"
"""Names of weights that Mistral stores a second time, under names of its own, begin so."""
_FIRST = 8
"""A message lists this many GGUF models; then it says how many more there are."""


def download(name: str, revision: str | None, weights: bool) -> Path:
    """Download a model in safetensors files, or the files alone that describe it, by its id and a
    branch, tag or commit (None is "main"). Returns its snapshot in the hub cache.

    Raises:
        CheckpointError: there is no network, no such model, or none in such files.
    """
    with _explained(name, revision):
        files = _list_files(name, revision)
        plain = [f for f in files if f.endswith(_WEIGHTS) and not f.startswith(_TWICE)]
        if CONFIG not in files or (weights and not plain and INDEX not in files):
            raise _unreadable(name, files)
        apart = (CONFIG,) if weights else (CONFIG, INDEX)  # An index would announce weights.
        others = [f for f in files if f.endswith(_DESCRIBING) and f not in apart]
        snapshot = _fetch(name, revision, others)
        if weights:
            index = snapshot / INDEX
            shards = shard_names(read_json(index), index) if INDEX in files else plain
            _fetch(name, snapshot.name, shards)
        return _fetch(name, snapshot.name, [CONFIG])


def find_gguf_model(name: str, end: str, revision: str | None) -> Path:
    """The first file of a GGUF model of a repository: in the hub cache, else downloaded. The
    model's file name ends with `end`, in any case and with or without ".gguf": "Q4_K_M". For
    `revision` see `download`.

    Raises:
        CheckpointError: there is no network, no such repository, or no one such model there.
    """
    with _explained(name, revision, end):
        snapshot = _cached(name, revision)
        if snapshot is not None:
            here = snapshot.rglob(f"*{SUFFIX}")
            parts = _ending(name, (path.relative_to(snapshot).as_posix() for path in here), end)
            if parts and all((snapshot / part).is_file() for part in parts):
                return snapshot / parts[0]
        files = _list_files(name, revision)
        parts = _ending(name, files, end)
        if not parts:
            raise CheckpointError(
                f"no GGUF model of {name} has a name that ends in {end!r}; "
                f"{_choice(name, models_of(files))}"
            )
        return _fetch(name, revision, parts) / parts[0]


def _ending(name: str, files: Iterable[str], end: str) -> list[str]:
    """All files of the one model whose name ends so; [] if there is none."""
    stem = re.escape(end.lower().removesuffix(SUFFIX))
    pattern = re.compile(rf"(.*[-._/])?{stem}", re.IGNORECASE)
    found = {model: file for model, file in models_of(files).items() if pattern.fullmatch(model)}
    if len(found) > 1:
        raise CheckpointError(
            f"{len(found)} GGUF models of {name} have names that end in {end!r}: "
            f"{', '.join(found)}; expected one: give more of its name"
        )
    return [part for file in found.values() for part in part_names(file)]


def _choice(name: str, models: Iterable[str]) -> str:
    """What to do about a repository with these GGUF models."""
    stems = [model.rpartition("/")[2] for model in models]
    if not stems:
        return "it has no GGUF models at all: correct the id"
    more = f" and {len(stems) - _FIRST} more" if len(stems) > _FIRST else ""
    end = re.split(r"[-.]", stems[0])[-1]
    return (
        f"it has the GGUF models {', '.join(stems[:_FIRST])}{more}: give the end of one's name, as "
        f"{name}:{end}"
    )


def _unreadable(name: str, files: Sequence[str]) -> CheckpointError:
    """The error for a repository that has no config.json, or no weights in safetensors files."""
    lacks = CONFIG if CONFIG not in files else f"*{_WEIGHTS} file"
    wanted = f"{name} on the hub has no {lacks}; expected {CONFIG} with *{_WEIGHTS} files"
    models = models_of(files)
    if models:
        return CheckpointError(f"{wanted}, or a choice: {_choice(name, models)}")
    if CONFIG in files:
        return CheckpointError(
            f"{wanted} (pickled weights are not downloaded): run: hf download {name}, and give the "
            "directory that it prints; its error has the command that converts them"
        )
    return CheckpointError(f"{wanted}, or GGUF files; found {', '.join(files[:_FIRST]) or 'none'}")


def _list_files(name: str, revision: str | None) -> list[str]:
    """Names of the files in a repository's root, and of its GGUF files."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(name, revision=revision).siblings or []
    names = [file.rfilename for file in found]
    return [f for f in names if "/" not in f or f.endswith(SUFFIX)]


def _fetch(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download files that the hub cache lacks; returns the snapshot."""
    from huggingface_hub import snapshot_download

    patterns = [glob.escape(file) for file in files]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _cached(name: str, revision: str | None) -> Path | None:
    """The snapshot in the hub cache, with whatever files it has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=[], local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(found)


@contextmanager
def _explained(name: str, revision: str | None, end: str = "") -> Iterator[None]:
    """Within the block, what stops a download is raised as one CheckpointError. `end` is that of
    the name of the GGUF file that is wanted, if one is. Raises HFValidationError: the name is no
    id."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (CheckpointError, HFValidationError):
        raise
    except Exception as error:  # Its own, the HTTP client's and the system's have no common class.
        at = f" at revision {revision}" if revision else ""
        given, only = (f"{name}:{end}", f" --include '*{end}*'") if end else (name, "")
        raise CheckpointError(
            f"{given!r} is not a directory, the hub cache "
            f"{constants.HF_HUB_CACHE} has no whole model of that id{at}, and "
            f"{_why(error, f'{constants.ENDPOINT}/{name}')}; expected a local checkpoint, or an id "
            f"of the hub: correct it, or, where there is a network, run: hf download {name}{only}"
        ) from error


def _why(error: Exception, page: str) -> str:
    """What stopped a download, and what would help."""
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to download it"
    if isinstance(error, GatedRepoError):
        return f"its authors ask for consent first: give it on {page}, then run: hf auth login"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is none at {page}; if it is private, run: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no such revision"
    said = next(iter(str(error).splitlines()), "")
    return (
        f"its download failed ({type(error).__name__}: {said}); files that are whole are kept for "
        "the next start"
    )
