"""Commands that start their own ranks, and how they end when one of them is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers.oracles import Oracle
from helpers.ranks import memory_shared_by
from helpers.word_model import word_checkpoint

LIMIT_S = 10.0
"""No process may be there any more so long after one was killed."""
LONG = [f"--ids={' '.join(map(str, [first, 6, 7, 8] * 120))}" for first in range(9, 29)]
PROMPTS = {
    "prefill": [*LONG, "-n2", "--ignore-eos"],
    "decode": [*["--ids=5 6 7"] * 20, "-n500", "--ignore-eos"],
}
"""What a command has to do, one prompt after the other: a step takes a millisecond or less."""
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

    def wait_for(self, line: str, in_output: bool = False) -> str:
        """Read what rank 0 says, until a line has that text; then find the other rank.

        Args:
            line: the text.
            in_output: whether it is on standard output, not on standard error.

        Returns:
            The whole line.
        """
        stream = self.process.stdout if in_output else self.process.stderr
        assert stream is not None
        said = []
        for text in stream:
            said.append(text)
            if line in text:
                (self.other,) = children(self.process.pid)
                return text
        raise AssertionError("".join(said) + self.process.communicate()[1])


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
    with started("run", "-v", *built, *PROMPTS.get(stage, PROMPTS["prefill"]), *more) as run:
        run.wait_for(line)
        if stage == "decode":
            assert [memory_shared_by(pid) for pid in (run.process.pid, run.other)] == [1, 1]
        time.sleep(delay_s)
        kill(run, rank)


def kill(run: Started, rank: int, watch: Callable[[], object] = lambda: None) -> None:
    """Kill a rank of a command; all must end in time, and rank 0 must say why if it can.

    Args:
        run: the command.
        rank: which one.
        watch: called after the kill; its time counts.
    """
    assert run.process.poll() is None, "the run ended before the kill"
    os.kill(run.other if rank else run.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    watch()
    _, said = run.process.communicate(timeout=LIMIT_S)
    while is_there(run.other):
        assert time.monotonic() - killed < LIMIT_S, "rank 1 outlives rank 0"
        time.sleep(0.05)
    took_s = time.monotonic() - killed
    assert took_s < LIMIT_S
    print(f"{took_s:.1f} s")  # `pytest -rP` shows it.
    if rank:
        assert run.process.returncode == 2, said
        last = said.splitlines()[-1]
        assert last.startswith("error: rank 1 of 2 was ended by SIGKILL"), said
        assert sum(line.startswith("error:") for line in said.splitlines()) == 1, said


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


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
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


@pytest.fixture(scope="module")
def serve(built: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a server on two ranks that finds what was built."""
    source, *options = built
    directory = word_checkpoint(Path(source), tmp_path_factory.mktemp("words"))
    return ["serve", str(directory), "--port=0", "--model-name=tiny", "--frozen", *options]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "is_busy"),
    [
        (1, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((0, True), (0, False), (1, True))
        ),
    ],
)
def test_a_server_ends_with_a_killed_rank(rank: int, is_busy: bool, serve: list[str]) -> None:
    """A request that runs gets an error, if rank 0 is there to tell it."""
    with started(*serve) as run, ExitStack() as stack:
        url = run.wait_for("mtpc serves", in_output=True).split()[-1]
        answer = stack.enter_context(asked(url)) if is_busy else None

        def read() -> None:
            if answer is not None and rank:
                events = answer.read().decode().split("\n\n")
                (error,) = [event for event in events if '"error"' in event]
                assert "rank" in error

        kill(run, rank, read)


@pytest.mark.slow
def test_a_server_ends_with_a_rank_that_hangs(serve: list[str]) -> None:
    """Half a minute after it has stopped, because a step may take long."""
    with started(*serve) as run:
        url = run.wait_for("mtpc serves", in_output=True).split()[-1]
        with asked(url) as answer:
            os.kill(run.other, signal.SIGSTOP)
            assert '"error"' in answer.read().decode()
        _, said = run.process.communicate(timeout=LIMIT_S)
        assert run.process.returncode == 2, said
        assert "start all of them again" in said.splitlines()[-1]
        assert not is_there(run.other)


@contextmanager
def asked(url: str) -> Iterator[HTTPResponse]:
    """A long answer that a server streams, after its first token."""
    fields = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 480, "temperature": 0}
    fields |= {"stream": True, "ignore_eos": True}
    address = urlsplit(url)
    with closing(HTTPConnection(address.hostname, address.port, timeout=60)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(fields), headers)
        with connection.getresponse() as answer:
            assert answer.status == 200
            assert answer.readline().startswith(b"data: ")
            yield answer
