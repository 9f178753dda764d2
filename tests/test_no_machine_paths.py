"""No file of the repository carries a path of the machine that made it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATH_OF_A_MACHINE = re.compile(rb"(?<![\w.*-])/(work|root|tmp|home|farm)/[\w.*-]")
"""A path from the root of a file system; `ROOT/tmp/entry` and `cache/tmp` are none."""


def found(content: bytes) -> list[str]:
    """Such paths in a file, each with what stands around it."""
    matches = PATH_OF_A_MACHINE.finditer(content)
    return [
        content[max(m.start() - 20, 0) : m.end() + 20].decode(errors="replace") for m in matches
    ]


def test_no_file_has_one() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    assert len(names) > 100
    faults = {name: paths for name in names if (paths := found((ROOT / name).read_bytes()))}
    assert not faults, "record the model's name, not where it was"


@pytest.mark.parametrize("text", ["{}model/config.json", '"out": "{}bench"', "after, {}main/demo"])
@pytest.mark.parametrize("folder", ["work", "root", "tmp", "home", "farm"])
def test_a_path_is_found(text: str, folder: str) -> None:
    assert found(text.format(f"/{folder}/").encode())


@pytest.mark.parametrize("text", ["ROOT/tmp/entry", 'glob("cache/tmp/*")', "/tmp", "and/or work/"])
def test_what_is_no_path_of_a_machine(text: str) -> None:
    assert not found(text.encode())
