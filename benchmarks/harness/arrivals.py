"""Requests that arrive over time, and the times of their outputs.

vLLM's process runs this, too, without mtpc, so it uses only the standard library.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

Trace = list[tuple[float, int]]
"""The outputs of one request: seconds since its arrival, and number of tokens."""


@dataclass(frozen=True)
class Arrival:
    """A future request: its arrival (seconds from the start), prompt and number of new tokens."""

    at_s: float
    prompt: list[int]
    new_tokens: int


class Server(Protocol):
    """An engine under load."""

    def add(self, name: str, arrival: Arrival) -> None:
        """Queue a request."""
        ...

    def step(self) -> Iterable[tuple[str, int]]:
        """One iteration; names of requests, and how many new tokens each got."""
        ...


def draw_arrivals(
    count: int,
    rate: float | None,
    prompt_tokens: Sequence[int],
    new_tokens: Sequence[int],
    vocab_size: int,
    seed: int,
) -> list[Arrival]:
    """Requests of mixed lengths, the same ones for every engine.

    Args:
        count: how many.
        rate: requests a second, with exponential gaps between them; None: all at once.
        prompt_tokens: lengths of prompts to choose from.
        new_tokens: lengths of answers to choose from.
        vocab_size: prompts are random ids below it.
        seed: of everything drawn.
    """
    draw, at = random.Random(seed), 0.0
    arrivals = []
    for _ in range(count):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.choice(prompt_tokens))]
        arrivals.append(Arrival(at, prompt, draw.choice(new_tokens)))
        at += draw.expovariate(rate) if rate else 0.0
    return arrivals


def serve(server: Server, arrivals: Sequence[Arrival]) -> list[Trace]:
    """Add requests as they arrive, run until all are complete, and record the times of outputs."""
    traces: dict[str, Trace] = {str(index): [] for index in range(len(arrivals))}
    wanted = sum(arrival.new_tokens for arrival in arrivals)
    start, added, seen = time.perf_counter(), 0, 0
    while seen < wanted:
        now = time.perf_counter() - start
        while added < len(arrivals) and arrivals[added].at_s <= now:
            server.add(str(added), arrivals[added])
            added += 1
        if seen == sum(arrival.new_tokens for arrival in arrivals[:added]):
            time.sleep(max(arrivals[added].at_s - now, 0.0))  # Nobody waits.
            continue
        for name, count in server.step():
            since = time.perf_counter() - start - arrivals[int(name)].at_s
            if count:
                traces[name].append((since, count))
                seen += count
    return list(traces.values())
