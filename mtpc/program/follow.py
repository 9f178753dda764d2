"""Rank 0 schedules, and the other ranks repeat what it does: its writes of buffers and its replays.

Before each replay, rank 0 sends one message: the step's number, and what the host has written since
the last message. If it has written nothing, the message is the number alone. A message is JSON and
holds numbers only: in place of a buffer's name, it has the buffer's place in a list that all ranks
have. Behind it are the bytes of what is not whole numbers, such as the embeddings of images.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpc.backends.graphs import GraphReplay
from mtpc.errors import LostRankError, RankError, RequestError
from mtpc.layout import StepKey
from mtpc.program.program import Program
from mtpc.ranks.exchanges import step_timeout_s
from mtpc.ranks.group import Ranks
from mtpc.ranks.watch import StepWatch, end_exchanges, leave_devices, watch_steps

_FIRST_BYTES, _LENGTHS = 256, struct.Struct("<2Q")
"""A message of up to so many bytes is one broadcast. A longer one is two. It begins with the
lengths of its JSON and of the bytes behind it."""
_END = -1
"""In place of a step's number: the last message."""


class _Tensors:
    """The tensors that a host writes, by a number that is the same on all ranks."""

    def __init__(self, program: Program):
        self._program = program

    def _all(self) -> list[Tensor]:
        program = self._program
        steps = [
            tensor
            for key in sorted(program.steps)
            for name, tensor in sorted(program.steps[key].buffers.items())
            if name not in program.shared
        ]
        return [*(program.shared[n] for n in sorted(program.shared)), *program.snapshots, *steps]

    def place_of(self, view: Tensor) -> list[Any]:
        """The number of the tensor that a view belongs to, and the view's place in it."""
        memory = view.untyped_storage().data_ptr()
        for number, tensor in enumerate(self._all()):
            if tensor.untyped_storage().data_ptr() == memory:
                return [number, view.storage_offset(), list(view.shape), list(view.stride())]
        raise RankError("a host write is to no buffer of the program; other ranks cannot repeat it")

    def view(self, place: list[Any]) -> Tensor:
        """The view of this rank's tensor at a place."""
        number, offset, shape, stride = place
        return self._all()[number].as_strided(shape, stride, offset)


@dataclass
class LeadingProgram(Program):
    """Rank 0's program. The other ranks repeat all that its host does.

    Attributes:
        ranks: this process among those that share the model.
        sent_bytes: bytes of all messages so far.
        watch: bounds the time of steps on GPUs; None on CPUs.
    """

    ranks: Ranks = field(kw_only=True)
    sent_bytes: int = 0
    watch: StepWatch | None = None
    _events: list[Any] = field(default_factory=list, repr=False)
    _behind: bytearray = field(default_factory=bytearray, repr=False)
    _failure: str = ""

    def write(self, tensor: Tensor, value: Tensor | int) -> None:
        """As `Program.write`; every other rank does the same before its next step."""
        super().write(tensor, value)
        told: Any = value
        if isinstance(value, Tensor) and value.is_floating_point():
            told = {"shape": list(value.shape)}
            self._behind += _bytes_of(value.to(tensor.dtype).contiguous()).tobytes()
        elif isinstance(value, Tensor):
            told = value.tolist()
        self._events.append([_Tensors(self).place_of(tensor), told])

    def copy(self, to: Tensor, source: Tensor) -> None:
        """As `Program.copy`; every other rank does the same before its next step."""
        super().copy(to, source)
        tensors = _Tensors(self)
        self._events.append([tensors.place_of(to), {"from": tensors.place_of(source)}])

    def run(self, key: StepKey) -> Mapping[str, Tensor]:
        """Replay one step on all ranks.

        Raises:
            RankError: another rank has ended; no later step will run.
        """
        if self._failure:
            raise RankError(self._failure)
        try:
            self._send(sorted(self.steps).index(key))
            return _watched_run(self, key)
        except Exception as error:
            self._failure = (
                f"rank 0 of {self.ranks.size}: a step failed, and the ranks are apart now: "
                f"{error}; start all of them again"
            )
            _release(self)
            raise LostRankError(self._failure) from error

    def wait(self, wait: Callable[[], None]) -> None:
        """As `Program.wait`.

        Raises:
            LostRankError: another rank hangs; no later step will run.
        """
        if self.watch is None:
            return super().wait(wait)
        try:
            self.watch.wait(wait)
        except LostRankError as error:
            self._failure = f"{error}; start all ranks again"
            _release(self)
            raise LostRankError(self._failure) from error

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        if not self._failure:
            self._send(_END)
            self._failure = "the program is closed; compile again in every rank"
            _release(self)
            leave_devices(self.ranks)

    def _send(self, number: int) -> None:
        data = json.dumps([number, self._events], separators=(",", ":")).encode()
        sent = bytearray(_LENGTHS.pack(len(data), len(self._behind)) + data + self._behind)
        sent = sent.ljust(_FIRST_BYTES, b"\0")
        self._events, self._behind = [], bytearray()
        for part in torch.frombuffer(sent, dtype=torch.uint8).tensor_split([_FIRST_BYTES]):
            if len(part):
                dist.broadcast(part, group=self.ranks.control, group_src=0)
        self.sent_bytes += len(sent)


