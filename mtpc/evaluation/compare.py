"""What several engines made of one task, side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from mtpc.engine.stats import DraftCounts
from mtpc.evaluation.engines import AnsweringEngine, MtpcEngine
from mtpc.evaluation.tasks import Question


@dataclass
class Outcome:
    """What one engine made of a task.

    Attributes:
        engine: its name.
        spec_tokens: K; None: not mtpc.
        texts: one for each question.
        scores: of each question, 1 where it is right.
        seconds: of answering, compilation left out.
        accepted: accepted drafts by position.
        drafted: verified drafts by position.
        more: what a harness says beyond this.
    """

    engine: str
    spec_tokens: int | None
    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


@contextmanager
def measured(engine: AnsweringEngine) -> Iterator[Outcome]:
    """An outcome to fill in; its time and drafts are those of the block."""
    outcome = Outcome(engine.name, engine.spec_tokens)
    model = engine.model if isinstance(engine, MtpcEngine) else None
    before = model.stats.drafts if model is not None else DraftCounts([], [])
    start = time.perf_counter()
    yield outcome
    outcome.seconds = time.perf_counter() - start
    if model is not None:
        found = model.stats.drafts - before
        outcome.accepted, outcome.drafted = found.accepted, found.drafted


def answer_questions(
    engine: AnsweringEngine,
    questions: Sequence[Question],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> Outcome:
    """Answer a task of a file."""
    with measured(engine) as outcome:
        stops = [question.stop for question in questions]
        outcome.texts = engine.answer(prompts, [max_new_tokens] * len(prompts), stops)
    pairs = zip(questions, outcome.texts, strict=True)
    outcome.scores = [float(question.is_right(text)) for question, text in pairs]
    return outcome


@dataclass(frozen=True)
class Row:
    """An outcome beside the first one.

    Attributes:
        engine: its name.
        spec_tokens: K; None: not mtpc.
        questions: how many.
        score: mean score, which for a task of a file is the share of exact matches.
        gained: questions with a higher score than in the first row.
        lost: questions with a lower one.
        difference: of mean scores from the first row.
        difference_error: its standard error, from the questions' own differences.
        texts_changed: texts that differ from the first row's.
        texts_changed_from_plain: from those of K = 0 of the same engine; None: there is no such.
        acceptance_by_position: accepted drafts divided by verified ones.
        seconds: of answering, compilation left out.
    """

    engine: str
    spec_tokens: int | None
    questions: int
    score: float
    gained: int
    lost: int
    difference: float
    difference_error: float
    texts_changed: int
    texts_changed_from_plain: int | None
    acceptance_by_position: list[float]
    seconds: float


def compare(outcomes: Sequence[Outcome]) -> list[Row]:
    """The outcomes beside the first, which all others' differences are from."""
    return [_row(outcome, outcomes) for outcome in outcomes]


def _row(outcome: Outcome, outcomes: Sequence[Outcome]) -> Row:
    first = outcomes[0]
    apart = [a - b for a, b in zip(outcome.scores, first.scores, strict=True)]
    plain = next((o for o in outcomes if o.engine == outcome.engine and o.spec_tokens == 0), None)
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
    return Row(
        engine=outcome.engine,
        spec_tokens=outcome.spec_tokens,
        questions=len(outcome.scores),
        score=statistics.fmean(outcome.scores),
        gained=sum(value > 0 for value in apart),
        lost=sum(value < 0 for value in apart),
        difference=statistics.fmean(apart),
        difference_error=error,
        texts_changed=_changed(outcome, first),
        texts_changed_from_plain=None if plain is None else _changed(outcome, plain),
        acceptance_by_position=DraftCounts(outcome.accepted, outcome.drafted).by_position,
        seconds=outcome.seconds,
    )


def _changed(outcome: Outcome, other: Outcome) -> int:
    return sum(a != b for a, b in zip(outcome.texts, other.texts, strict=True))


COLUMNS = ("engine", "K", "score", "beside the first", "gained/lost", "texts changed", "from K=0",
           "accepted by position", "seconds")  # fmt: skip
NOTES = (
    "score: the share of questions answered rightly (exact match), or the harness's metric",
    "beside the first: difference of the scores, with the standard error of paired differences",
    "texts changed: texts that differ from the first row's; from K=0: from those of the same "
    "engine at K=0",
    "seconds: of answering all questions, without compilation",
)


def cells(row: Row, is_first: bool) -> list[str]:
    """A row of the table that `COLUMNS` heads."""
    drafts = [f"{rate:.1%}" for rate in row.acceptance_by_position]
    plain = row.texts_changed_from_plain
    return [
        row.engine,
        "-" if row.spec_tokens is None else str(row.spec_tokens),
        f"{row.score:.1%}",
        "-" if is_first else f"{100 * row.difference:+.2f} ± {100 * row.difference_error:.2f}",
        "-" if is_first else f"{row.gained}/{row.lost}",
        "-" if is_first else f"{row.texts_changed} of {row.questions}",
        "-" if plain is None or not row.spec_tokens else str(plain),
        " ".join(drafts) or "-",
        f"{row.seconds:.1f}",
    ]


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rows, and the outcomes they are made of."""
    rows = [asdict(row) for row in compare(outcomes)]
    return {"rows": rows, "outcomes": [asdict(outcome) for outcome in outcomes]}


Answering = Callable[[AnsweringEngine], Outcome]
"""Runs a task by an engine."""
