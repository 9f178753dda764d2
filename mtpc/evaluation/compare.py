"""Compares the answers of several engines to one task."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from mtpc.engine.stats import DraftCounts
from mtpc.evaluation.engines import AnsweringEngine, MtpcEngine
from mtpc.evaluation.tasks import Question


@dataclass
class Outcome:
    """The answers of one engine to a task.

    Attributes:
        spec_tokens: K; None for transformers.
        scores: the score of each question; for a task of a file, 1 for a right answer and 0 else.
        seconds: time for all answers, without compilation.
        accepted: accepted drafts by position; `drafted`: verified ones.
        more: the harness's own results by task.
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
    """Measure time and drafts of the block, in an outcome that the block fills in."""
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
    with measured(engine) as outcome:
        stops = [question.stop for question in questions]
        outcome.texts = engine.answer(prompts, [max_new_tokens] * len(prompts), stops)
    pairs = zip(questions, outcome.texts, strict=True)
    outcome.scores = [float(question.is_right(text)) for question, text in pairs]
    return outcome


@dataclass(frozen=True)
class Row:
    """An outcome, compared with the first one.

    Attributes:
        spec_tokens: K; None for transformers.
        score: mean score; for a task of a file, the share of right answers.
        gained: number of questions with a higher score than in the first row; `lost`: with a lower.
        difference: mean score minus that of the first row.
        difference_error: standard error of `difference`, from the differences by question.
        texts_changed: number of texts that differ from the first row's.
        texts_changed_from_plain: number of texts that differ from those of the same engine at K =
            0; None if that was not run.
        seconds: time for all answers, without compilation.
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
    """The cells of a row, one for each of `COLUMNS`."""
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
    rows = [asdict(row) for row in compare(outcomes)]
    return {"rows": rows, "outcomes": [asdict(outcome) for outcome in outcomes]}
