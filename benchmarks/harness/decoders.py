"""Decoders: mtpc and other engines behind one call that returns the time of decode steps only.

Prefill is not included: mtpc's engine counts it separately, and for transformers the time between
iterations is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import mtpc
from mtpc.engine.stats import DecodeCounts

Prompts = Sequence[list[int]]
Turn = tuple[float, list[int], int]
"""Seconds to the first token, the tokens, and the number of reused prompt tokens."""


@dataclass(frozen=True)
class Decoded:
    """Decode steps of one batch.

    Attributes:
        steps: how many.
        tokens: what they emitted, all requests together.
        seconds: what they took.
        acceptance_rate: accepted over verified drafts; None where nothing was drafted.
        child_cpu_s: CPU seconds that a process of the decoder's own used, prefill included.
    """

    steps: int
    tokens: int
    seconds: float
    acceptance_rate: float | None
    child_cpu_s: float = 0.0

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.seconds / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Decoder:
    """One engine with one number of drafts.

    Attributes:
        engine: its name.
        spec_tokens: drafts a step.
        build_s: seconds it took to make ready.
        launches: how often it has been started.
        largest_batch: the most requests it decodes at a time; None: any number.
        stays_warm: whether a sample leaves the engine warm for the next one.
    """

    engine: str
    spec_tokens: int
    build_s = 0.0
    launches = 1
    largest_batch: int | None = None
    stays_warm = True

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """Continue prompts greedily, by exactly `new_tokens` each."""
        raise NotImplementedError

    def prefill(self, prompts: Prompts) -> Decoded:
        """First new tokens, one prompt after another; a step is a prompt, tokens are of prompts."""
        start = time.perf_counter()
        for prompt in prompts:
            self.first_token(prompt)
        seconds = time.perf_counter() - start
        return Decoded(len(prompts), sum(map(len, prompts)), seconds, None)

    def first_token(self, prompt: list[int]) -> object:
        """A prompt's first new token; for `prefill`."""
        raise NotImplementedError

    def turn(self, prompt: list[int], new_tokens: int) -> Turn:
        """Answer a prompt greedily, by exactly `new_tokens`, with what is known of it."""
        raise NotImplementedError

    def renew(self) -> bool:
        """Before another round, restart if that is wanted; returns whether it did."""
        return False

    def close(self) -> None:
        """Free what is not freed with the object."""


@contextmanager
def opened(decoders: Iterable[Decoder]) -> Iterator[list[Decoder]]:
    """Decoders that are closed in the end, also where a later one does not start."""
    with ExitStack() as closing:
        found = list[Decoder]()
        for decoder in decoders:
            closing.callback(decoder.close)
            found.append(decoder)
        yield found


class MtpcDecoder(Decoder):
    """A `SpecModel`; step times are the engine's own.

    Counted are steps of the whole batch: who is prefilled first decodes beside the others' prompts,
    and where drafts are accepted unevenly requests end at different steps.
    """

    def __init__(self, model: mtpc.SpecModel, build_s: float, engine: str = "mtpc") -> None:
        self.model, self.build_s, self.engine = model, build_s, engine
        self.spec_tokens = model.options.spec_tokens

    @classmethod
    def compile(cls, source: Any, engine: str = "mtpc", **options: Any) -> Self:
        """Of a model that is compiled now, with options of `mtpc.compile`."""
        start = time.perf_counter()
        model = mtpc.compile(source, **options)
        return cls(model, time.perf_counter() - start, engine)

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        engine, steps = self.model.engine, list[DecodeCounts]()
        for prompt in prompts:
            engine.add(prompt, new_tokens)
        while engine.has_work:
            before, running = self.model.stats.decode_counts(), list(engine.running)
            is_whole = len(running) == len(prompts) and all(r.is_prefilled for r in running)
            engine.step()
            if is_whole:
                steps.append(self.model.stats.decode_counts() - before)
        if not steps:
            raise RuntimeError(
                f"no decode step had all {len(prompts)} requests: the first were done after "
                f"{new_tokens} tokens, before the last one began; decode more tokens, or let "
                "prompts share a larger prefill_chunk"
            )
        accepted, drafted = sum(s.accepted for s in steps), sum(s.drafted for s in steps)
        return Decoded(
            steps=len(steps),
            tokens=sum(s.tokens for s in steps),
            seconds=sum(s.seconds for s in steps),
            acceptance_rate=accepted / drafted if drafted else None,
        )

    def first_token(self, prompt: list[int]) -> None:
        self.model.engine.add(prompt, 1)
        while self.model.engine.has_work:
            self.model.engine.step()

    def turn(self, prompt: list[int], new_tokens: int) -> Turn:
        before = self.model.stats.reused_tokens
        answer = self.model.generate(prompt, new_tokens, ignore_eos=True)
        return answer.first_token_s, list(answer), self.model.stats.reused_tokens - before


class TransformersDecoder(Decoder):
    """transformers' `generate`, with `use_mtp=True` where it drafts (one token: one MTP layer).

    Loading the MTP layer, which `generate` repeats in every call, is not counted.

    Args:
        model: a causal LM whose config has no end-of-sequence id.
        spec_tokens: 0 or 1.
    """

    engine = "transformers"

    def __init__(self, model: Any, spec_tokens: int) -> None:
        self.model, self.spec_tokens = model, spec_tokens
        self.largest_batch = 1 if spec_tokens else None  # transformers drafts for one request.

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        clock = _StepClock()
        more = {"use_mtp": True} if self.spec_tokens else {}
        self._generate(prompts, new_tokens, stopping_criteria=StoppingCriteriaList([clock]), **more)
        # The first interval holds the draft's prefill, the last one drafts beyond the limit.
        (begin, before), *ticks = clock.ticks[1:-1]
        steps, (end, after) = len(ticks), ticks[-1]
        rate = ((after - before) / steps - 1) / self.spec_tokens if self.spec_tokens else None
        return Decoded(steps, (after - before) * len(prompts), end - begin, rate)

    def first_token(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def _generate(self, prompts: Prompts, count: int, **more: Any) -> None:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        self.model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **more)


@dataclass
class _StepClock(StoppingCriteria):
    """Never stops anything; notes the time and the sequence length after every iteration."""

    ticks: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.ticks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
