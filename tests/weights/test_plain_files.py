"""Checkpoints in which a file's name belongs to a pipe, a device, a directory or a broken link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.bounded import bounded
from helpers.places import TESTS
from helpers.store_writer import DIGEST
from helpers.word_model import word_checkpoint

from mtpc.errors import CacheError, CheckpointError
from mtpc.models.load import load
from mtpc.store.entries import EntryStore
from mtpc.weights.served_model import ServedModel

KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": lambda path: path.mkdir(),
    "broken link": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "a.gguf"]
)
def test_a_checkpoint_of_other_things(
    name: str, kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One error, and no wait; an index that is no file is as none, because weights are there."""
    directory = tmp_path / "model"
    if name == "a.gguf":
        directory.mkdir()
    else:
        shutil.copytree(checkpoint("mimo"), directory)
        (directory / name).unlink(missing_ok=True)
    KINDS[kind](directory / name)
    with bounded(10):
        if name.endswith("index.json"):
            load(directory, None, needs_mtp=False, headers_only=True)
            return
        with pytest.raises(CheckpointError, match=str(directory)):
            load(directory, None, needs_mtp=False, headers_only=True)


def test_a_gguf_file_by_its_path(tmp_path: Path) -> None:
    for kind, make in KINDS.items():
        make(tmp_path / f"{kind}.gguf")
        with bounded(10), pytest.raises(CheckpointError, match=str(tmp_path)):
            load(tmp_path / f"{kind}.gguf", None, needs_mtp=False)
    for kind, make in KINDS.items():
        shutil.copy(TESTS / "weights/gguf/glm4_moe.gguf", tmp_path / "a-00001-of-00002.gguf")
        part = tmp_path / "a-00002-of-00002.gguf"
        make(part)
        with bounded(10), pytest.raises(CheckpointError, match="is missing, a part of"):
            load(tmp_path / "a-00001-of-00002.gguf", None, needs_mtp=False)
        part.rmdir() if kind == "directory" else part.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"],
)
def test_a_tokenizer_of_other_things(
    name: str, kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Either it is as if the file were missing, or one error."""
    directory = word_checkpoint(checkpoint("mimo"), tmp_path / "model")
    (directory / name).unlink(missing_ok=True)
    KINDS[kind](directory / name)
    with bounded(10), suppress(CheckpointError):
        found = ServedModel("a model", 96, (), directory).has_tokenizer
        assert found == (name != "tokenizer.json")


@pytest.mark.parametrize("target", ["secret", "nothing"])
def test_a_lock_of_the_cache_that_is_a_link(target: str, tmp_path: Path) -> None:
    """It made the file to which it leads."""
    store = EntryStore(tmp_path / "store")
    store.prepare()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "store/locks" / DIGEST).symlink_to(tmp_path / target)
    with pytest.raises(CacheError, match="cannot write the graph cache"), store.lock(DIGEST, print):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "store"]
