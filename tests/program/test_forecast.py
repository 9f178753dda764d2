"""How far a build is: by the records of earlier builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.compiled import give_kernels
from helpers.families import CPU_OPTIONS

import mtpc
from mtpc.layout import StepKey
from mtpc.program import forecast
from mtpc.program.forecast import Forecast

ONE, TWO = (1, StepKey.prefill(1, 8, 1), "step"), (1, StepKey.decode(1, 1), "step")
SECONDS = {"lower": 1.0, "rewrite": 2.0, "trace": 7.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now[0])
    return now


def test_a_build_that_goes_as_the_last_one(clock: list[float]) -> None:
    expected = Forecast({ONE: SECONDS, TWO: {**SECONDS, "trace": 1.0}})
    assert expected.now() == (0.0, 14.0)
    for graph, stage, seconds, share in (
        (ONE, "trace", 0, 0.0),
        (ONE, "trace model", 0, 0.0),
        (ONE, "rewrite", 7, 0.5),
        (ONE, "lower", 9, 9 / 14),
        (TWO, "trace", 9, 9 / 14),  # The last one ends before its end is said.
    ):
        clock[0] = 100.0 + seconds
        expected.begins(graph, stage)
        assert expected.now() == (pytest.approx(share), pytest.approx(14 - seconds))
    expected.finished(ONE)
    expected.finished(TWO)
    assert expected.now() == (1.0, 0.0)


def test_a_slower_machine_is_noticed(clock: list[float]) -> None:
    """Twice as slow: at the half, the rest is expected between its old time and twice that."""
    expected = Forecast({ONE: SECONDS}, workers=1)
    clock[0] += 14.0
    expected.begins(ONE, "rewrite")
    share, left = expected.now()
    assert share == pytest.approx(0.7)
    assert 3.0 < left < 6.0


def test_workers_share_the_time() -> None:
    assert Forecast({ONE: SECONDS, TWO: SECONDS}, workers=2).now()[1] == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize(
    "expected",
    [{}, {ONE: SECONDS, TWO: {}}, {ONE: {"trace": float("nan"), "lower": float("inf")}}],
)
def test_nothing_is_said_where_a_step_has_no_record(expected: object) -> None:
    known = Forecast(expected)
    known.begins(ONE, "rewrite")
    known.finished(ONE)
    assert known.now() == (None, None)


def test_the_nearest_entry_says_how_long_it_takes(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty cache knows nothing; the next build, of other options, is forecast to its end."""
    options = {**CPU_OPTIONS, "cache_dir": tmp_path / "cache", "spec_tokens": 0}
    tmp_path.chmod(0o755)
    give_kernels(tmp_path / "cache")
    heard: list[mtpc.Progress] = []
    mtpc.compile(checkpoint("mimo"), heard.append, **options)
    building = [p for p in heard if p.stage in ("trace", "rewrite", "lower")]
    assert len(building) == 6
    assert {p.fraction for p in building} == {None}
    heard.clear()
    monkeypatch.setattr("mtpc.program.program._TELL_S", -1.0)
    mtpc.compile(checkpoint("mimo"), heard.append, **{**options, "spec_tokens": 1})
    building = [p for p in heard if p.stage in ("trace", "rewrite", "lower")]
    shares = [p.fraction for p in building]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert 0.8 < shares[-1] < 1.0
    assert all(p.left_s > 0 for p in building)
    loading = [p for p in heard if p.stage == "load"]
    shares = [p.fraction for p in loading]
    assert len(loading) > 10, "one for each weight, as often as is asked for"
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == pytest.approx(1.0)
    assert all(p.left_s is not None for p in loading[2:])
