"""Ways to run one launch: threads, stages and tile sizes of the kernels that have a choice.

The first of a launch's configurations is the default, which its op was written with. The others
change one or two things of it. No configuration changes what is computed, how scratch memory is
laid out, or the number of splits of a context. Sums may be added in another order, as they may
between two buckets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mtpc.backends.triton_kernels.launch import EARLY, Change, Launch, vendor_here
from mtpc.errors import BackendError


@dataclass(frozen=True)
class Config:
    """One way to run a launch.

    Attributes:
        threads: in a program.
        num_stages: depth of software pipelining.
        sizes: values of `constexpr` parameters.
        amd: options of Triton's compiler for AMD.
    """

    threads: int
    num_stages: int
    sizes: tuple[tuple[str, int], ...] = ()
    amd: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        own = (("threads", self.threads), ("num_stages", self.num_stages))
        words = (*own, *self.sizes, *self.amd)
        return ",".join(f"{name}={value}" for name, value in words)


BATCH_INVARIANT = "batch_invariant"
"""The argument `configs` of a call whose rows must not depend on how many rows there are. Kernels
then run by default, in tiles and splits that follow from weights and from the longest context."""
_LEAST = 16
"""The least tile size of an operand of a product."""
_PART = re.compile(r"(\w+):((?:\w+=\d+,?)+)")


def configs_of(launch: Launch, vendor: str) -> tuple[Config, ...]:
    """The default of a launch, then its other configurations on a vendor's devices."""
    choice = launch.choice
    names = sorted({name for change in choice.changes for name in change.factors})
    found: dict[Config, None] = {}
    for change in (Change(), *choice.changes):
        if change.amd and vendor != "hip":
            continue
        sizes = {name: int(launch.values[name] * change.factors.get(name, 1)) for name in names}
        if all(sizes[name] >= _LEAST for name in change.factors):
            threads = change.threads or launch.threads
            stages = change.num_stages or launch.num_stages
            found[Config(threads, stages, tuple(sizes.items()), tuple(change.amd.items()))] = None
    return tuple(found)


def configured(launch: Launch, config: Config) -> Launch:
    """A launch in another of its configurations."""
    grid, values = list(launch.grid), {**launch.values, **dict(config.sizes)}
    for size, (axis, extent) in launch.choice.axes.items() if config.sizes else ():
        grid[axis] = -(-values[extent] // values[size])
    return replace(
        launch,
        grid=(grid[0], grid[1], grid[2]),
        values=values,
        threads=config.threads,
        num_stages=config.num_stages,
        amd=dict(config.amd),
    )


def all_configured(launches: Iterable[Launch], vendor: str) -> list[tuple[Launch, bool]]:
    """Every launch in every configuration that a vendor's devices have, and whether it is the
    default."""
    return [
        (configured(launch, config), index == 0)
        for launch in launches
        for index, config in enumerate(configs_of(launch, vendor))
    ]


def apply_configs(launches: list[Launch], configs: str) -> list[Launch]:
    """An op's launches as its argument `configs` says: "KERNEL:NAME=VALUE,...;KERNEL:...;early".

    Kernels that it does not name run by default. With "early", launches may begin early.

    Raises:
        BackendError: it names a kernel that is not launched, or a configuration that it lacks.
    """
    if not configs:
        return launches
    words = configs.split(";")
    if EARLY in words:
        words.remove(EARLY)
        launches = [replace(launch, early=True) for launch in launches]
    parts = [_PART.fullmatch(word) for word in words]
    wanted = {part[1]: part[2] for part in parts if part}
    unknown = wanted.keys() - {launch.name for launch in launches}
    if unknown or not all(parts):
        raise BackendError(
            f"configurations {configs!r}; expected KERNEL:NAME=VALUE,... of "
            f"{', '.join(launch.name for launch in launches)}, parted by ';'"
        )
    return [_by_name(launch, wanted.get(launch.name)) for launch in launches]


def _by_name(launch: Launch, name: str | None) -> Launch:
    if name is None:
        return launch
    known = {str(config): config for config in configs_of(launch, vendor_here())}
    if name not in known:
        raise BackendError(
            f"{launch.name} has no configuration {name!r} at these sizes; it has "
            f"{', '.join(map(repr, known))}"
        )
    return configured(launch, known[name])
