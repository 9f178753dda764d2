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
from helpers.oracles import Oracle

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


def test_a_command_runs_on_ranks(built: list[str], oracle: Callable[..., Oracle]) -> None:
    """It finds what was built, and prints the text of plain decoding, once."""
    wanted = oracle("mimo").generate([5, 6, 7], 40, stop=False)
    done = mtpc_of("run", *built, "--ids=5 6 7", "-n40", "--ignore-eos", "--frozen")
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count(" ".join(map(str, wanted))) == 1
    assert done.stderr.count("generate up to 40 tokens") == 1


@pytest.mark.slow
def test_what_is_wrong_is_said_once(built: list[str]) -> None:
    """All four ranks find it, and end."""
    done = mtpc_of("run", *built, "--ids=5", "--tensor-parallel-size=4", "--no-cache")
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert ["2 key/value heads for 4 ranks" in line for line in errors] == [True], done.stderr


@pytest.mark.slow
def test_torchrun(built: list[str], oracle: Callable[..., Oracle]) -> None:
    """The number of ranks is torchrun's."""
    wanted = oracle("mimo").generate([5, 6, 7], 40, stop=False)
    shared = [argument for argument in built if "tensor-parallel" not in argument]
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "mtpc", "run", *shared]
    done = run_python(*command, "--ids=5 6 7", "-n40", "--ignore-eos", "--frozen")
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count(" ".join(map(str, wanted))) == 1


def mtpc_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "mtpc", *arguments)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=300
    )


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
