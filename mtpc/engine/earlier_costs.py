"""Costs of steps from one run to the next, as JSON in an entry of the graph cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from mtpc.engine.costs import EarlierCosts, Place
from mtpc.engine.tiers import TierPolicy
from mtpc.program.program import Program

_MOST_S = 1e4
"""A record with a longer step is damaged, and is not used."""
Cells = Mapping[Place, EarlierCosts]


def read_costs(program: Program, notes: Counter[str]) -> Cells:
    """What an earlier run measured; `notes` counts why it cannot be used."""
    data = program.costs.read(notes) if program.costs is not None else None
    try:
        return from_json(data) if data is not None else {}
    except ValueError as error:
        notes[f"costs of earlier runs were not used: {error}"] += 1
        return {}


def write_costs(program: Program, policy: TierPolicy, notes: Counter[str]) -> None:
    """Keep what a policy measured for later runs; `notes` counts why that failed."""
    if program.costs is not None and policy.steps:
        program.costs.write(to_json(policy.costs()), notes)


def to_json(cells: Cells) -> bytes:
    """The costs of all cells as text."""
    rows = [[*place, *map(list, (c.seconds.items(), c.measured))] for place, c in cells.items()]
    return json.dumps(rows).encode()


def from_json(data: bytes) -> Cells:
    """The reverse of `to_json`.

    Raises:
        ValueError: the text is anything else.
    """
    try:
        cells = {
            (int(num_reqs), int(length)): EarlierCosts(
                {int(k): float(time) for k, time in seconds}, frozenset(map(int, measured))
            )
            for num_reqs, length, seconds, measured in json.loads(data)
        }
        if not all(0 < s < _MOST_S for found in cells.values() for s in found.seconds.values()):
            raise ValueError("a time is out of range")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"no costs of steps: {error}") from None
    return cells
