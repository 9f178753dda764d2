"""The plan: all that is compiled and run follows from it, and nothing in it is open.

CompileOptions (what the user said) + Facts (the checkpoint's headers, the device) -> `make_plan`
-> Plan. What the device tells later, as the pages that fit, is a further fact: `Plan.given`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpc.config import CompileOptions
from mtpc.environment import cache_directory
from mtpc.errors import CheckpointError, OptionError
from mtpc.option_checks import AUTO, COPY, OWN, check_int, drafters_of
from mtpc.wiring import Rules

DEFAULT_MAX_LEN = 4096
LEAST_ROWS = 8
"""The least number of rows of a prefill step if kernels skip unused rows. All programs of up to so
many requests then share one prefill step."""
SHARING_PROMPTS = 4
"""A prefill step may have this many rows even if fewer requests could decode in it."""
DEFAULT_PREFILL_CHUNK = 64
"""Tokens of a prefill step if unused tokens cost as much as used ones; and prompt tokens of a
prefill step that decoding requests join."""
LARGE_PREFILL_CHUNK = 512
"""Tokens of a prefill step if kernels skip unused tokens; larger steps gain nothing
(docs/performance.md). Also on GPUs, where smaller steps are bound by reading the weights."""
SKIP_IDLE_ROWS = "skip-idle-rows"
"""The name of the pass on which the default of `prefill_chunk` depends. It is defined here, because
this module must not import the passes, which import torch."""
ANY_DTYPE = "any"
NO_LIMIT = sys.maxsize
"""The positions of a model that has no limit."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan follows from in addition to options.

    Attributes:
        backend: the backend that runs, or the first to be tried.
        is_gpu: whether it runs on GPUs.
        skips_idle_rows: whether its kernels leave out unused rows of a prefill step.
        invariant_dtype: the dtype in which it can be batch-invariant: one, `ANY_DTYPE`, or "".
        dtype: of the stored weights; "" if it is not known.
        max_positions: how far the angles of the model reach; `NO_LIMIT` if they have none, or if
            that is not known yet: the model knows, and so does the record of each built step.
        without_drafts: why nothing drafts for the model; "" if something does.
        draft_vocab: tokens that the drafter was trained for, ascending; () if it names none.
        must_draft: whether the caller cannot decode plainly instead, as a host.
        num_pages: pages that the device has memory for; 0 if nobody has counted.
        takes_snapshots: whether requests leave snapshots of state that is not in pages.
        begins_plain: whether K = 0 serves while steps of another K are built.
    """

    backend: str = AUTO
    is_gpu: bool = False
    skips_idle_rows: bool = False
    invariant_dtype: str = ANY_DTYPE
    dtype: str = ""
    max_positions: int = NO_LIMIT
    without_drafts: str = ""
    draft_vocab: tuple[int, ...] = ()
    must_draft: bool = False
    num_pages: int = 0
    takes_snapshots: bool = True
    begins_plain: bool = False


NO_FACTS = Facts()


@dataclass(frozen=True, kw_only=True)
class Plan(CompileOptions):
    """Options with every question answered; `make_plan` makes them. "" is what None is in options.

    Attributes:
        spec_tokens: the largest K.
        spec_tiers: the values of K that the engine chooses from, ascending; () if K is one number.
        draft: as the option, if there are drafts.
        asked: the options.
        facts: what else it follows from.
        notes: what differs from the options, with the reasons.
    """

    spec_tokens: int = field()
    spec_tiers: tuple[int, ...] = field()
    row_budgets: tuple[int, ...] = field()
    batch_buckets: tuple[int, ...] = field()
    max_len: int = field()
    num_pages: int = field()
    prefill_chunk: int = field()
    busy_prefill_chunk: int = field()
    prefill_rows: int = field()
    kv_offload_dir: str = field()
    async_scheduling: bool = field()
    dtype: str = field()
    quantize: str = field()
    synthetic_acceptance_rates: tuple[float, ...] = field()
    synthetic_acceptance_length: str = field(default="", init=False)
    token_mask: bool = field()
    disabled_passes: tuple[str, ...] = field()
    enabled_passes: tuple[str, ...] = field()
    hidden_state_layers: tuple[int, ...] = field()
    draft_vocab: tuple[int, ...] = field()
    draft: str = field()
    wiring: Rules = field()
    cache_dir: Path = field()
    require_sha256: str = field()
    asked: CompileOptions = field(repr=False)
    facts: Facts = field(repr=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Nothing is checked: the values come from `CompileOptions.settled`."""

    def of_model(self, max_positions: int | None) -> Plan:
        """The plan for a model that was read; None is one without a limit of positions."""
        return self.given(max_positions=NO_LIMIT if max_positions is None else max_positions)

    def given(self, **facts: Any) -> Plan:
        """The plan of the same options with further facts."""
        known = replace(self.facts, **facts)
        return self if known == self.facts else make_plan(self.asked, known)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of drafts that have decode steps, ascending."""
        return self.spec_tiers or (self.spec_tokens,)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The decode steps of a bucket: K, and the rows a request; most rows come last."""
        fitting = ((k, [b for b in self.row_budgets if b <= k + 1]) for k in self.tiers)
        return tuple((k, b) for k, budgets in fitting for b in (k and budgets) or (k + 1,))

    @property
    def copies(self) -> bool:
        """Whether drafts may be copies of a request's own text (`mtpc.step.copying`)."""
        return drafters_of(self.draft)[0]

    @property
    def drafter(self) -> str:
        """The drafter's checkpoint; "" if it has none."""
        _, other = drafters_of(self.draft)
        return "" if other == OWN else other

    @property
    def layer_drafts(self) -> int:
        """The most drafts of MTP layers, or of another drafter with weights."""
        return self.spec_tokens if drafters_of(self.draft)[1] else 0

    @property
    def packs_drafts(self) -> bool:
        """Whether a decode step has rows for those drafts alone that exist: many requests have no
        copy, and kernels leave out the rows that this saves."""
        skips = self.facts.skips_idle_rows and SKIP_IDLE_ROWS not in self.disabled_passes
        return skips and self.copies and not self.layer_drafts

    @property
    def prefill_shape(self) -> tuple[int, int]:
        """(rows, tokens per row) of the prefill step; one prompt may take all tokens."""
        return self.prefill_rows, self.prefill_chunk // self.prefill_rows

    def blocks_per_request(self, num_tokens: int) -> int:
        """Number of pages for a sequence of `num_tokens`, with room for drafts at its end."""
        return _blocks(num_tokens, self.spec_tokens, self.page_size)


