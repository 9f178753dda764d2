"""Code objects that were compiled elsewhere, used on the device.

`mtpc build --target` leaves them in the graph cache. Here they are handed to Triton through its own
cache (`triton.runtime.cache`): an entry holds Triton's record of the kernel and the hash that
Triton files it under, so that launching finds it and no compiler runs. Whether a launch has an
entry is decided when a step is bound to kernels; what has none is compiled here, and noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx
from triton.runtime.cache import get_cache_manager

from mtpc.backends.bindings import Binding, Limits
from mtpc.backends.targets import TARGETS, Target
from mtpc.backends.triton_kernels import kernel_table, load_kernels
from mtpc.backends.triton_kernels.crosscompile import KIND, METADATA, Specialisation
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.plans import node_launches
from mtpc.cache.key import digest
from mtpc.cache.lookup import key_of, peek
from mtpc.cache.store import Entry, EntryStore
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of
from mtpc.errors import CacheError, DamagedEntryError


@dataclass
class CodeObjects:
    """The cache's code objects for one device.

    Attributes:
        store: the graph cache.
        target: the device.
        seeded: digests of the entries that Triton has been given.
    """

    store: EntryStore
    target: Target
    seeded: set[str] = field(default_factory=set)

    def seed(self, launches: Iterable[Launch]) -> str | None:
        """Give Triton what the cache has for some launches.

        Returns:
            Why one of them will be compiled instead; None where none will.
        """
        for launch in launches:
            wanted = Specialisation.of(launch, self.target)
            name = digest(wanted.fields)
            if name in self.seeded:
                continue
            try:
                entry = self.store.read(name)
                if entry is None:
                    return f"{launch.name} was not built for {self.target.name} at these sizes"
                key_of(entry)
                _hand_over(entry, self.target)
            except (DamagedEntryError, CacheError) as error:
                return f"{launch.name}: {error}"
            self.seeded.add(name)
        return None


def _hand_over(entry: Entry, target: Target) -> None:
    """Put an entry into Triton's cache, under the hash that Triton will look for.

    Raises:
        DamagedEntryError: it was changed, or its record is not Triton's.
    """
    record, code = entry.read(METADATA), entry.read(f"kernel.{target.binary}")
    try:
        known = json.loads(record)
        key, name = known["hash"], known["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedEntryError(f"{entry.directory / METADATA} is no record: {error}") from error
    manager = get_cache_manager(key)
    if manager.get_group(f"{name}.json") is None:
        files = {f"{name}.{target.binary}": code, f"{name}.json": record}
        group = {file: manager.put(data, file) for file, data in files.items()}
        manager.put_group(f"{name}.json", group)


def loaded_bindings(store: EntryStore | None, target: Target | None) -> tuple[Binding, ...]:
    """A candidate for each operator, which takes calls whose kernels are all in the cache.

    None where the cache holds nothing for this device: then nobody expects to find any.

    Raises:
        BackendError: there is no Triton.
    """
    if store is None or target is None:
        return ()
    if not any(f.get("kind") == KIND and f.get("target") == target.name for _, f in peek(store)):
        return ()
    load_kernels()
    from mtpc.backends.triton_kernels.limits import refuses

    refuses_here = _limits(CodeObjects(store, target), refuses)
    library = f"code built for {target.name}"
    return tuple(
        Binding(library, reference, op, refuses_here)
        for reference, op in kernel_table("mtpc_loaded").items()
    )


def _limits(objects: CodeObjects, kernel_limits: Limits) -> Limits:
    def refuse(node: fx.Node, graph: StepGraph) -> str | None:
        reason = kernel_limits(node, graph)
        if reason is not None:
            return reason
        with fake_mode_of(graph.graph):
            return objects.seed(node_launches(node))

    return refuse


def device_target() -> Target | None:
    """The row of this process's device, or None where the table has none."""
    from triton.runtime import driver

    found = driver.active.get_current_target()
    return TARGETS.get(f"{found.backend}:{found.arch}")
