"""Pages and snapshots in files: found again by a later process, and by nobody else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import offloads, tiny
from helpers.bounded import bounded, full_disk
from helpers.offloads import BIG, PAGE, TEXT, K, filled, loaded, offload_of, request, save_all
from helpers.plans import plan_of
from helpers.theorem import PROMPTS
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.cli.arguments import parse
from mtpc.engine.offload import Offload
from mtpc.engine.offload_files import OffloadDirectory
from mtpc.errors import OptionError
from mtpc.program.identity import MEMORY, page_identity
from mtpc.weights.checkpoint import open_checkpoint
from mtpc.weights.content import content_digest


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """By name and digest; each file is a safetensors file of this user's alone."""
    first = offload_of(tmp_path / "a" / "b", filled())
    save_all(first)
    again = offload_of(tmp_path / "a" / "b", torch.zeros(8, PAGE, 3))
    assert loaded(again) == list(range(6))
    assert (first.num_saved, again.num_loaded) == (6, 6)
    paths = sorted((tmp_path / "a" / "b").glob("*.safetensors"))
    values = [load_file(path) for path in paths]
    assert sorted(v["kv.0.k"].flatten()[0].item() for v in values) == [n * 12.0 for n in range(6)]
    assert all(v["kv.1.k"].dtype == torch.float16 for v in values)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert again.directory.nbytes == sum(path.stat().st_size for path in paths)


def test_a_state_goes_to_the_slot(tmp_path: Path) -> None:
    first = offload_of(tmp_path, filled())
    one = request()
    first._forms["state"]._views[0][0][1] = torch.arange(10.0).view(2, 5)
    first.save("state", first.block(one, 3), 1)
    again = offload_of(tmp_path, filled())
    assert [again.has("state", one, n) for n in range(6)] == [n == 3 for n in range(6)]
    assert again.load("state", one, 3, one.slot - 1)
    slots = again._forms["state"]._views[0][1]
    assert slots[1].tolist() == torch.arange(10.0).view(2, 5).tolist()
    assert not slots[[0, 2, 3]].any()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TEXT, [0, 1, 2, 3, 4, 5]),
        ([*TEXT[:13], 0, *TEXT[14:]], [0, 1]),  # Block 2 ends at 12, and 13 is behind it.
        ([*TEXT[:14], 0, *TEXT[15:]], [0, 1, 2]),
        ([0, *TEXT[1:]], []),
    ],
)
def test_a_block_is_its_whole_past(text: list[int], found: list[int], tmp_path: Path) -> None:
    save_all(offload_of(tmp_path, filled()))
    assert loaded(offload_of(tmp_path, filled()), text) == found


def test_other_models_and_forms_find_nothing(tmp_path: Path) -> None:
    save_all(offload_of(tmp_path, filled()))
    assert loaded(offload_of(tmp_path, filled(), identity="two")) == []
    assert loaded(offload_of(tmp_path, filled().double())) == []
    other = offload_of(tmp_path, filled())
    other = Offload(other.directory, {"kv.0.k": filled()}, {}, PAGE, K, "one", Counter())
    assert not any(other.has("page", request(), n) for n in range(6))
    for lookahead in (1, 3):
        changed = Offload(
            other.directory,
            {"kv.0.k": filled(), "kv.1.k": filled().half()},
            {"kv.2.state": (torch.zeros(3, 2, 5), torch.zeros(4, 2, 5))},
            PAGE, lookahead, "one", Counter(),
        )  # fmt: skip
        assert not any(changed.has("page", request(), n) for n in range(5))


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "length of the header": lambda data: flipped(data, 0),
    "header": lambda data: data.replace(b"kv.1.k", b"kv.9.k", 1),
    "checksum": lambda data: flipped(data, data.index(b'"sha256":"') + 12),
    "first byte": lambda data: flipped(data, len(data) - 12 * 4 - 12 * 2),
    "last byte": lambda data: flipped(data, len(data) - 1),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_mended(kind: str, tmp_path: Path) -> None:
    save_all(offload_of(tmp_path, filled()))
    again = offload_of(tmp_path, filled())
    path = tmp_path / again._forms["page"].name(again.block(request(), 3))
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    assert loaded(again) == [0, 1, 2, 4, 5]
    assert list(again._fallbacks) == [
        "kv offload: a damaged or foreign file was refused and removed"
    ]
    assert not path.exists()
    save_all(again)
    assert loaded(again) == list(range(6))


