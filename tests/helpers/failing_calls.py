"""A child process in which one system call after another fails.

    python -m helpers.failing_calls store ROOT STRIDE
    python -m helpers.failing_calls server CHECKPOINT STRIDE

ROOT is a new graph cache. STRIDE is how many calls are left out between two that fail. The last
line is how many faults were tried, and how many of them were told as an error. helpers/fail_calls.c
is preloaded.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

SOURCE = Path(__file__).with_name("fail_calls.c")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.ENOMEM)
FOR_EVER = 2**40


def run_failing(directory: Path, *words: str, seconds: float) -> tuple[int, int]:
    """Run the program; returns its two numbers. `directory` gets the compiled shim."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        raise SkipTest("no C compiler, or no Linux")
    shim = directory / "fail_calls.so"
    line = [compiler, "-O1", "-shared", "-fPIC", "-o", str(shim), str(SOURCE), "-ldl"]
    subprocess.run(line, check=True)
    roots = [str(SOURCE.parents[2]), str(SOURCE.parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "helpers.failing_calls", *words],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tried, told = done.stdout.splitlines()[-1].split()
    return int(tried), int(told)


class Calls:
    """The preloaded functions."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(None)
        self._library.fail_calls_last.restype = ctypes.c_char_p
        self._library.fail_calls.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_int]

    def count(self, action: Callable[[], object]) -> int:
        """How many calls the action makes."""
        self._library.fail_calls(FOR_EVER, 0, 0)
        action()
        return self.stop()

    def stop(self) -> int:
        """Let no more calls fail; returns the number of calls."""
        return int(self._library.fail_calls_stop())

    def during(self, first: int, count: int, number: int, action: Callable[[], object]) -> str:
        """Run the action; returns the name of the last failed call, or ""."""
        self._library.fail_calls(first, count, number)
        try:
            action()
        finally:
            self.stop()
        name: bytes = self._library.fail_calls_last()
        return name.decode()


def faults(most: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first call, number of calls, error): each call alone, and all calls from it on."""
    for number in ERRORS:
        for first in range(0, most, stride):
            yield first, 1, number
            if number in (errno.ENOSPC, errno.EIO):  # A full or broken disk fails every later call.
                yield first, FOR_EVER, number


def store(root: Path, stride: int) -> tuple[int, int]:
    """Write the cache: entries must be complete, and a failure must be a CacheError of one line."""
    from helpers.store_writer import DIGEST, filled, generation, no_wait
    from mtpc.errors import CacheError
    from mtpc.store.entries import EntryStore

    made, calls, told, tried = EntryStore(root), Calls(), Counter[str](), 0

    def write(number: int) -> None:
        made.prepare()
        with made.lock(DIGEST, no_wait):
            made.write(DIGEST, filled(number, files=2))

    write(0)
    most = calls.count(lambda: write(1))
    old = 1
    for number, (first, count, error) in enumerate(faults(most + 5, stride), start=2):
        failed, refused = "", ""

        def attempt(number: int = number) -> None:
            nonlocal refused
            try:
                write(number)
            except CacheError as problem:
                refused = str(problem)

        failed = calls.during(first, count, error, attempt)
        tried += bool(failed)
        where = f"{failed} call {first}, {count}, {errno.errorcode[error]}: {refused!r}"
        found = generation(made.read(DIGEST))
        assert found in ((old, number, None) if refused else (number,)), (found, where)
        if refused:
            told[failed] += 1
            assert str(root) in refused, where
            assert len(refused) < 1000, where
        if found is None:  # It was put aside, and its successor did not come.
            told["lost"] += 1
            write(number)
            found = generation(made.read(DIGEST))
            assert found == number, where
        old = found
    write(1)
    assert not os.listdir(root / "tmp"), "nothing is left of failures"
    print(most, told, file=sys.stderr)
    return tried, sum(told.values())


def server(checkpoint: Path, stride: int) -> tuple[int, int]:
    """Start a server: it must listen in spite of the fault, or end with one error of one line."""
    import mtpc
    from mtpc.errors import MtpcError
    from mtpc.server.options import ServerOptions
    from mtpc.server.run import Running, run_server

    spec = mtpc.compile(checkpoint, backend="eager", spec_tokens=1, max_len=64, use_cache=False)
    calls, made, told, tried, wrong = Calls(), [0], Counter[str](), 0, Counter[str]()

    def ready(running: Running) -> None:
        made.append(calls.stop())
        running.stop()

    def start() -> None:
        spec.served = replace(spec.served)  # Without the tokenizer that was read before.
        run_server(spec, ServerOptions(port=0), ready)

    for _ in range(2):
        calls.count(start)
    most, before = made[-1], len(os.listdir("/proc/self/fd"))
    for first, count, error in faults(most + 5, stride):
        refused = list[MtpcError]()

        def attempt(refused: list[MtpcError] = refused) -> None:
            try:
                start()
            except MtpcError as problem:
                refused.append(problem)

        faulthandler.dump_traceback_later(20, exit=True)
        where, listened = f"call {first}, {count}, {errno.errorcode[error]}", len(made)
        try:
            failed = calls.during(first, count, error, attempt)
        except Exception as problem:
            calls.stop()
            place = traceback.extract_tb(problem.__traceback__)[-1]
            wrong[f"{problem!r} at {place.filename}:{place.lineno}, {where}"] += 1
            continue
        tried += bool(failed)
        told[failed] += len(refused)
        if len(refused) + len(made) - listened != 1 or "\n" in str(refused):
            wrong[f"{failed} {where}: {refused}, listened {len(made) - listened} times"] += 1
    faulthandler.cancel_dump_traceback_later()
    start()
    print(most, told, *wrong, sep="\n", file=sys.stderr)
    assert not wrong, f"{len(wrong)} faults"
    gc.collect()
    left = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert len(left) <= before + 2, f"{before} descriptors before, now {left}"
    return tried, sum(told.values())


if __name__ == "__main__":
    _, what, place, skipped = sys.argv
    print(*{"store": store, "server": server}[what](Path(place), int(skipped)))
