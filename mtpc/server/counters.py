"""The server's own counts, in Prometheus' text format, with vLLM's metric names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from mtpc.engine.metrics import PREFIX, Sample, metric_lines

# Bucket bounds from vLLM (vllm/v1/metrics/loggers.py), without the largest ones.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
                  10, 20, 40, 80, 160)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Histogram:
    """A Prometheus histogram: counts of values by upper bound, ascending. An infinite one
    follows."""

    def __init__(self, name: str, description: str, bounds: tuple[float, ...]):
        self._name, self._description, self._bounds = name, description, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        name, total = f"{PREFIX}{self._name}", 0
        yield f"# HELP {name} {self._description}"
        yield f"# TYPE {name} histogram"
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServerCounters:
    """Counts since the server started.

    Attributes:
        responses: responses by path and status code.
        disconnects: clients that disconnected before the end of their answer.
        first_token_s: seconds from a request's arrival to its first output; `request_s`: to its
            end.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.disconnects = 0
        self.first_token_s = Histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first text.",
            _FIRST_TOKEN_S,
        )
        self.request_s = Histogram(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end.",
            _REQUEST_S,
        )

    def prometheus(self, is_ready: bool, in_flight: int) -> str:
        """All counts in Prometheus' text format. `in_flight` choices run or wait."""
        responses: list[Sample] = [
            ({"path": path, "status": status}, count)
            for (path, status), count in sorted(self.responses.items())
        ]
        left, lines = float(self.disconnects), list[str]()
        for metric in (
            ("gauge", "server_ready", "1 while the server accepts requests.", float(is_ready)),
            ("gauge", "server_choices_in_flight", "Choices that run or wait.", float(in_flight)),
            ("counter", "http_responses_total", "Responses, by path and status code.", responses),
            ("counter", "http_disconnects_total", "Clients that disconnected early.", left),
        ):
            lines += metric_lines(*metric)
        lines += [*self.first_token_s.lines(), *self.request_s.lines()]
        return "\n".join(lines) + "\n"
