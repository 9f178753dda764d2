"""Commands that start their own ranks, and how they end when one of them is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SHAPE = ["--dtype=bfloat16", "--spec-tokens=1", "--max-len=512", "--prefill-chunk=16"]
TWO = [*SHAPE, "--batch-buckets=1", "--tensor-parallel-size=2"]
LIMIT_S = 10.0
"""No process may be there any more so long after one was killed."""
LONG = ["--ids", " ".join(map(str, [5, 6, 7, 8] * 120)), "-n20", "--ignore-eos"]
STAGES = {
    "load": ("load /", ["--no-cache"]),
    "compile": ("rewrite prefill", ["--no-cache"]),
    "warm": ("load prefill", []),
    "prefill": ("generate up to", []),
    "decode": ("generate up to", []),
}
"""Stage -> the line of rank 0 after which it begins, and further options."""


@pytest.fixture(scope="module")
def built(checkpoint: Callable[..., Path], cpu_cache: Path) -> list[str]:
    """Arguments of a model on two ranks whose steps `mtpc build` has made for both."""
    arguments = [str(checkpoint("mimo")), *TWO]
    done = subprocess.run(
        [sys.executable, "-m", "mtpc", "build", *arguments, "--jobs=1", f"--out={cpu_cache}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):  # A prefill and a decode step each.
        assert done.stdout.count(f"], rank {rank} ") == 2, done.stdout
    return [*arguments, f"--cache-dir={cpu_cache}"]


@dataclass
class Started:
    """A command that runs, and its other rank's process id."""

    process: subprocess.Popen[str]
    other: int = 0

    def wait_for(self, line: str) -> None:
        """Read what rank 0 says until a line has that text; then find the other rank."""
        assert self.process.stderr is not None
        said = []
        for text in self.process.stderr:
            said.append(text)
            if line in text:
                break
        else:
            raise AssertionError("".join(said))
        (self.other,) = children(self.process.pid)


def children(parent: int) -> list[int]:
    """Processes that run ranks below one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == parent and b"mtpc.cli.ranks" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def started(*arguments: str) -> Iterator[Started]:
    process = subprocess.Popen(
        [sys.executable, "-m", "mtpc", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    run = Started(process)
    try:
        yield run
    finally:
        process.kill()
        process.wait()
        if run.other:
            with suppress(ProcessLookupError):
                os.kill(run.other, signal.SIGKILL)


def kill_at(stage: str, rank: int, delay_s: float, built: list[str]) -> None:
    """Kill a rank in a stage; all must end in time, and rank 0 must say why if it can."""
    line, more = STAGES[stage]
    prompt = LONG if stage != "decode" else ["--ids=5 6 7", "-n500", "--ignore-eos"]
    with started("run", *built, *prompt, *more) as run:
        run.wait_for(line)
        time.sleep(delay_s)
        assert run.process.poll() is None, "the run ended before the kill"
        os.kill(run.other if rank else run.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        _, said = run.process.communicate(timeout=LIMIT_S)
        while is_there(run.other):
            assert time.monotonic() - killed < LIMIT_S, "rank 1 outlives rank 0"
            time.sleep(0.05)
        assert time.monotonic() - killed < LIMIT_S
        if rank:
            assert run.process.returncode == 2, said
            last = said.splitlines()[-1]
            assert last.startswith("error: rank 1 of 2 was ended by SIGKILL"), said
            assert sum(line.startswith("error:") for line in said.splitlines()) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(rank: int, built: list[str]) -> None:
    kill_at("decode", rank, 0.3, built)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_ends_all_at_any_stage(
    stage: str, rank: int, turn: int, built: list[str]
) -> None:
    """Thirty runs, each killed at another moment."""
    longest = {"prefill": 0.1, "warm": 0.05}.get(stage, 1.0)
    kill_at(stage, rank, random.Random(turn).random() * longest, built)