def test_another_blocks_file_is_refused(tmp_path: Path) -> None:
    """Though nothing is wrong with it but its name."""
    save_all(offload_of(tmp_path, filled()))
    again = offload_of(tmp_path, filled())
    names = [tmp_path / again._forms["page"].name(again.block(request(), n)) for n in range(6)]
    shutil.copyfile(names[2], names[4])
    assert loaded(again) == [0, 1, 2, 3, 5]
    assert sum(again._fallbacks.values()) == 1


def test_bytes_are_bounded(tmp_path: Path) -> None:
    """What was used longest ago goes first, and of a text its end; other files stay."""
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    size = offload_of(tmp_path, filled())._forms["page"].nbytes
    offload = offload_of(tmp_path, filled(), max_bytes=6 * size)
    others = [[n, *TEXT[1:]] for n in range(3)]
    save_all(offload)
    assert loaded(offload) == list(range(6))
    save_all(offload, others[0][:6] + TEXT[6:])
    found = loaded(offload)
    assert found == list(range(len(found)))
    for text in others:
        save_all(offload, text)
        total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
        assert total <= offload.directory.nbytes <= 6 * size
    assert offload.directory.num_evicted >= 12
    assert loaded(offload) == []
    assert kept.read_text() == "mine"
    tiny = offload_of(tmp_path, filled(), max_bytes=size - 1)
    save_all(tiny, [9, *TEXT[1:]])
    assert list(tiny._fallbacks) == [f"kv offload: a file needs {size} bytes: nothing is kept"]


def test_a_full_disk_is_a_fallback(tmp_path: Path) -> None:
    offload = offload_of(tmp_path, filled())
    with full_disk():
        save_all(offload)
    assert offload.num_saved == 0
    assert list(offload._fallbacks) == ["kv offload: a file was not written: File too large"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mtpc-lock"]
    save_all(offload)
    assert loaded(offload) == list(range(6))


def test_a_directory_that_goes_is_a_fallback(tmp_path: Path) -> None:
    offload = offload_of(tmp_path / "gone", filled())
    shutil.rmtree(tmp_path / "gone")
    save_all(offload)
    assert loaded(offload) == []
    assert sum(offload._fallbacks.values()) == 6


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(OptionError, match="which others can write"):
        OffloadDirectory(shared, BIG)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"kv_offload_dir is .*file, which cannot"):
        OffloadDirectory(tmp_path / "file", BIG)