def make_plan(asked: CompileOptions, facts: Facts = NO_FACTS) -> Plan:
    """The one place where options are settled.

    Raises:
        OptionError: a value does not suit another one, the model or the backend.
        CheckpointError: nothing drafts for the model, and K is given, or `strict` is set.
    """
    note, drafting = "", asked
    copies, other = drafters_of(asked.draft)
    if facts.without_drafts and other == OWN and asked.spec_tokens != 0:
        if asked.strict or (not copies and (asked.spec_tokens is not None or facts.must_draft)):
            raise CheckpointError(
                f"{facts.without_drafts}; or use spec_tokens=0 to decode without drafts"
            )
        note = f"{'copies alone draft' if copies else 'no drafts, K = 0'}: {facts.without_drafts}"
        drafting = replace(asked, draft=COPY) if copies else replace(asked, spec_tokens=0)
    said = drafting.settled()
    if facts.begins_plain and not said["spec_tiers"]:
        said["spec_tiers"] = (0, said["spec_tokens"])
    said |= _backend(said, facts)
    said |= _prefill(said, facts)
    max_len = longest(said["max_len"], facts.max_positions)
    blocks = _blocks(max_len, said["spec_tokens"], said["page_size"])
    enough = max(said["batch_buckets"]) * blocks + 1
    said["max_len"], said["num_pages"] = max_len, facts.num_pages or said["num_pages"] or enough
    loses = facts.takes_snapshots or said["kv_offload_dir"] or said["tensor_parallel_size"] > 1
    if said["async_scheduling"] is None:
        said["async_scheduling"] = facts.is_gpu and not loses
    if not said["sampling"]:
        said["max_logprobs"] = 0
    drafter = said["draft"] if said["spec_tokens"] else None
    if said["spec_tokens"]:
        said["draft_vocab"] = said["draft_vocab"] or facts.draft_vocab
    said |= {"draft": drafter, "cache_dir": said["cache_dir"] or cache_directory()}
    for name in ("kv_offload_dir", "draft"):
        said[name] = str(said[name]) if said[name] is not None else ""
    for name in ("dtype", "quantize", "require_sha256"):
        said[name] = said[name] or ""
    return Plan(**said, asked=asked, facts=facts, notes=(note,) if note else ())


