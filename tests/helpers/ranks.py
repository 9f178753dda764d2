"""Ranks that share tiny models: this process is rank 0, and children are the others.

As a script it is another rank: it compiles what rank 0 says, and follows until rank 0 closes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mtpc
from mtpc.errors import MtpcError
from mtpc.layout import PROMPT_EMBEDS


@dataclass
class Group:
    """The ranks, from the side of rank 0.

    Attributes:
        size: number of ranks.
        model: the open model, which the other ranks follow.
        told: what they were told to compile.
    """

    size: int
    model: mtpc.SpecModel | None = None
    told: list[Any] = field(default_factory=list)

    def compile(
        self, checkpoint: Path, other: Path | None = None, noise: float = 0.0, **options: Any
    ) -> mtpc.SpecModel:
        """Compile a model on all ranks, unless the open one is it.

        Args:
            checkpoint: its directory.
            other: another directory for the other ranks.
            noise: error to add to the final norm of the other ranks.
            **options: options of `mtpc.compile`.
        """
        given = {"tensor_parallel_size": self.size, "backend": "eager", **options}
        told = [str(other or checkpoint), given, noise]
        if self.model is not None and told == self.told:
            return self.model
        self.close()
        self.told = told
        dist.broadcast_object_list(told[:], 0)
        self.model = mtpc.compile(checkpoint, **given)
        return self.model

    def close(self) -> list[Any]:
        """Close the open model; returns the final state of each rank."""
        model, self.model = self.model, None
        if model is None:
            return []
        model.close()
        return states(model, self.size)


def states(model: mtpc.SpecModel, size: int) -> list[Any]:
    """Tokens and lengths of each rank, the bytes of its images' rows, and its pages of codes."""
    rows = [
        t.view(torch.uint8) for name, t in model.program.shared.items() if name == PROMPT_EMBEDS
    ]
    shared = [model.program.shared[f"state.{name}"] for name in ("token_ids", "committed_lens")]
    results = [
        model.program.steps[key].buffers["batch.out_token_ids"]
        for key in sorted(model.program.steps)
    ]
    every: list[Any] = [None] * size
    own = [tensor.tolist() for tensor in (*shared, *rows, *results, *codes_of(model))]
    dist.all_gather_object(every, own)
    return every


def codes_of(model: mtpc.SpecModel) -> list[torch.Tensor]:
    """Pages of codes and their scales, [pages, P, heads, ...], as float32."""
    scales = [name for name in model.program.shared if name.endswith("_scale")]
    names = [name for scale in scales for name in (scale.removesuffix("_scale"), scale)]
    return [model.program.shared[name].float() for name in names]


def memory_shared_by(pid: int) -> int:
    """The number of unnamed files of /dev/shm that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(re.findall(r" /dev/shm/#\d+ \(deleted\)$", maps, re.MULTILINE))


def join(store: str, rank: int, size: int) -> None:
    """Join the process group through a file store."""
    wait = timedelta(seconds=120)
    address = f"file://{store}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=wait)


@contextmanager
def group_of(size: int, directory: Path) -> Iterator[Group]:
    """Children as ranks 1 and up, which end with the block."""
    store = str(directory / "store")
    command = [sys.executable, __file__, store, str(size)]
    others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, size)]
    try:
        join(store, 0, size)
        group = Group(size)
        yield group
        group.close()
        dist.broadcast_object_list([None, None, None], 0)
        assert [child.wait(120) for child in others] == [0] * (size - 1)
    finally:
        for child in others:
            child.kill()
            child.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def main(store: str, size: str, rank: str) -> None:
    """Serve as one of the other ranks."""
    torch.set_num_threads(1)
    join(store, int(rank), int(size))
    while True:
        told: list[Any] = [None, None, None]
        dist.broadcast_object_list(told, 0)
        directory, options, noise = told
        if directory is None:
            dist.destroy_process_group()  # Gloo's threads must not outlive the interpreter.
            return
        try:
            model = mtpc.compile(directory, **options)
        except MtpcError:
            continue  # Rank 0 raises the same error, or one that names this rank.
        for step in model.program.steps.values() if noise else ():
            assert step.graph is not None, "steps of a cache have no weights to disturb"
            norm = step.graph.weights["model.norm.weight"]
            norm.data = norm * (1 + noise * torch.linspace(-1, 1, len(norm), dtype=norm.dtype))
        model.follow()
        states(model, int(size))


if __name__ == "__main__":
    main(*sys.argv[1:])
