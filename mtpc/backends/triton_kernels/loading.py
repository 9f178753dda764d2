"""Code objects that were compiled elsewhere, used on the device.

`mtpc build --target` writes them to the graph cache. This module hands them to Triton through
Triton's own cache (`triton.runtime.cache`). An entry holds Triton's record of the kernel and the
hash under which Triton files it, so a launch finds it and no compiler runs. When a step is bound to
kernels, each launch without an entry is noted, and compiled here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx
from triton.runtime.cache import get_cache_manager

from mtpc.backends.bindings import Binding, Configure, Limits, by_default
from mtpc.backends.targets import Target
from mtpc.backends.triton_kernels import kernel_bindings, refuses
from mtpc.backends.triton_kernels.crosscompile import (
    KIND,
    METADATA,
    Specialisation,
    compiler_fields,
)
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.plans import node_launches
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of
from mtpc.errors import CacheError, DamagedEntryError
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import differences, digest
from mtpc.store.lookup import find, peek


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
                entry = find(self.store, wanted.fields)
                if entry is None:
                    return f"{launch.name} was not built for {self.target.name} at these sizes"
                _hand_over(entry, wanted)
            except (DamagedEntryError, CacheError) as error:
                return f"{launch.name}: {error}"
            self.seeded.add(name)
        return None

    def has_any(self) -> bool:
        """Whether anything was built for this device, by any Triton."""
        return bool(_built(self.store, self.target))


def _built(store: EntryStore, target: Target) -> list[dict[str, str]]:
    """The keys of all entries for a target."""
    wanted = (KIND, target.name)
    found = (fields for _, fields in peek(store))
    return [fields for fields in found if (fields.get("kind"), fields.get("target")) == wanted]


def _hand_over(entry: Entry, wanted: Specialisation) -> None:
    """Put an entry into Triton's cache, under the hash that Triton will look for.

    Raises:
        DamagedEntryError: it was changed, or its record is not Triton's, or another Triton's.
    """
    file = f"kernel.{wanted.target.binary}"
    record, code = entry.read(METADATA), entry.read(file)
    try:
        known = json.loads(record)
        found, name = known["hash"], known["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedEntryError(f"{entry.directory / METADATA} is no record: {error}") from error
    key = wanted.triton_hash()
    if found != key:
        raise DamagedEntryError(
            f"{entry.directory / METADATA} says that Triton files {name} under {found[:12]}, and "
            f"this one looks for {key[:12]}: the code is another Triton's; remove the entry"
        )
    manager = get_cache_manager(key)
    if manager.get_group(f"{name}.json") is None:
        files = {f"{name}.{wanted.target.binary}": code, f"{name}.json": record}
        group = {file: manager.put(data, file) for file, data in files.items()}
        manager.put_group(f"{name}.json", group)


def built_by_another(store: EntryStore, target: Target) -> str | None:
    """A note if the cache's code for a target was built by other Tritons only; else None."""
    here, built = compiler_fields(target), _built(store, target)
    if not built or any(here.items() <= fields.items() for fields in built):
        return None
    other = {name: built[0].get(name, "") for name in here}
    unlike = "; ".join(map(str, differences(other, here)))
    return (
        f"the cache's code is another Triton's ({unlike}); build it with this one, of the same "
        "wheel and Python"
    )


def loaded_bindings(
    objects: CodeObjects | None, configure: Configure = by_default
) -> tuple[Binding, ...]:
    """A candidate for each operator, which takes calls whose kernels are all in the cache.

    There are no candidates if the cache holds nothing for this device.

    Args:
        objects: the cache's code objects; None: there is no cache, or the device is unknown.
        configure: chooses how each is run.

    Raises:
        BackendError: there is no Triton.
    """
    if objects is None or not objects.has_any():
        return ()
    library = f"code built for {objects.target.name}"
    return kernel_bindings("mtpc_loaded", _limits(objects, configure), configure, library)


def _limits(objects: CodeObjects, configure: Configure) -> Limits:
    foreign = built_by_another(objects.store, objects.target)

    def refuse(node: fx.Node, graph: StepGraph) -> str | None:
        reason = refuses(node, graph) or foreign
        if reason is not None:
            return reason
        configs, _ = configure(node, graph)
        with fake_mode_of(graph.graph):
            return objects.seed(node_launches(node, configs))

    return refuse
