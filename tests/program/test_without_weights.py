"""Building reads no weight: steps of a checkpoint whose files hold headers and nothing else."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.compiled import CpuBuilt, give_kernels
from helpers.families import CPU_FAMILY_NAMES, CPU_OPTIONS
from helpers.plans import plan_of
from helpers.warm_starts import BATCH, DECODE

import mtpc
from mtpc.backends.package import TAPE
from mtpc.program.build import build
from mtpc.program.step_cache import CONSTANTS, CachedStep, graph_file

WHEN = ("created", "seconds", "source", "history")
"""What a record says of one build."""


@pytest.fixture
def hollow(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """hollow(family): its checkpoint with a hole in the place of every tensor's data."""

    def get(family: str) -> Path:
        directory = Path(shutil.copytree(checkpoint(family), tmp_path / family))
        for path in directory.glob("*.safetensors"):
            size = path.stat().st_size
            with path.open("rb") as file:
                header = file.read(8)
                header += file.read(int.from_bytes(header, "little"))
            path.unlink()
            path.write_bytes(header)
            with path.open("r+b") as file:
                file.truncate(size)
        return directory

    return get


@pytest.mark.parametrize(
    "family",
    [
        CPU_FAMILY_NAMES[0],
        *(pytest.param(n, marks=pytest.mark.slow) for n in CPU_FAMILY_NAMES[1:]),
    ],
)
def test_headers_alone_give_the_same_steps(
    family: str,
    hollow: Callable[[str], Path],
    checkpoint: Callable[..., Path],
    cpu_built: Callable[[str], CpuBuilt],
    tmp_path: Path,
) -> None:
    """As from weights; and whoever has the weights starts from them."""
    cache = tmp_path / "cache"
    give_kernels(cache)
    cache.chmod(0o755)
    wanted = cpu_built(family)
    options = plan_of(**CPU_OPTIONS, cache_dir=cache)
    report = build(hollow(family), (options,), jobs=1)
    found = {built.step.record.step: built.step for built in report.steps}
    assert _content(found[DECODE]) == _content(wanted.compiler.obtain(DECODE))
    spec = mtpc.compile(checkpoint(family), **CPU_OPTIONS, cache_dir=cache, frozen=True)
    assert spec.generate(BATCH, 16) == wanted.spec.generate(BATCH, 16)


def _content(step: CachedStep) -> tuple[object, ...]:
    record = json.loads(step.record.to_json())
    last = graph_file(len(step.record.history), step.record.history[-1].name)
    text = gzip.decompress(step.read(last)).decode()
    files = [step.read(name) for name in (TAPE, CONSTANTS)]
    return {name: value for name, value in record.items() if name not in WHEN}, text, *files
