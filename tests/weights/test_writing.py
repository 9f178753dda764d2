"""Commands that write: on a full disk, killed, over links, and to what is no file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.bounded import full_disk

from mtpc.cli.main import main
from mtpc.cli.plot import draw_plot
from mtpc.errors import CheckpointError, MtpcError
from mtpc.models.graft import graft
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.plain_file import write_output
from mtpc.weights.shards import copy_replacing, new_directory
from mtpc.weights.write_quantised import quantise_checkpoint


@pytest.fixture
def source(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of its own, with a tokenizer, in a directory with nothing else."""
    directory = tmp_path / "here/model"
    directory.mkdir(parents=True)
    for path in checkpoint("mimo").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer.json").write_text("{}")
    return directory


def quantised(source: Path, out: Path) -> None:
    quantise_checkpoint(source, out, "int4-g32")


def grafted(source: Path, out: Path) -> None:
    graft(source, source, out)


def tuned(source: Path, out: Path) -> None:
    files = Checkpoint(source)
    copy_replacing(files, {"model.norm.weight": files.read("model.norm.weight")}, out)


VERBS = (quantised, grafted, tuned)
"""What `mtpc quantize`, `mtpc graft` and `mtpc tune-head` write a checkpoint with."""


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk(verb: Callable[[Path, Path], None], source: Path) -> None:
    """One error of ours that names the directory; what is half-written is gone."""
    with full_disk(), pytest.raises(CheckpointError, match=r"cannot write .*out: .*File too large"):
        verb(source, source.parent / "out")
    assert [*source.parent.iterdir()] == [source]


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_without_space(verb: Callable[[Path, Path], None], source: Path) -> None:
    """As above, on a file system that is full."""
    small = source.parent.parent / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(small)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root, which may mount")
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*out: .*No space left on device"):
            verb(source, small / "out")
        assert [*small.iterdir()] == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_outputs_on_a_full_disk(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vocab --out`, `inspect --svg`, `bench --plot`, `eval --out`: all or nothing."""
    here = source.parent
    (here / "text").write_text("word " * 50)
    (here / "old").write_text("old")
    monkeypatch.setattr("mtpc.cli.inspect._build", lambda *_: (None, [], "", {}))
    monkeypatch.setattr("mtpc.cli.drawing.draw", lambda *_: "x" * 1000)
    monkeypatch.setattr("mtpc.cli.anatomy.position", lambda graph: "")
    monkeypatch.setattr(
        "mtpc.cli.vocab.Counter.most_common", lambda *_: [(i, 1) for i in range(99)]
    )
    row = {"tokens_per_s": 1.0, "tokens_per_step": 1.0, "acceptance_rate": None}
    with full_disk():
        for name in ("new", "old"):
            assert main(["vocab", str(here / "text"), "--out", str(here / name)]) == 2
            assert main(["inspect", "--svg", str(here / name)]) == 2
        with pytest.raises(MtpcError, match="cannot write"):
            draw_plot(["K"], [row], "title", here / "new.svg")
        with pytest.raises(OSError, match="File too large"):
            write_output(here / "new", bytes(1000))
    errors = capsys.readouterr().err.splitlines()
    assert (
        len([line for line in errors if line.startswith("error: [Errno 27] File too large")]) == 4
    )
    assert sorted(path.name for path in here.iterdir()) == ["model", "old", "text"]
    assert (here / "old").read_text() == "old"


def test_outputs_that_are_no_files(tmp_path: Path) -> None:
    """A pipe is written to, and a link followed; neither is replaced."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    handle = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", b"new")
    assert os.read(handle, 9) == b"new"
    os.close(handle)
    write_output(Path("/dev/null"), b"new")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


@pytest.mark.parametrize("name", ["tokenizer.json", "notes", "training_args.bin"])
@pytest.mark.parametrize("verb", VERBS)
def test_links_out_of_the_checkpoint(
    verb: Callable[[Path, Path], None], name: str, source: Path
) -> None:
    """A stranger's checkpoint does not get a copy of a user's file; weights are not copied."""
    (source.parent.parent / "secret").write_text("mine")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../../secret")
    out = source.parent / "out"
    if name == "training_args.bin" and verb != tuned:
        verb(source, out)
        assert not (out / name).exists()
        return
    with pytest.raises(CheckpointError, match=rf"{name} is a link out of the checkpoint, to .*/s"):
        verb(source, out)
    assert [*source.parent.iterdir()] == [source]


@pytest.mark.parametrize("verb", VERBS)
def test_links_that_are_copied(verb: Callable[[Path, Path], None], source: Path) -> None:
    """Within the checkpoint; of weights that are elsewhere; and all files of the hub's cache."""
    (source / "tokenizer.model").symlink_to("tokenizer.json")
    weights = (source / "model.safetensors").rename(source.parent.parent / "weights")
    (source / "model.safetensors").symlink_to(weights)
    verb(source, source.parent / "out")
    assert (source.parent / "out/tokenizer.model").read_text() == "{}"
    hub = source.parent / "hub/models--a--b"
    snapshot = hub / "snapshots/123"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for path in source.iterdir():
        (hub / "blobs" / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    verb(snapshot, source.parent / "again")
    assert (source.parent / "again/tokenizer.json").read_text() == "{}"
    for out in ("out", "again"):
        assert not any(path.is_symlink() for path in (source.parent / out).iterdir())


def writing(out: Path) -> tuple[int, Path]:
    """A process that is writing a directory, and where."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with new_directory(out) as scratch:
                (scratch / "part").write_text("x")
                os.write(told, str(scratch).encode())
                time.sleep(600)
        finally:
            os._exit(1)
    os.close(told)
    place = os.read(ready, 4096).decode()
    os.close(ready)
    return child, Path(place)


def killed(*children: int) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """By the next run for the same directory; what others write or own stays."""
    out = tmp_path / "out"
    (dead, left), (alive, other) = writing(out), writing(out)
    (third, of_another) = writing(tmp_path / "out2")
    killed(dead, third)
    mine = [tmp_path / name for name in (".out.abcdefgh", ".out.mtpc-mine", ".out.mtpc-link_xyz")]
    mine[0].mkdir()
    mine[1].mkdir()
    mine[2].symlink_to(mine[0])
    assert left.is_dir()
    assert of_another.is_dir()
    try:
        with new_directory(out):
            found = {*tmp_path.iterdir()}
        assert left not in found
        assert {other, of_another, *mine} <= found
        assert (other / "part").exists()
    finally:
        killed(alive)
    with new_directory(tmp_path / "out2"):
        pass
    assert {*tmp_path.iterdir()} == {out, tmp_path / "out2", other, *mine}


def test_a_directory_that_appears_meanwhile(source: Path) -> None:
    """It is not written into, and nothing is left."""
    out = source.parent / "out"

    def write() -> None:
        with new_directory(out) as scratch:
            (scratch / "part").write_text("x")
            out.mkdir()
            (out / "mine").write_text("x")

    with pytest.raises(CheckpointError, match="cannot write"):
        write()
    assert {*source.parent.iterdir()} == {source, out}
    assert [path.name for path in out.iterdir()] == ["mine"]