@dataclass
class FollowingProgram(Program):
    """The program of a rank other than 0, which `follow` runs."""

    ranks: Ranks = field(kw_only=True)
    watch: StepWatch | None = None

    def write(self, tensor: Tensor, value: Tensor | int) -> None:
        """Do nothing: rank 0's writes come with its next step."""

    def run(self, key: StepKey) -> Mapping[str, Tensor]:
        """Refuse: a step begins in rank 0 only.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"rank {self.ranks.rank} of {self.ranks.size} takes its steps from rank 0; call "
            "SpecModel.follow() here, and generate in rank 0"
        )

    def follow(self) -> None:
        """Run rank 0's steps until it closes its program.

        Raises:
            RankError: rank 0 or another rank has ended.
        """
        keys, tensors = sorted(self.steps), _Tensors(self)
        try:
            while (message := self._receive())[0] != _END:
                number, events, behind = message
                for place, told in events:
                    self._repeat(tensors, place, told, behind)
                _watched_run(self, keys[number])
        except Exception as error:
            _release(self)
            if self.ranks.on_gpus:
                end_exchanges(self.ranks)
            raise LostRankError(
                f"rank {self.ranks.rank} of {self.ranks.size} has lost the others, of which one "
                f"has ended: {error}"
            ) from error
        _release(self)
        leave_devices(self.ranks)

    def _repeat(self, tensors: _Tensors, place: list[Any], told: Any, behind: BytesIO) -> None:
        view = tensors.view(place)
        if isinstance(told, list):
            super().write(view, torch.tensor(told, dtype=view.dtype))
        elif not isinstance(told, dict):
            super().write(view, told)
        elif "from" in told:
            super().copy(view, tensors.view(told["from"]))
        else:
            value = torch.empty(told["shape"], dtype=view.dtype)
            behind.readinto(_bytes_of(value))
            super().write(view, value)

    def _receive(self) -> tuple[int, list[Any], BytesIO]:
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(first, group=self.ranks.control, group_src=0)
        data = first.numpy().tobytes()
        begin, (length, behind) = _LENGTHS.size, _LENGTHS.unpack_from(data)
        missing = begin + length + behind - len(data)
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.uint8)
            dist.broadcast(rest, group=self.ranks.control, group_src=0)
            data += rest.numpy().tobytes()
        number, events = json.loads(data[begin : begin + length])
        return number, events, BytesIO(data[begin + length :])


def _bytes_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, as an array over its memory."""
    return tensor.flatten().view(torch.uint8).numpy()


def _watched_run(program: LeadingProgram | FollowingProgram, key: StepKey) -> Mapping[str, Tensor]:
    """Replay a step; counted when it is launched."""
    buffers = Program.run(program, key)
    if program.watch is not None:
        program.watch.launched += 1
    return buffers


def _release(program: LeadingProgram | FollowingProgram) -> None:
    """Give up a program's graphs: a communicator does not end while graphs use it."""
    if program.watch is not None:
        program.watch.close()
    for step in program.steps.values():
        if isinstance(step.replay, GraphReplay):
            step.replay.release()


def ranked(program: Program, ranks: Ranks) -> Program:
    """A program as one of several ranks runs it."""
    kind = FollowingProgram if ranks.rank else LeadingProgram
    watch = watch_steps(ranks, step_timeout_s())
    return kind(program.steps, program.shared, ranks=ranks, watch=watch)
