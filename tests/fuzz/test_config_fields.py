"""Each field of each family's config.json, with values that it cannot have.

Either the model loads, or one error names the file and the field.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.families import ASSISTED, DRAFTED, EVERY_FAMILY
from helpers.tiny import drafter, make_checkpoint

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.load import load

VALUES: tuple[Any, ...] = (None, "x", [1], -1, 2**40, {"a": 1}, [], {})
"""No field may be most of these. Numbers that another model has lead to errors about tensors."""
OF_TENSORS = ("tensor(s) of the target", "the checkpoint's tensor")
SOME = ("mimo",)
FAMILIES = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.slow)
    for name in (*EVERY_FAMILY, *DRAFTED, *ASSISTED)
]


def fields(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all entries."""
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from fields(value, (*path, name))


def edited(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = part = copy.deepcopy(config)
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return changed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field(family: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    make_checkpoint(family, directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    every, faults = {name for path in fields(config) for name in path}, []
    for path in fields(config):
        for value in VALUES:
            file.write_text(json.dumps(edited(config, path, value)))
            said = refusal(directory)
            if said is not None and not is_clear(every if value is None else path, said, directory):
                faults.append(f"{'.'.join(path)} = {value!r}: {said}")
    assert not faults, "\n".join(faults)


def refusal(directory: Path) -> str | None:
    """What is said of a checkpoint that does not load."""
    try:
        load(directory, None, needs_mtp=True, headers_only=True, **drafter(directory))
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error)
    return None


def is_clear(names: Iterable[str], said: str, directory: Path) -> bool:
    """Whether the file is named, and an entry or one that it is in.

    A null may be missed elsewhere: then another entry is named. Where a model can be built, the
    error may be about the tensors that it lacks.
    """
    rest = said.replace(str(directory), "")
    is_named = any(name in rest for name in (*names, *OF_TENSORS))
    return is_named and str(directory) in said and "config.json" in said
