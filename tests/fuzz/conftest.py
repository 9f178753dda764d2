"""How long the fuzz tests run: seconds by default, two minutes each in the slow suite, or as asked.

pytest -n 0 tests/fuzz --hours 1                 all of them together take an hour
MTPC_FUZZ_SEED=42 pytest tests/fuzz -k http      that seed alone
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hours", type=float, help="hours of all fuzz tests together")


@pytest.fixture(params=[1, pytest.param(120, marks=pytest.mark.slow)], ids=["short", "long"])
def chances(request: pytest.FixtureRequest) -> Callable[[], Iterator[random.Random]]:
    """chances(): random numbers of the seeds 0, 1, ... until the time of this test is over."""
    hours, seed = request.config.getoption("hours", None), os.environ.get("MTPC_FUZZ_SEED")
    tests = [
        test for test in request.session.items if "chances" in getattr(test, "fixturenames", ())
    ]
    seconds = request.param if hours is None else hours * 3600 / len(tests)

    def get() -> Iterator[random.Random]:
        if seed is not None:
            yield Seeded(int(seed))
            return
        end, number = time.monotonic() + seconds, 0
        while number < 60 or time.monotonic() < end:
            yield Seeded(number)
            number += 1
        print(f"{number} seeds")  # `pytest -rP` shows it.

    return get


class Seeded(random.Random):
    """Random numbers that know their seed, so that a failure can be repeated."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.number = seed

    def __repr__(self) -> str:
        return f"MTPC_FUZZ_SEED={self.number}"
