"""Entries for the tests of the store, damage to them, and programs for other processes.

python store_writer.py build ROOT              one digest a line: found | waited | wrote
python store_writer.py replace ROOT FROM       replaces DIGEST for ever; prints each generation
python store_writer.py hold ROOT               takes the lock of DIGEST and keeps it
python store_writer.py attempt ROOT SETTINGS   runs the settings' steps, prints their outcomes
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import SkipTest

import mtpc.store.writing  # noqa: F401  (another user may not be able to read it, or Python)
from mtpc.errors import CacheError, CacheWriteError, DamagedEntryError
from mtpc.store.entries import SUMS, Entry, EntryStore
from mtpc.store.key import digest

DIGEST = "0123456789abcdef" * 2
"""The entry that most tests use."""
FIRST, SECOND = "part-0.bin", "part-1.bin"
Tampering = Callable[[Path], object]
"""A function that changes an entry's directory."""
FIELDS = {"kind": "kernels", "model": "tiny", "options.size": "4", "machine.compiler": "g++ 13"}
UNKNOWN = {name: value for name, value in FIELDS.items() if name != "machine.compiler"}
"""A key, and the same where no compiler is installed."""
SMALL = "mount -t tmpfs -o size=256k,mode=755 tmpfs store"
READ_ONLY = "mount --bind store store && mount -o remount,bind,ro store"
"""Commands that mount another file system over the store, or make it read-only."""
PLACES = {
    "root": ".",
    "entries": "entries",
    "entry": f"entries/{DIGEST}",
    "file": f"entries/{DIGEST}/{FIRST}",
    "sums": f"entries/{DIGEST}/{SUMS}",
}
"""Faults that are found before an entry is read."""


def refusal(call: Callable[[], object]) -> str:
    """The message of a CacheError that is neither damage nor a failure to write."""
    try:
        call()
    except (DamagedEntryError, CacheWriteError):
        raise
    except CacheError as error:
        return str(error)
    raise AssertionError("not refused")


def no_wait(line: str) -> None:
    """A `wait` callback for a lock that must be free."""
    raise AssertionError(line)


def in_tmp(store: EntryStore) -> list[str]:
    """Names of the entries in the store's tmp."""
    return sorted(os.listdir(store.root / "tmp"))


def modes(*paths: Path) -> set[int]:
    """The permissions of these files."""
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}


