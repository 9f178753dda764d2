"""The store of the graph cache: whole entries or none, whoever writes, dies, or meddles."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shlex
import shutil
import signal
import string
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers import store_writer
from helpers.store_writer import (
    DIGEST,
    FIRST,
    attempt,
    filled,
    generation,
    in_tmp,
    no_wait,
    refusal,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpc.cli.cache import examine
from mtpc.errors import DamagedEntryError
from mtpc.store.entries import SUMS, EntryStore, parse_sums, render_sums
from mtpc.store.key import digest
from mtpc.store.lookup import KEY, find, key_of, peek
from mtpc.store.machine import COMPILER
from mtpc.store.nearest import nearest

ROOT = os.geteuid() == 0
NOBODY, STRANGER = 65534, 12345
UMASKS = (0, 0o002, 0o022, 0o027, 0o077)
FIELDS, UNKNOWN, put = store_writer.FIELDS, store_writer.UNKNOWN, store_writer.put
needs_root = pytest.mark.skipif(not ROOT, reason="only root can act as another user")


def test_round_trip(store: EntryStore) -> None:
    """What is read is what was written; a write replaces all of it; a removal leaves nothing."""
    entry = store.write(DIGEST, filled(1))
    assert generation(store.read(DIGEST)) == 1
    assert entry.nbytes == sum(path.stat().st_size for path in entry.directory.iterdir())
    assert entry.pin == hashlib.sha256((entry.directory / SUMS).read_bytes()).hexdigest()
    replaced = store.write(DIGEST, filled(2, files=2))
    assert replaced == store.read(DIGEST)
    assert (generation(replaced), len(replaced.files)) == (2, 2)
    assert replaced.pin != entry.pin
    assert (store.digests(), in_tmp(store)) == ([DIGEST], [])
    store.remove(DIGEST)
    assert (store.read(DIGEST), store.digests(), in_tmp(store)) == (None, [], [])


def test_sums_are_those_of_sha256sum(store: EntryStore) -> None:
    """Lines "digest, two spaces, name" by name; the tool itself accepts them where there is one."""
    directory = store.directory(DIGEST)
    paths = sorted(path for path in directory.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in paths]
    assert (directory / SUMS).read_text() == "".join(lines)
    if shutil.which("sha256sum"):
        command = ["sha256sum", "--check", "--strict", "--quiet", SUMS]
        subprocess.run(command, cwd=directory, check=True)
        paths[0].write_bytes(b"other")
        assert subprocess.run(command, cwd=directory, capture_output=True).returncode == 1


@pytest.mark.parametrize("umask", UMASKS)
def test_modes_of_an_entry(tmp_path: Path, umask: int) -> None:
    """0755 and 0644 whatever the umask; no umask makes a folder that the store itself refuses."""
    store = EntryStore(tmp_path / "store")
    assert attempt(store, "write 1", "lock", "read", "tmp", umask=umask) == [1, "done", 1, []]
    directory = store.directory(DIGEST)
    assert store_writer.modes(directory) == {0o755}
    assert store_writer.modes(*directory.iterdir()) == {0o644}
    assert attempt(store, "read", "write 2", "read", umask=0o022) == [1, 2, 2]


@pytest.mark.parametrize("umask", UMASKS)
def test_modes_of_the_folders(tmp_path: Path, umask: int) -> None:
    """Others may read an entry only if they may search the folders above it."""
    store = EntryStore(tmp_path / "store")
    attempt(store, "prepare", umask=umask)
    assert store_writer.modes(store.root, *store.root.iterdir()) == {0o755}


def test_eight_builders_at_once(store: EntryStore) -> None:
    """Exactly one writes; the others find it; so, too, where what is there is damaged."""
    waited = 0
    with ExitStack() as running:
        builders = [running.enter_context(store_writer.started("build", store)) for _ in range(8)]
        for number in range(10):
            name = f"{number:032x}"
            if number % 2:
                (store.write(name, filled(0)).directory / FIRST).write_bytes(b"damaged")
            for builder in builders:
                print(name, file=builder.stdin, flush=True)
            answers = [store_writer.read_line(builder) for builder in builders]
            assert set(answers) <= {"wrote", "waited", "found"}
            assert answers.count("wrote") == 1
            assert generation(store.read(name)) == builders[answers.index("wrote")].pid
            assert in_tmp(store) == []
            waited += answers.count("waited")
    assert waited > 0, "no two builders ever met: nothing was tested"


def test_killed_replacements(store: EntryStore) -> None:
    """After kill -9 at any moment: the old entry, the new one, or none; and the next one heals."""
    moments, inside, last = random.Random(7), 0, 1
    for _ in range(25):
        with store_writer.started("replace", store, last + 1) as writer:
            assert store_writer.read_line(writer) == "started"
            time.sleep(moments.uniform(0.0, 0.05))
            writer.kill()
            while line := store_writer.read_line(writer):
                last = int(line)
            assert writer.wait() == -signal.SIGKILL
        left = generation(store.read(DIGEST))
        assert left in (None, last, last + 1)
        inside += left is None or bool(in_tmp(store))
        last += 2
        with store.lock(DIGEST, no_wait):
            assert generation(store.write(DIGEST, filled(last))) == last
        assert not [name for name in in_tmp(store) if name.startswith(DIGEST)]
        for path in store.leftovers():
            shutil.rmtree(path)
    assert inside > 0, "no kill landed inside a write: nothing was tested"


def test_waiting_for_a_killed_holder(store: EntryStore) -> None:
    """The second is told that it waits, and has the lock once the first is killed."""
    told: list[str] = []
    with store_writer.started("hold", store) as holder:
        assert store_writer.read_line(holder) == "held"

        def tell(line: str) -> None:
            assert not told, "the lock outlived its holder"
            told.append(line)
            holder.kill()
            holder.wait()

        with store.lock("f" * 32, no_wait):
            assert holder.poll() is None
        with store.lock(DIGEST, tell):
            assert told == ["waiting for another process that builds this entry"]


def test_leftovers_are_only_of_the_dead(store: EntryStore) -> None:
    """What is being written is not listed; what a killed builder left is, until it is replaced."""
    dead, seen = store.root / "tmp" / f"{'f' * 32}-dead", []
    dead.mkdir()

    def fill(directory: Path) -> None:
        filled(2)(directory)
        seen.extend([directory.parent, *store.leftovers()])

    with store.lock(DIGEST, no_wait):
        store.write(DIGEST, fill)
    assert seen == [dead.parent, dead]
    store.write("f" * 32, filled(3))
    assert store.leftovers() == []


def test_errors_of_the_work(store: EntryStore) -> None:
    """They pass through, and leave the lock free, the old entry whole and nothing behind."""

    def fill(directory: Path) -> None:
        filled(2)(directory)
        raise KeyError("of the compiler")

    with (
        pytest.raises(KeyError, match="of the compiler"),
        store.lock(DIGEST, no_wait),
    ):
        store.write(DIGEST, fill)
    with (
        pytest.raises(OSError, match="of the work"),
        store.lock(DIGEST, no_wait),
    ):
        raise OSError("of the work")
    assert generation(store.read(DIGEST)) == 1
    assert in_tmp(store) == []


def test_flipped_bits_and_truncations(store: EntryStore) -> None:
    """1,000 of them, over all files: an error that names the file, and no other file."""
    chance, paths = random.Random(3), sorted(store.directory(DIGEST).iterdir())
    for number in range(1000):
        path = paths[number % len(paths)]
        original = path.read_bytes()
        path.write_bytes(store_writer.damaged(original, chance))
        with pytest.raises(DamagedEntryError) as caught:
            store.read(DIGEST)
        named = [other.name for other in paths if other.name in str(caught.value)]
        assert named == [SUMS, path.name] or path.name == SUMS in named
        path.write_bytes(original)
    assert generation(store.read(DIGEST)) == 1


@pytest.mark.parametrize("damage", store_writer.TAMPERINGS)
def test_tampering(store: EntryStore, damage: str) -> None:
    """Every difference from what was written is told; writing again heals it."""
    tamper, told = store_writer.TAMPERINGS[damage]
    tamper(store.directory(DIGEST))
    with pytest.raises(DamagedEntryError, match=re.escape(told)):
        store.read(DIGEST)
    assert generation(store.write(DIGEST, filled(2))) == 2
    assert in_tmp(store) == []


def test_changes_after_the_check(store: EntryStore) -> None:
    """A file is compared again when its bytes are used; an unlisted one is not read."""
    entry = store.write(DIGEST, filled(1))
    for name in (FIRST, "extra.bin"):
        (entry.directory / name).write_bytes(b"other")
        with pytest.raises(DamagedEntryError, match=name):
            entry.read(name)


names = st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=9)
sums = st.dictionaries(names, st.text("0123456789abcdef", min_size=64, max_size=64), min_size=1)


@settings(deadline=None)
@given(sums, st.integers(0), st.integers(1, 255))
def test_sums_have_one_spelling(files: dict[str, str], at: int, change: int) -> None:
    """They are parsed as rendered; a byte changed, lost or added is refused or means another."""
    rendered = render_sums(files)
    assert parse_sums(Path(SUMS), rendered) == files
    at %= len(rendered)
    before, byte, after = rendered[:at], rendered[at : at + 1], rendered[at + 1 :]
    changed = bytes([byte[0] ^ change])
    for mutated in (before + changed + after, before + after, before + byte + changed + after):
        try:
            parsed = parse_sums(Path(SUMS), mutated)
        except DamagedEntryError:
            continue
        assert parsed != files


@pytest.mark.parametrize("extra", [0o020, 0o002], ids=["group", "world"])
@pytest.mark.parametrize("place", store_writer.PLACES)
def test_writable_by_others(store: EntryStore, place: str, extra: int) -> None:
    """Refused by its path, and the command of the message mends it."""
    path = store.root / store_writer.PLACES[place]
    path.chmod(path.stat().st_mode | extra)
    message = refusal(lambda: store.read(DIGEST))
    assert message.startswith(f"{path} can be written by its group or by others")
    command = message.split("; ")[1].split(",")[0]
    assert command == f"chmod go-w {path}"
    subprocess.run(shlex.split(command), check=True)
    assert generation(store.read(DIGEST)) == 1


@pytest.mark.parametrize("place", [".", "entries", "tmp", "locks"])
def test_nothing_is_written_where_others_may(store: EntryStore, place: str) -> None:
    """Neither through a folder that others may write nor through a symbolic link."""
    path, aside = store.root / place, store.root.parent / "aside"
    write = store.prepare if place == "locks" else lambda: store.write(DIGEST, filled(2))
    path.chmod(0o775)
    assert f"chmod go-w {path}," in refusal(write)
    path.chmod(0o755)
    path.rename(aside)
    path.symlink_to(aside)
    assert f"{path} is a symbolic link" in refusal(write)
    path.unlink()
    aside.rename(path)
    assert generation(store.read(DIGEST)) == 1


@pytest.mark.parametrize("place", store_writer.PLACES)
def test_symbolic_links(store: EntryStore, place: str) -> None:
    """Refused at every level, even if they lead to the right bytes; the message says what to do."""
    path, aside = store.root / store_writer.PLACES[place], store.root.parent / "aside"
    path.rename(aside)
    path.symlink_to(aside)
    message = refusal(lambda: store.read(DIGEST))
    assert message.startswith(f"{path} is a symbolic link")
    assert "replace it by what it points to" in message


@pytest.mark.parametrize("name", [FIRST, SUMS, "new"])
def test_pipes(store: EntryStore, name: str) -> None:
    """Refused without being opened, which would wait for ever."""
    path = store.directory(DIGEST) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    (told,) = attempt(store, "read")
    path = path.relative_to(store.root.parent)
    assert told == f"CacheError: {path} is neither a file nor a directory; remove it from the cache"


@needs_root
@pytest.mark.parametrize("place", store_writer.PLACES)
def test_foreign_owners(store: EntryStore, place: str) -> None:
    """A stranger's are refused by root and by others; root's are good for all, one's own too."""
    path = store.root / store_writer.PLACES[place]
    assert attempt(store, "read", uid=NOBODY) == [1]
    os.chown(path, STRANGER, -1)
    message = refusal(lambda: store.read(DIGEST))
    assert message.startswith(f"{path} belongs to user {STRANGER}, and this process runs as 0: ")
    assert "chown it to user 0" in message
    (told,) = attempt(store, "read", uid=NOBODY)
    assert told.startswith("CacheError: ")
    assert f"belongs to user {STRANGER}, and this process runs as {NOBODY}: " in told
    os.chown(path, NOBODY, -1)
    assert attempt(store, "read", uid=NOBODY) == [1]
    assert f"belongs to user {NOBODY}" in refusal(lambda: store.read(DIGEST))


