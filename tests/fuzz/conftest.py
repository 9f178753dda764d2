"""How long the fuzz tests run: seconds by default, minutes in the slow suite, or as long as asked.

`MTPC_FUZZ_HOURS=1` gives each test an hour, `MTPC_FUZZ_SEED=42` runs that seed alone.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(params=[6, pytest.param(600, marks=pytest.mark.slow)], ids=["short", "long"])
def chances(request: pytest.FixtureRequest) -> Callable[[], Iterator[random.Random]]:
    """chances(): random numbers of the seeds 0, 1, ... until the time of this test is over."""
    hours, seed = os.environ.get("MTPC_FUZZ_HOURS"), os.environ.get("MTPC_FUZZ_SEED")

    def get() -> Iterator[random.Random]:
        if seed is not None:
            yield Seeded(int(seed))
            return
        end = time.monotonic() + (float(hours) * 3600 if hours else request.param)
        number = 0
        while number < 20 or time.monotonic() < end:
            yield Seeded(number)
            number += 1

    return get


class Seeded(random.Random):
    """Random numbers that know their seed, so that a failure can be repeated."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.number = seed

    def __repr__(self) -> str:
        return f"MTPC_FUZZ_SEED={self.number}"
