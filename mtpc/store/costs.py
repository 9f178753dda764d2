"""What the steps of a program cost on this machine, kept in the graph cache for later runs."""

from __future__ import annotations

from collections import Counter

import torch

from mtpc.errors import CacheError
from mtpc.store.entries import EntryStore
from mtpc.store.key import Fields, digest
from mtpc.store.lookup import find, keep
from mtpc.store.machine import cpu_name

COSTS = "costs.json"


class CostEntry:
    """The costs of one program's steps on this machine.

    Args:
        store: the graph cache.
        program: the program's fields in the keys of its steps.
        frozen: whether nothing is written.
    """

    def __init__(self, store: EntryStore, program: Fields, frozen: bool):
        self._store, self._frozen = store, frozen
        machine = {"machine.cpu": cpu_name(), "machine.threads": str(torch.get_num_threads())}
        self._fields = {**program, **machine, "kind": "costs"}

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