@needs_root
@pytest.mark.parametrize(("place", "mode"), [("file", 0o600), ("sums", 0o600), ("entry", 0o700)])
def test_unreadable_files(store: EntryStore, place: str, mode: int) -> None:
    """Of root, for its own eyes: another user is told how to open them."""
    (store.root / store_writer.PLACES[place]).chmod(mode)
    (told,) = attempt(store, "read", uid=NOBODY)
    assert told.startswith("CacheError: cannot read the graph cache ")
    assert told.endswith("; chmod -R a+rX store")


@pytest.mark.parametrize("mount", ["", store_writer.READ_ONLY], ids=["folders", "file system"])
def test_read_only(store: EntryStore, mount: str) -> None:
    """The entry is served, and every change is refused with the reason and what to do."""
    for path in (store.root, *store.root.iterdir()):
        path.chmod(0o555)
    steps = ("read", "prepare", "lock", "write 2", "remove", "read")
    uid = NOBODY if ROOT and not mount else None
    first, *refused, last = attempt(store, *steps, uid=uid, mount=mount)
    assert (first, last) == (1, 1)
    for told in refused:
        assert told.startswith("CacheWriteError: cannot write the graph cache store: ")
        assert re.search(r"[Pp]ermission|Read-only file system", told)
        assert told.endswith("choose another directory with cache_dir (MTPC_CACHE_DIR)")


