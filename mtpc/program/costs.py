"""What the steps of a program cost on this machine, kept in the graph cache for later runs."""

from __future__ import annotations

from collections import Counter

import torch

from mtpc.errors import CacheError
from mtpc.program.step_cache import StepCache
from mtpc.store.key import digest
from mtpc.store.lookup import find, keep
from mtpc.store.machine import cpu_name

COSTS = "costs.json"


class CostEntry:
    """The costs of one program's steps on this machine.

    Args:
        cache: holds the steps. If it is frozen, nothing is written.
    """

    def __init__(self, cache: StepCache):
        self._store, self._frozen = cache.store, cache.plan.frozen
        machine = {"machine.cpu": cpu_name(), "machine.threads": str(torch.get_num_threads())}
        self._fields = {**cache.program, **machine, "kind": "costs"}

    def read(self, notes: Counter[str]) -> bytes | None:
        """The costs; None if there are none, or if they are damaged, which `notes` then counts."""
        try:
            entry = find(self._store, self._fields)
            return None if entry is None else entry.read(COSTS)
        except CacheError as error:
            notes[f"costs of earlier runs were not used: {error}"] += 1
            return None

    def write(self, data: bytes, notes: Counter[str]) -> None:
        """Keep costs in place of the earlier ones; `notes` counts why that failed."""
        if self._frozen:
            return
        try:
            with self._store.lock(digest(self._fields), lambda line: None):
                keep(self._store, self._fields, {COSTS: data})
        except CacheError as error:
            notes[f"costs of steps were not kept: {error}"] += 1
