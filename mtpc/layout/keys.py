"""Keys of steps: the shape, the phase and the number of drafts that select a captured step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mtpc.errors import GraphError
from mtpc.plan import Plan

Phase = Literal["decode", "prefill"]
Part = Literal["step", "verify", "propose"]
"""The whole step, or one half of a split step."""
Form = Literal["split", "fused", "both"]
"""Each step as `verify` and `propose`, as one graph, or as both."""


@dataclass(frozen=True, order=True)
class Bucket:
    """A captured shape: `num_reqs` rows of at most `query_len` tokens each."""

    num_reqs: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.query_len


@dataclass(frozen=True, order=True)
class StepKey:
    """What selects a captured step: its shape, its number of drafts, and its phase.

    A decode step has query_len == spec_tokens + 1 tokens in every row (the last emitted token
    and the drafts to verify), or a budget of num_reqs * query_len tokens for all rows together. A
    prefill step packs up to num_reqs * query_len tokens, of prompts and of requests that decode.
    """

    phase: Phase
    bucket: Bucket
    spec_tokens: int

    def __post_init__(self) -> None:
        if self.phase == "decode" and not 1 <= self.bucket.query_len <= self.spec_tokens + 1:
            raise GraphError(
                f"decode step with query_len {self.bucket.query_len} and spec_tokens "
                f"{self.spec_tokens}; query_len must be at most spec_tokens + 1"
            )

    @classmethod
    def decode(cls, num_reqs: int, spec_tokens: int, budget: int | None = None) -> StepKey:
        """A decode step of R requests with K drafts, and `budget` rows a request, on average. None
        is K + 1, which each request has."""
        return cls("decode", Bucket(num_reqs, budget or spec_tokens + 1), spec_tokens)

    @classmethod
    def prefill(cls, num_reqs: int, chunk: int, spec_tokens: int) -> StepKey:
        return cls("prefill", Bucket(num_reqs, chunk), spec_tokens)

    @property
    def max_emitted(self) -> int:
        """Tokens that the step can emit of a request."""
        return self.spec_tokens + 1

    @property
    def num_logits(self) -> int:
        """Rows of logits: the last one of a prompt, and all rows of a decoding request."""
        if self.phase == "decode":
            return self.bucket.num_tokens
        return self.bucket.num_reqs * self.max_emitted

    def __str__(self) -> str:
        b = self.bucket
        return f"{self.phase}[R={b.num_reqs},Q={b.query_len},K={self.spec_tokens}]"


def step_name(key: StepKey, part: Part) -> str:
    """What to call a step, or a half of one, in messages and file names."""
    return str(key) if part == "step" else f"{key}.{part}"


def step_keys(plan: Plan) -> tuple[StepKey, ...]:
    """The steps of a plan: a decode step per bucket, tier and budget, and a prefill step."""
    decode = tuple(
        StepKey.decode(num_reqs, *shape) for shape in plan.shapes for num_reqs in plan.batch_buckets
    )
    return (*decode, StepKey.prefill(*plan.prefill_shape, plan.spec_tokens))


def parts_of(key: StepKey, form: Form) -> tuple[Part, ...]:
    """The graphs of one step. A step without drafts is one graph in every form."""
    if form == "fused" or key.spec_tokens == 0:
        return ("step",)
    return ("verify", "propose") if form == "split" else ("step", "verify", "propose")


Graphs = Sequence[tuple[StepKey, Part]]
"""Steps, or halves of them."""


def graph_keys(plan: Plan, form: Form) -> list[tuple[StepKey, Part]]:
    """Every graph of a plan, those of the largest steps first.

    A device's memory pool then fits the largest step, and the others reuse it.
    """
    return [(key, part) for key in largest_first(step_keys(plan)) for part in parts_of(key, form)]


def largest_first(keys: Iterable[StepKey]) -> list[StepKey]:
    """The order to compile in: what takes longest, and most memory, comes first."""
    return sorted(keys, key=lambda key: key.bucket.num_tokens, reverse=True)