@pytest.mark.parametrize(
    ("limit", "step", "reason"),
    [
        pytest.param({"mount": store_writer.SMALL}, "write 4 100000", "No space left", id="disk"),
        pytest.param({"fsize": 1000}, "write 4 100000", "File too large", id="payload"),
        pytest.param({"fsize": 1000}, "write 4 500 20", "File too large", id="sums"),
    ],
)
def test_full_disk(store: EntryStore, limit: dict[str, Any], step: str, reason: str) -> None:
    """Nothing is left behind, the old entry is whole, and there is room for a smaller one."""
    steps = ("write 3 500", step, "tmp", "read", "write 5 500", "tmp")
    first, told, *outcomes = attempt(store, *steps, **limit)
    assert told.startswith("CacheWriteError: cannot write the graph cache store: ")
    assert reason in told
    assert "free space" in told
    assert (first, outcomes) == (3, [[], 3, 5, []])


def test_find(store: EntryStore) -> None:
    """Exactly this key, of any compiler where none is known: any other difference is a miss."""
    assert find(EntryStore(store.root / "nothing"), FIELDS) is None
    put(store, model="other")
    entry = put(store)
    assert key_of(entry) == FIELDS
    for wanted in (FIELDS, UNKNOWN):
        assert find(store, wanted) == entry
        assert find(store, {**wanted, "more": ""}) is None
        for name in wanted:
            assert find(store, {**wanted, name: "third"}) is None
    for name in UNKNOWN:
        assert find(store, {field: v for field, v in FIELDS.items() if field != name}) is None


