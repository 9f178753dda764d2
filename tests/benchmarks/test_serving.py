"""The serving benchmark: arrivals, what is noted of them, and the figures. Never a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import serving
from benchmarks.harness.arrivals import Arrival, draw_arrivals, serve


def draw(rate: float | None, seed: int = 0) -> list[Arrival]:
    return draw_arrivals(200, rate, (3, 5), (2, 9), 50, seed)


def test_arrivals_are_the_same_for_all() -> None:
    assert draw(10.0) == draw(10.0)
    assert draw(10.0) != draw(10.0, seed=1)
    assert {len(arrival.prompt) for arrival in draw(10.0)} == {3, 5}
    assert {arrival.new_tokens for arrival in draw(10.0)} == {2, 9}
    assert all(0 <= token < 50 for arrival in draw(10.0) for token in arrival.prompt)


def test_rates() -> None:
    """200 exponential gaps of a tenth of a second; or none at all."""
    assert draw(10.0)[-1].at_s == pytest.approx(20, rel=0.3)
    assert {arrival.at_s for arrival in draw(None)} == {0.0}


class TwoATime:
    """Gives every request it holds up to two tokens a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most = 0

    def add(self, name: str, arrival: Arrival) -> None:
        self.left[name] = arrival.new_tokens

    def step(self) -> Iterator[tuple[str, int]]:
        assert self.left, "stepped with nobody waiting"
        self.most = max(self.most, len(self.left))
        for name in list(self.left):
            count = min(2, self.left[name])
            self.left[name] -= count
            if not self.left[name]:
                del self.left[name]
            yield name, count


class Clock:
    """Time that passes while somebody sleeps, and at no other time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_everybody_gets_their_tokens(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.arrivals.time", Clock())
    server = TwoATime()
    arrivals = [Arrival(gap * index, [1], 2 + index) for index in range(5)]
    traces = serve(server, arrivals)
    assert [sum(count for _, count in trace) for trace in traces] == [2, 3, 4, 5, 6]
    assert all(since >= 0 for trace in traces for since, _ in trace)
    assert server.most == (1 if gap else 5)


def test_figures() -> None:
    """By hand: two requests, the second half a second later."""
    traces = [[(1.0, 1), (1.2, 3), (1.6, 1)], [(0.5, 1)]]
    found = serving.figures([0.0, 0.5], {"traces": traces})
    assert found["tokens_per_s"] == pytest.approx(6 / 1.6)
    assert found["ms_per_token_p50"] == pytest.approx(600 / 4)
    assert found["ttft_p50_s"] == pytest.approx(0.75)
    assert serving.gaps_ms(traces[0]) == pytest.approx([200, 400])
    assert serving.ms_per_token(traces[1]) is None
    assert serving.percentile([3.0], 99) == 3.0
    assert serving.percentile([0.0, 10.0], 50) == 5.0


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--backend", "eager", "--requests", "2", "--rates", "50"]
    few = ["--repeats", "1", "--max-foreign", "1", "--spec-tokens", "1", "--batch-buckets", "2"]
    assert serving.main([*arguments, *few, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["load"], row["spec_tokens"]) for row in rows] == [
        ("50 requests/s", 0),
        ("50 requests/s", 1),
        ("burst of 2", 0),
        ("burst of 2", 1),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert all(0 < row["host_gap_share"] < 1 for row in rows)
    assert "TTFT" in capsys.readouterr().out