def writer(path: Path, max_bytes: int, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, offloads.__file__, str(path), str(max_bytes), str(seed)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_processes_share_a_directory_and_are_killed(tmp_path: Path) -> None:
    """Two write, read and evict in one directory, and each is killed: bounds hold, files verify."""
    size = offload_of(tmp_path, filled())._forms["page"].nbytes
    most = 40 * size
    processes = [writer(tmp_path, most, seed) for seed in (1, 2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for wait in (0.4, 0.3, 0.2, 0.1):
            time.sleep(wait)
            total = sum(p.stat().st_size for p in [*tmp_path.iterdir()] if p.exists())
            assert total <= most + 4096
        for process in processes:
            assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGKILL)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    # A writer that is killed before it evicts leaves a file too many; the reader's start evicts.
    reader = offload_of(tmp_path, filled(), most)
    found = [n for seed in (1, 2) for m in range(40)
             for n in loaded(reader, [seed * 1000 + m, *TEXT[1:]])]  # fmt: skip
    files = sorted(tmp_path.glob("*.page.safetensors"))
    assert len(found) == len(files) > 0
    assert not reader._fallbacks


def test_digests_of_files_are_remembered_and_follow_them(tmp_path: Path) -> None:
    memory, weights = tmp_path / "weights.json", tmp_path / "weights"
    weights.write_bytes(b"one")
    one = content_digest([weights], memory)
    assert content_digest([weights], memory) == content_digest([weights], tmp_path / "no") == one
    status = weights.stat()
    weights.write_bytes(b"two")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # As if nothing had happened.
    two = content_digest([weights], memory)
    assert two != one
    memory.write_bytes(b'{"x": 3}')
    assert content_digest([weights], memory) == two
    assert content_digest([weights], tmp_path / "no" / "where") == two


@pytest.mark.parametrize("family", ["mimo", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_second_start_is_warm(
    family: str, warm: Callable[..., mtpc.SpecModel], tmp_path: Path
) -> None:
    """Compiled steps, closed and opened again; the second turn goes on from the first."""
    cold = warm(family, kv_offload_dir=tmp_path)
    prompt = PROMPTS[12]
    wanted = cold.generate(prompt, 20, ignore_eos=True)
    turn = [*prompt, *wanted]
    further = warm(family).generate(turn, 8, ignore_eos=True)
    cold.close()
    assert cold.stats.offload_saved
    again = warm(family, kv_offload_dir=tmp_path)
    assert again.generate(turn, 8, ignore_eos=True) == further
    assert again.stats.reused_tokens >= 24
    assert again.stats.offload_loaded >= 6
    assert "taken over" in str(again.stats)
    assert f"mtpc:kv_offload_loaded_total {again.stats.offload_loaded}" in again.stats.prometheus()
    assert not again.stats.fallbacks
    again.engine.reset_prefix_cache()  # The weights have changed, for all it knows.
    before = again.stats.prompt_tokens
    again.generate(turn, 8, ignore_eos=True)
    assert again.stats.prompt_tokens - before == len(turn)


def test_other_weights_are_another_model(
    warm: Callable[..., mtpc.SpecModel], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Of one config and one place; and so are other options that change what pages hold."""
    moved, files = tmp_path / "model", tmp_path / "files"
    shutil.copytree(checkpoint("mimo"), moved)
    first = warm("mimo", moved, kv_offload_dir=files)
    wanted = first.generate(PROMPTS[12], 4, ignore_eos=True)
    first.close()
    same = warm("mimo", moved, kv_offload_dir=files)
    assert same.generate(PROMPTS[12], 4, ignore_eos=True) == wanted
    assert same.stats.offload_loaded
    shutil.copyfile(checkpoint("mimo", "random") / "model.safetensors", moved / "model.safetensors")
    other = warm("mimo", moved, kv_offload_dir=files)
    plain = warm("mimo", moved)
    assert other.generate(PROMPTS[12], 4) == plain.generate(PROMPTS[12], 4)
    assert not other.stats.offload_loaded


def halved(source: Path, directory: Path) -> list[Path]:
    """A copy of a checkpoint whose tensors are in two files, which are returned."""
    shutil.copytree(source, directory)
    whole = directory / "model.safetensors"
    tensors, places = load_file(whole), dict[str, str]()
    whole.unlink()
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number - 1 :: 2]}
        save_file(part, directory / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(directory.glob("model-*"))


@pytest.mark.parametrize("family", ["mimo", "llama"])
def test_every_file_of_weights_counts(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The target's two, and a drafter's: one value less, and pages are another model's."""
    files = halved(checkpoint(family, "random"), tmp_path / "model")
    draft = tiny.drafter(tmp_path / "model").get("draft")
    files += [draft / "model.safetensors"] if draft else []
    plan = plan_of(kv_offload_dir=tmp_path / "kv", draft=draft)

    def identity() -> str:
        return page_identity(open_checkpoint(tmp_path / "model", draft), plan, "cpu")

    found = [identity(), identity()]
    for path in files:
        path.write_bytes(flipped(path.read_bytes(), path.stat().st_size - 1))
        found.append(identity())
    assert found[0] == found[1]
    assert len(set(found)) == 1 + len(files)


def test_options_that_do_not_go_together(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for options, found in (
        ({"prefix_caching": False}, "needs prefix_caching=True"),
        ({"async_scheduling": True}, "async_scheduling=False"),
        ({"tensor_parallel_size": 2}, "with tensor_parallel_size 2"),
        ({"kv_offload_bytes": 0}, "kv_offload_bytes"),
        ({"kv_offload_dir": 7}, "kv_offload_dir is 7"),
    ):
        with pytest.raises(OptionError, match=found):
            mtpc.CompileOptions(**{"kv_offload_dir": tmp_path, **options})
    with pytest.raises(OptionError, match="kv_offload_dir with a model object"):
        mtpc.compile(torch.nn.Linear(1, 1), kv_offload_dir=tmp_path)


LOCK = ".mtpc-lock"


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


def a_name_more(path: Path) -> None:
    path.hardlink_to(path.parent.parent / "secret")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent.parent / "nothing")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = (a_pipe, a_link, a_name_more, a_link_to_nothing, a_directory, a_device)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory for offloading, beside a file that nothing may change."""
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "kv").mkdir(mode=0o700)
    return tmp_path / "kv"


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_is_not_ours(kind: Callable[[Path], None], shared: Path) -> None:
    kind(shared / LOCK)
    with bounded(5), pytest.raises(OptionError, match=r"kv_offload_dir is .*kv, which cannot be"):
        OffloadDirectory(shared, BIG)
    assert (shared.parent / "secret").read_text() == "mine"
    assert sorted(path.name for path in shared.parent.iterdir()) == ["kv", "secret"]


@pytest.mark.parametrize("name", ["lock", "weights.json", "page.safetensors"])
def test_files_of_other_programs_are_left_alone(name: str, shared: Path) -> None:
    """`lock` was overwritten, and `weights.json` replaced."""
    (shared / name).write_text("mine")
    save_all(offload_of(shared, filled()))
    content_digest([shared.parent / "secret"], shared / MEMORY)
    assert (shared / name).read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_is_no_plain_file(kind: Callable[[Path], None], shared: Path) -> None:
    """Neither waited for nor followed; the other pages are read, and none is lost to it."""
    save_all(offload_of(shared, filled()))
    again = offload_of(shared, torch.zeros(8, PAGE, 3))
    path = shared / again._forms["page"].name(again.block(request(), 3))
    path.unlink()
    kind(path)
    with bounded(5):
        last = offload_of(shared, torch.zeros(8, PAGE, 3))
        assert loaded(last) == [0, 1, 2, 4, 5]
        save_all(last)
        full = offload_of(shared, filled(), max_bytes=last._forms["page"].nbytes)
        save_all(full, [9, *TEXT[1:]])  # Others are removed for it.
    assert sum(last._fallbacks.values()) >= 1
    assert not full._fallbacks
    assert (shared.parent / "secret").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_digests_that_are_no_plain_file(kind: Callable[[Path], None], shared: Path) -> None:
    """They are made again, and replaced where that is possible."""
    kind(shared / MEMORY)
    weights = shared.parent / "secret"
    with bounded(5):
        found = content_digest([weights], shared / MEMORY)
    assert found == content_digest([weights], shared / "other")
    assert weights.read_text() == "mine"
    assert [*shared.glob("*.[0-9]*"), *shared.glob(f".{MEMORY}.*")] == []


@pytest.mark.parametrize("option", ["kv_offload_dir", "cache_dir", "draft"])
def test_no_path_is_not_the_working_directory(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} is ''; expected a directory's path"):
        mtpc.CompileOptions.parse({option: ""})
    with pytest.raises(SystemExit):
        parse(["run", f"--{option.replace('_', '-')}", ""])