@contextmanager
def started(command: str, store: EntryStore, *words: int) -> Iterator[subprocess.Popen[str]]:
    """Run this program with pipes, and kill it at the end."""
    line = [sys.executable, __file__, command, str(store.root), *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints; nothing after its end."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _in_namespace(mount: str, directory: Path) -> list[str]:
    """Prefix of a command that runs with a mount, in its own namespace."""
    words = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if shutil.which("unshare") is None:
        raise SkipTest("the tool unshare is not here")
    probe = subprocess.run([*words, "true"], cwd=directory, capture_output=True, text=True)
    if probe.returncode != 0:
        raise SkipTest(f"this process cannot mount: {probe.stderr}")
    return words


def attempt(store: EntryStore, *steps: str, mount: str = "", **limits: Any) -> list[Any]:
    """Run steps in another process, which opens the store by a relative path; return outcomes."""
    settings = json.dumps({"steps": steps, **limits})
    before = _in_namespace(mount, store.root.parent) if mount else []
    line = [*before, sys.executable, __file__, "attempt", store.root.name, settings]
    printed = subprocess.check_output(line, cwd=store.root.parent, timeout=60)  # It may hang.
    outcomes: list[Any] = json.loads(printed)
    return outcomes


def filled(
    generation: int, size: int = 4000, files: int = 6, seconds: float = 0.0
) -> Callable[[Path], None]:
    """A function that fills an entry: every line of every file has the generation and the name."""

    def fill(directory: Path) -> None:
        for index in range(files):
            name = f"part-{index}.bin"
            line = f"{generation} {name}\n"
            (directory / name).write_text(line * (size // len(line)))
            time.sleep(seconds / files)

    return fill


def generation(entry: Entry | None) -> int | None:
    """The generation of all files of an entry; None without an entry."""
    if entry is None:
        return None
    found = {tuple(line.split()) for name in entry.files for line in entry.read(name).splitlines()}
    numbers = {int(number) for number, name in found}
    if len(numbers) != 1 or {name.decode() for number, name in found} != entry.files.keys():
        raise ValueError(f"files of several generations in one entry: {sorted(found)}")
    return numbers.pop()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Flip a bit of a file, or cut off its end."""
    at = chance.randrange(len(data))
    flipped = bytes([data[at] ^ (1 << chance.randrange(8))])
    return data[:at] + chance.choice((flipped + data[at + 1 :], b""))


def _edit(change: Callable[[bytes], bytes], name: str = SUMS) -> Tampering:
    return lambda entry: (entry / name).write_bytes(change((entry / name).read_bytes()))


def _swap(entry: Path) -> None:
    first, second, aside = entry / FIRST, entry / SECOND, entry.parent / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _unsort(sums: bytes) -> bytes:
    return b"".join(reversed(sums.splitlines(keepends=True)))


NO_LIST = f"{SUMS} is not a list of SHA-256 sums"
TAMPERINGS: dict[str, tuple[Tampering, str]] = {
    "deleted": (lambda entry: (entry / FIRST).unlink(), f": {FIRST} is missing"),
    "renamed": (
        lambda entry: (entry / FIRST).rename(entry / "new"),
        f": {FIRST} is missing; new is not in {SUMS}",
    ),
    "extra": (lambda entry: (entry / "new").touch(), f": new is not in {SUMS}"),
    "hidden": (lambda entry: (entry / ".new").touch(), f": .new is not in {SUMS}"),
    "folder": (lambda entry: (entry / "new").mkdir(), f": new is not in {SUMS}"),
    "swapped": (
        _swap,
        f": {FIRST} does not have the SHA-256 in {SUMS}; {SECOND} does not have the SHA-256",
    ),
    "emptied": (_edit(lambda data: b"", FIRST), f": {FIRST} does not have the SHA-256"),
    "appended": (_edit(lambda data: data + b"\0", FIRST), f": {FIRST} does not have the SHA-256"),
    "no sums": (lambda entry: (entry / SUMS).unlink(), f"has no {SUMS}"),
    "sums emptied": (_edit(lambda data: b""), f"{FIRST} is not in {SUMS}"),
    "sums longer": (_edit(lambda data: data + b"\n"), NO_LIST),
    "sums doubled": (_edit(lambda data: data * 2), NO_LIST),
    "sums of Windows": (_edit(lambda data: data.replace(b"\n", b"\r\n")), NO_LIST),
    "sums of binaries": (_edit(lambda data: data.replace(b"  ", b" *")), NO_LIST),
    "sums in capitals": (_edit(bytes.upper), NO_LIST),
    "sums unsorted": (_edit(_unsort), NO_LIST),
}
"""Damage by name, with a part of its error message."""


def put(store: EntryStore, **changes: str) -> Entry:
    """An entry under FIELDS with these changes."""
    from mtpc.store.lookup import KEY, key_bytes  # Imports torch, which no other process needs.

    fields = {**FIELDS, **changes}

    def fill(into: Path) -> None:
        (into / KEY).write_bytes(key_bytes(fields))

    return store.write(digest(fields), fill)


def _whole(store: EntryStore, name: str) -> Entry | None:
    try:
        return store.read(name)
    except DamagedEntryError:
        return None


def _build(store: EntryStore) -> None:
    """As `StepCache.obtain` does, a damaged entry being a missing one."""
    for line in sys.stdin:
        name = line.strip()
        answer = "found"
        if _whole(store, name) is None:
            with store.lock(name, lambda line: None):
                answer = "waited"
                if _whole(store, name) is None:
                    store.write(name, filled(os.getpid(), seconds=0.05))
                    answer = "wrote"
        print(answer, flush=True)


def _replace(store: EntryStore, number: int) -> None:
    print("started", flush=True)
    while True:
        with store.lock(DIGEST, no_wait):
            store.write(DIGEST, filled(number))
        print(number, flush=True)
        number += 1


def _hold(store: EntryStore) -> None:
    with store.lock(DIGEST, no_wait):
        print("held", flush=True)
        time.sleep(60)  # Longer than any test needs, and an end to one that would wait for ever.


def _attempt(store: EntryStore, settings: dict[str, Any]) -> None:
    if "umask" in settings:
        os.umask(settings["umask"])
    if "fsize" in settings:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (settings["fsize"],) * 2)
    if settings.get("uid") is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    print(json.dumps([_step(store, *step.split()) for step in settings["steps"]]))


def _step(store: EntryStore, name: str, *numbers: str) -> Any:
    """The generation read or written, what is in tmp, "done", or the error with its type."""
    try:
        if name == "read":
            return generation(store.read(DIGEST))
        if name == "write":
            first, *rest = map(int, numbers)
            return generation(store.write(DIGEST, filled(first, *rest)))
        if name == "tmp":
            return in_tmp(store)
        if name == "lock":
            with store.lock(DIGEST, no_wait):
                return "done"
        {"prepare": store.prepare, "remove": lambda: store.remove(DIGEST)}[name]()
        return "done"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Run one of the commands."""
    command, root, *rest = sys.argv[1:]
    store = EntryStore(Path(root))
    if command == "build":
        _build(store)
    elif command == "replace":
        _replace(store, int(rest[0]))
    elif command == "hold":
        _hold(store)
    else:
        _attempt(store, json.loads(rest[0]))


if __name__ == "__main__":
    main()
