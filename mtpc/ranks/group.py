"""The ranks that share a model: this process among them, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import mtpc
from mtpc.backends.peer_memory import MOST_BYTES
from mtpc.errors import LostRankError, OptionError, RankError
from mtpc.ranks.exchanges import join_devices, kind_of_device
from mtpc.store.sources import source_fields

T = TypeVar("T")
DEFAULT_GROUP = "0"
"""torch's name of the default process group."""
_IDLE = timedelta(days=365)
"""How long a rank waits for rank 0's next step. If a rank ends, its connections close at once."""


@dataclass(frozen=True)
class _Failed:
    """What a rank tells that cannot go on."""

    reason: str


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: of this process, from 0; rank 0 schedules.
        size: how many there are.
        group: name of the process group of the steps' collectives.
        control: the group on which rank 0 tells the others what to do; None without others.
        on_gpus: whether the steps exchange values on GPUs.
        peer_bytes: the largest part that a kernel exchanges through the memory of GPUs; 0: none.
        apart: on GPUs: why none does; "" if one does.
    """

    rank: int
    size: int
    group: str = DEFAULT_GROUP
    control: Any = field(default=None, repr=False)
    on_gpus: bool = False
    peer_bytes: int = 0
    apart: str = ""

    @property
    def part(self) -> str:
        """Whose part of the steps this is, in the cache's keys."""
        return f"rank {self.rank} of {self.size} in group {self.group!r}"

    @property
    def place(self) -> Ranks:
        """A copy without the process group, for another process that builds for this rank."""
        return replace(self, control=None)

    def compare(self, program: Mapping[str, str]) -> None:
        """Check that all ranks have the same program, versions and kind of device.

        Args:
            program: facts of the model and the options, by name.

        Raises:
            RankError: a rank differs; the message says which, and in what.
        """
        facts = {"mtpc": mtpc.__version__, "torch": torch.__version__, **source_fields(), **program}
        if self.on_gpus:
            facts["device"] = kind_of_device()
        for rank, other in enumerate(self.tell_all(facts)):
            names = [name for name, value in other.items() if facts.get(name) != value]
            if names:
                name = names[0]
                raise RankError(
                    f"rank {rank} of {self.size} has {name} {other[name]!r}, and rank {self.rank} "
                    f"has {facts.get(name)!r}; expected the same on every rank"
                )

    def all_succeed(self, make: Callable[[], T]) -> T:
        """What `make` gives, if it succeeds on every rank.

        Raises:
            Exception: what `make` raises here.
            RankError: another rank failed; the message says which, and why.
        """
        try:
            made = make()
        except RankError:
            raise  # All ranks know, as each has told or heard it.
        except Exception as error:
            with suppress(RankError):  # The reason here is this rank's own.
                self.tell_all(_Failed(f"{type(error).__name__}: {error}"))
            raise
        self.tell_all(None)
        return made

    def tell_all(self, told: T) -> list[T]:
        """What each rank tells all others, in the order of the ranks; every rank calls this.

        Raises:
            RankError: a rank has failed since the last call, and tells that instead.
            LostRankError: another rank has ended.
        """
        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, told, group=self.control)
        except Exception as error:
            raise LostRankError(
                f"rank {self.rank} of {self.size} has lost the others before the first step: one "
                f"has ended: {error}"
            ) from error
        for rank, other in enumerate(every):
            if isinstance(other, _Failed):
                raise RankError(f"rank {rank} of {self.size} failed: {other.reason}")
        return every

    def meet(self) -> None:
        """Wait for all ranks, however long each of them compiles.

        Raises:
            RankError: as `tell_all`.
        """
        if self.control is not None:
            self.tell_all(None)


def all_parts(size: int) -> tuple[Ranks | None, ...]:
    """The ranks of a default process group of that size; (None,) if one process has everything."""
    return tuple(Ranks(rank, size) for rank in range(size)) if size > 1 else (None,)


def join_ranks(size: int, on_gpus: bool = False) -> Ranks:
    """This process's place in the default process group, which the host has made.

    Args:
        size: how many ranks there must be.
        on_gpus: whether steps run on GPUs, one for each rank. They then exchange values in a group
            of their own; see `join_devices`.

    Raises:
        RankError: another rank has no GPU for itself, or torch there lacks NCCL.
        BackendError: the same of this rank.
        OptionError: there is no process group, or it has another number of ranks.
    """
    ready = dist.is_available() and dist.is_initialized()
    found = dist.get_world_size() if ready else 0
    if found != size:
        what = f"a process group of {found} ranks" if ready else "no process group"
        raise OptionError(
            f"tensor_parallel_size is {size} with {what}; expected one of {size} ranks: call "
            "torch.distributed.init_process_group in every rank, or use "
            f"mtpc run --tensor-parallel-size {size}"
        )
    assert dist.group.WORLD is not None
    control = dist.new_group(backend="gloo", timeout=_IDLE)
    ranks = Ranks(dist.get_rank(), size, dist.group.WORLD.group_name, control)
    if not on_gpus:
        return ranks
    group, apart = join_devices(ranks)
    peer_bytes = 0 if apart else MOST_BYTES
    return replace(ranks, group=group, on_gpus=True, peer_bytes=peer_bytes, apart=apart)
