"""The ranks that share a model: this process among them, and what they agree on at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import mtpc
from mtpc.config import CompileOptions
from mtpc.errors import MtpcError, OptionError, RankError
from mtpc.program.model_key import checkpoint_fields
from mtpc.weights.checkpoint import Checkpoint

T = TypeVar("T")
_IDLE = timedelta(days=365)
"""How long a rank waits for rank 0's next step. One that ends closes its connections at once."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: of this process, from 0; rank 0 schedules.
        size: how many there are.
        group: name of the process group of the steps' collectives.
        control: the group on which rank 0 tells the others what to do; None without others.
    """

    rank: int
    size: int
    group: str
    control: Any = field(default=None, repr=False)

    def agree(self, make: Callable[[], T], source: Any, options: CompileOptions) -> T:
        """What `make` gives, if all ranks succeed, with the same model, options and versions.

        Raises:
            MtpcError: what `make` raises here.
            RankError: another rank failed or differs; the message says which, and how.
        """
        failure, made = None, None
        try:
            made = make()
            told: dict[str, Any] = {"facts": _facts(source, options)}
        except MtpcError as error:
            failure, told = error, {"error": f"{type(error).__name__}: {error}"}
        every = self._tell_all(told)
        if failure is not None:
            raise failure
        assert made is not None
        for rank, other in enumerate(every):
            if "error" in other:
                raise RankError(f"rank {rank} of {self.size} failed: {other['error']}")
            facts = other["facts"].items()
            differing = [n for n, value in facts if told["facts"].get(n) != value]
            if differing:
                name = differing[0]
                raise RankError(
                    f"rank {rank} of {self.size} has {name} {other['facts'][name]!r}, and rank "
                    f"{self.rank} has {told['facts'].get(name)!r}; expected the same on every rank"
                )
        return made

    def _tell_all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, told, group=self.control)
        except Exception as error:
            raise RankError(
                f"rank {self.rank} of {self.size} has lost the others before the first step: one "
                f"has ended: {error}"
            ) from error
        return every


def join_ranks(size: int) -> Ranks:
    """This process's place in the default process group, which the host has made.

    Raises:
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
    return Ranks(dist.get_rank(), size, dist.group.WORLD.group_name, control)


def _facts(source: Any, options: CompileOptions) -> dict[str, str]:
    """What must be the same on every rank."""
    model = checkpoint_fields(source) if isinstance(source, Checkpoint) else {}
    versions = {"mtpc": mtpc.__version__, "torch": torch.__version__}
    return {**versions, **{n: str(v) for n, v in model.items()}, "options": repr(options)}