def longest(max_len: int | None, max_positions: int = NO_LIMIT) -> int:
    """`max_len` as a number.

    Raises:
        OptionError: it exceeds the model's positions.
    """
    if max_len is None:
        return min(DEFAULT_MAX_LEN, max_positions)
    if max_len > max_positions:
        raise OptionError(
            f"max_len is {max_len}; the model was made for at most {max_positions} positions "
            "(max_position_embeddings and rope_scaling); lower it, or scale by yarn"
        )
    return max_len


def _blocks(num_tokens: int, spec_tokens: int, page_size: int) -> int:
    return math.ceil((num_tokens + 2 * spec_tokens) / page_size)


def _backend(said: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """The backend where the model's device decides it, or batch invariance.

    Steps that are batch-invariant anyway need no option, but no other backend may run.
    """
    name = facts.backend if said["backend"] == AUTO else said["backend"]
    if not said["batch_invariant"] or facts.invariant_dtype == ANY_DTYPE:
        return {"backend": name} if facts.is_gpu else {}
    if not facts.invariant_dtype:
        raise no_invariance(said["backend"])
    dtype = said["dtype"] or facts.dtype
    if dtype != facts.invariant_dtype:
        raise OptionError(
            f"batch_invariant is True with dtype {dtype!r} on the {name} backend, whose steps are "
            f"batch-invariant in {facts.invariant_dtype} only; change one of them"
        )
    return {"backend": name, "batch_invariant": False}


def no_invariance(name: str) -> OptionError:
    """The error for a backend that is never batch-invariant."""
    return OptionError(
        f"batch_invariant is True with backend {name!r}, whose products are PyTorch's; expected "
        "'cuda' or 'cpu'"
    )


def _prefill(said: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Sizes of the prefill step.

    It is large on GPUs, where a step costs the same however many of its rows are used, and where
    kernels skip unused rows.
    """
    skips = facts.skips_idle_rows and SKIP_IDLE_ROWS not in said["disabled_passes"]
    skips = skips and (said["dtype"] or facts.dtype) == "bfloat16"
    usual = LARGE_PREFILL_CHUNK if facts.is_gpu or skips else DEFAULT_PREFILL_CHUNK
    chunk: int = said["prefill_chunk"] or usual
    busy = chunk if facts.is_gpu else min(chunk, DEFAULT_PREFILL_CHUNK)
    if said["busy_prefill_chunk"] is not None:
        busy = said["busy_prefill_chunk"]
        check_int("busy_prefill_chunk", busy, 1, chunk)
    rows = said["prefill_rows"]
    if rows is None:
        largest = max(*said["batch_buckets"], LEAST_ROWS if skips else 1)
        rows = _prefill_rows(chunk, largest, said["spec_tokens"])
    check_int("prefill_rows", rows, 1, chunk)
    if chunk % rows:
        raise OptionError(
            f"prefill_rows is {rows}, which does not divide prefill_chunk {chunk}; expected a "
            "divisor: change one of them"
        )
    return {"prefill_chunk": chunk, "busy_prefill_chunk": busy, "prefill_rows": rows}


def _prefill_rows(tokens: int, largest: int, spec_tokens: int) -> int:
    """Requests that share a prefill step of so many tokens: a divisor of them.

    The target is the largest bucket, but not more than the requests that could decode in the step,
    or `SHARING_PROMPTS` if those are fewer. The smallest divisor from the target to less than twice
    the target is taken; if there is none, the largest below.
    """
    most = min(largest, max(tokens // (spec_tokens + 1), SHARING_PROMPTS))
    divisors = [rows for rows in range(1, tokens + 1) if tokens % rows == 0]
    enough = [rows for rows in divisors if most <= rows < 2 * most]
    fewer = max(rows for rows in divisors if rows <= most)
    return min(enough, default=fewer)
