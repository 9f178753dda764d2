"""The soak: its traffic does what it is for, and its verdict finds what is wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.harness.tables import Row

PRESSED = {"batch_buckets": (3,), "num_pages": 20, "sampling": True}


@pytest.mark.slow
def test_the_traffic(compiled: Callable[..., Any]) -> None:
    """Everything that is to happen happens, and nothing is left."""
    traffic = soak.Traffic(compiled("mimo", 2, **PRESSED), seed=3)
    records = soak.soak(traffic, 500, 2, lambda text: None)
    last = records[-1]
    assert last["tokens"] >= 500
    for name in ("finished", "aborted", "preemptions", "reused_tokens"):
        assert last[name] > 0, name
    assert all(row["pages_used"] == row["slots_used"] == 0 for row in records)
    assert last["texts_changed"] == 0
    table = soak.table({"rows": records})
    assert [line[0] for line in table.cells] == [str(row["tokens"]) for row in records]


COUNTS = ("pages_used", "slots_used", "texts_compared", "texts_changed")


def record(tokens: int, **changes: Any) -> Row:
    flat = dict(tokens=tokens, rss_mib=500.0, objects=10_000, **dict.fromkeys(COUNTS, 0))
    return {**flat, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"rss_mib": 515.0, "objects": 11_900}, None),
        ({"rss_mib": 517.0}, "grew by 17.0 MiB"),
        ({"objects": 12_001}, "2001 Python objects"),
        ({"pages_used": 1}, "1 pages were held"),
        ({"slots_used": 2}, "2 slots were held"),
        ({"texts_compared": 9, "texts_changed": 1}, "1 of 9 repeated texts"),
    ],
)
def test_the_verdict(changes: dict[str, Any], message: str | None) -> None:
    """What grows during the warm-up does not count; what grows later does."""
    warming = [record(0, rss_mib=100.0, objects=10), record(100)]
    records = [*warming, record(200), record(500, **changes)]
    found = soak.faults(records)
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


@pytest.mark.slow
def test_a_leak_is_seen(compiled: Callable[..., Any]) -> None:
    """An engine whose outputs are kept: the objects say so."""
    kept: list[Any] = []

    class Leaking(soak.Traffic):
        def step(self) -> int:
            kept.extend([self] for _ in range(40))
            return super().step()

    traffic = Leaking(compiled("mimo", 2, **PRESSED), seed=4)
    records = soak.soak(traffic, 600, 3, lambda text: None)
    assert any("Python objects" in fault for fault in soak.faults(records))
    kept.clear()
    gc.collect()
