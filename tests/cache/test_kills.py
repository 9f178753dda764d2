"""`mtpc build` killed at random moments: never a broken cache, and the next build heals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.compiled import CpuBuilt, give_kernels
from helpers.families import CPU_OPTIONS
from helpers.theorem import PROMPTS
from helpers.warm_starts import option_words

import mtpc
from mtpc.cli.cache import examine
from mtpc.store.entries import EntryStore

KILLS = 50
LONGEST_S = 25.0
"""About what a build of the two steps takes here; some kills come after its end."""


def start_build(checkpoint: Path, cache: Path, inductor: Path) -> subprocess.Popen[bytes]:
    """A build in a session of its own, with Inductor's cache in a place of its own."""
    words = [str(checkpoint), *option_words(), "--out", str(cache), "--jobs", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "mtpc", "build", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(inductor)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.slow
def test_killed_builds_leave_no_damage(
    checkpoint: Callable[..., Path], cpu_built: Callable[..., CpuBuilt], tmp_path: Path
) -> None:
    """After each kill -9 of builder and workers, every entry is whole; in the end all are there."""
    cache = tmp_path / "cache"
    give_kernels(cache)
    cache.chmod(0o755)
    store, moments, unfinished = EntryStore(cache), random.Random(6), 0
    for _ in range(KILLS):
        build = start_build(checkpoint("mimo"), cache, tmp_path / "inductor")
        time.sleep(moments.uniform(0.5, LONGEST_S))
        if build.poll() is None:
            unfinished += 1
            os.killpg(build.pid, signal.SIGKILL)
            build.wait()
        whole = [row.digest for row in examine(store) if row.entry is not None]
        assert whole == store.digests()
        if len(whole) == 3:  # All is built: begin again.
            for digest in whole[:]:
                store.remove(digest)
            give_kernels(cache)
    assert unfinished > KILLS // 4, "most kills came after the end: they tested nothing"
    build = start_build(checkpoint("mimo"), cache, tmp_path / "inductor")
    assert build.wait() == 0
    healed = mtpc.compile(checkpoint("mimo"), **CPU_OPTIONS, cache_dir=cache, frozen=True)
    assert healed.generate(PROMPTS, 8) == cpu_built("mimo").spec.generate(PROMPTS, 8)
