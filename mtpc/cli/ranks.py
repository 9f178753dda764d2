"""The ranks of a command: rank 0 starts the other processes, watches them, and ends with them.

    rank 0: mtpc run .. --tensor-parallel-size 2       | torchrun --nproc-per-node 2 -m mtpc run ..
    rank 1: a child of rank 0 with the same arguments  | both are torchrun's, which watches them

The other ranks run the same command. They print nothing, and run the steps that rank 0 runs. If a
parent ends, for whatever reason, the system ends its children.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from mtpc.environment import launched_ranks
from mtpc.errors import LostRankError, RankError
from mtpc.program.processes import end_with_parent

if TYPE_CHECKING:
    import mtpc

SHARING = ("run", "serve", "bench")
"""Commands whose ranks run together; `mtpc build` builds the parts of all ranks by itself."""
STEP_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for another one within a step, before it assumes that the other hangs. The
end of a rank is noticed at once, because its connections close."""
_POLL_S, _GRACE_S, _END_S = 0.1, 1.0, 5.0
"""Seconds between two checks of the children; until rank 0 must have noticed the end of a child by
itself; and until a process must have ended after SIGTERM."""
_HOST = "127.0.0.1"


@contextmanager
def ranks_of(args: argparse.Namespace, argv: Sequence[str]) -> Iterator[None]:
    """If the command has several ranks, make this process one of them within the block. Under
    torchrun, `tensor_parallel_size` becomes the number of its processes.

    Raises:
        RankError: another rank has ended.
    """
    rank, launched = launched_ranks()
    if args.command in SHARING and args.tensor_parallel_size is None and launched > 1:
        args.tensor_parallel_size = launched
    size = (args.command in SHARING and args.tensor_parallel_size) or 1
    if size < 2:
        yield
        return
    import torch.distributed as dist

    with ExitStack() as stack:
        if launched > 1:
            stack.enter_context(_silent_losses(rank))
            dist.init_process_group("gloo", timeout=STEP_TIMEOUT)
        elif not dist.is_initialized():  # A child has joined the process group already.
            stack.enter_context(_children(size, argv))
        stack.callback(_leave)
        if dist.get_rank():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def _leave() -> None:
    """Leave all process groups. If a lost rank holds that up, this process ends without it."""
    import torch.distributed as dist

    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(_END_S)
    if leaving.is_alive():
        atexit.register(_end_at_once)


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


@contextmanager
def _silent_losses(rank: int) -> Iterator[None]:
    """End without a message if another rank fails, because that one and rank 0 report it."""
    try:
        yield
    except RankError:
        if rank:
            raise SystemExit(2) from None
        raise


def is_other() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_rank() > 0


def follow(model: mtpc.SpecModel) -> bool:
    """In a rank other than 0, run what rank 0 runs until it closes its model. Returns whether this
    is such a rank.

    Raises:
        RankError: rank 0, or another rank, has ended.
    """
    from mtpc.program.follow import FollowingProgram

    if isinstance(model.program, FollowingProgram):
        model.follow()
        return True
    return False


@dataclass
class _Child:
    """A process of another rank, and the file with its stderr."""

    rank: int
    process: subprocess.Popen[bytes]
    said: IO[bytes]

    @property
    def is_lost(self) -> bool:
        return self.process.poll() not in (None, 0)

    def last_line(self) -> str:
        self.said.seek(0)
        lines = [line.strip() for line in self.said.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")


@dataclass
class _Watch:
    """Ends this process, rank 0, if a child has ended before its work was done.

    Usually rank 0 notices that itself, in its next step. If it does not, because it waits for
    something else, it gets SIGTERM. If that does not end it either, this class ends the process.
    """

    children: list[_Child]
    closed: threading.Event = field(default_factory=threading.Event)
    is_lost: bool = False

    def run(self) -> None:
        """Watch the children until the block ends."""
        while not self.closed.wait(_POLL_S):
            if not any(child.is_lost for child in self.children):
                continue
            if self.closed.wait(_GRACE_S):
                return
            self.is_lost = True
            os.kill(os.getpid(), signal.SIGTERM)
            if not self.closed.wait(_END_S):
                print("error:", self.reason(), file=sys.stderr, flush=True)
                for child in self.children:
                    child.process.kill()
                os._exit(2)

    def reason(self) -> str:
        """A message with the rank that was lost, and how; "" if none was."""
        until = time.monotonic() + _GRACE_S
        while not (ended := [child for child in self.children if child.is_lost]):
            if time.monotonic() > until:
                return ""
            time.sleep(_POLL_S)
        # The rank that ended first may have ended because of another, so killed ranks come first.
        first = min(ended, key=lambda child: (child.process.returncode > 0, child.rank))
        status, line = first.process.returncode, first.last_line()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "has ended"
        said = f": {line.removeprefix('error: ')}" if line and status >= 0 else ""
        return f"rank {first.rank} of {len(self.children) + 1} {how}{said}; all ranks have ended"


@contextmanager
def _children(size: int, argv: Sequence[str]) -> Iterator[None]:
    """Start the other ranks, and form a process group with them; this process is rank 0."""
    import torch.distributed as dist

    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    start = f"from {__name__} import work; work(*sys.argv[1:])"
    code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
    command = [sys.executable, "-c", code, str(os.getpid()), str(store.port), str(size)]
    children: list[_Child] = []
    watch = _Watch(children)
    try:
        for rank in range(1, size):
            said = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the child has ended)
            process = subprocess.Popen(
                [*command, str(rank), *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # Ctrl-C is rank 0's, which ends the others.
            )
            children.append(_Child(rank, process, said))
        threading.Thread(target=watch.run, name="mtpc-ranks", daemon=True).start()
        while not store.check([_ready(rank) for rank in range(1, size)]):
            time.sleep(_POLL_S)
        _join(store, 0, size)
        yield
        if watch.is_lost:  # A server ends without an error after the SIGTERM.
            raise LostRankError("another rank has ended")
        _wait(children)
    except BaseException as error:
        is_lost = watch.is_lost or isinstance(error, LostRankError)
        reason = watch.reason() if is_lost else ""
        if reason:
            raise RankError(reason) from error
        raise
    finally:
        watch.closed.set()
        for child in children:
            child.process.terminate()
        _wait(children)
        for child in children:
            child.process.kill()
            child.process.wait()
            child.said.close()


def _wait(children: list[_Child]) -> None:
    """Give children time to end by themselves."""
    until = time.monotonic() + _GRACE_S
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, until - time.monotonic()))


def _ready(rank: int) -> str:
    """The store's key that a rank sets when it is ready, because joining waits only for seconds."""
    return f"mtpc/{rank}"


def work(parent: str, port: str, size: str, rank: str, *argv: str) -> None:
    """The whole life of a child of the process `parent`, with the command line `argv`. Rank 0's
    store listens at `port`."""
    end_with_parent()
    if os.getppid() != int(parent):  # It ended before the system was told to watch it.
        sys.exit(1)
    import torch.distributed as dist

    from mtpc.cli.main import main

    store = dist.TCPStore(_HOST, int(port), is_master=False)
    store.set(_ready(int(rank)), "")
    _join(store, int(rank), int(size))
    sys.exit(main(argv))


def _join(store: Any, rank: int, size: int) -> None:
    """Enter the default process group; all ranks do so within seconds of each other."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)