def test_nearest(store: EntryStore) -> None:
    """The fewest differences of the same kind, every one of them named, and no other."""
    assert nearest(peek(store), FIELDS) is None
    put(store, kind="step")
    put(store, model="other", **{"options.size": "5", "more": "x"})
    near = put(store, **{"options.size": "6", COMPILER: "clang++ 18"})
    differences = [f"{COMPILER}: clang++ 18 -> g++ 13", "options.size: 6 -> 4"]
    for wanted, expected in ((FIELDS, differences), (UNKNOWN, differences[1:])):
        row = nearest(peek(store), wanted)
        assert row is not None
        assert (row.digest, [*map(str, row.differences)]) == (near.digest, expected)


def test_entries_under_other_names(store: EntryStore) -> None:
    """Good sums do not help an entry under another's name; the readable ones leave it out."""
    moved, whole = put(store, model="other"), put(store, model="third")
    os.rename(moved.directory, store.directory(digest(FIELDS)))
    for wanted in (FIELDS, {**UNKNOWN, "model": "other"}):
        with pytest.raises(DamagedEntryError, match="holds the key of another entry"):
            find(store, wanted)
    (put(store, model="fourth").directory / KEY).write_bytes(b"{}")
    assert len(store.digests()) == 4
    rows = [(row.entry, row.fields) for row in examine(store) if row.entry is not None]
    assert rows == [(whole, {**FIELDS, "model": "third"})]
