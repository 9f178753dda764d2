"""Right answers of a checkpoint with transformers and with mtpc, plain and quantised, for each K.

    python examples/train_addition_model.py --out addition
    python -m benchmarks.accuracy addition --task addition/held-out.jsonl --out RESULTS.json

Every engine gets the same questions, whose answers can be verified. Differences are paired; the
texts of K = 1 to 3 must be those of K = 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.tables import Record, Table
from mtpc.evaluation.compare import COLUMNS, NOTES, Row, answer_questions, cells, compare
from mtpc.evaluation.engines import AnsweringEngine, MtpcEngine, TransformersEngine
from mtpc.evaluation.tasks import encode_all, read_task

BATCH = (8,)


def table_of(record: Record) -> Table:
    """A record's table."""
    rows = [Row(**row) for row in record["rows"]]
    body = [cells(row, place == 0) for place, row in enumerate(rows)]
    return Table("Right answers", COLUMNS, body, NOTES)


def engines(args: Any, tell: Any) -> Iterator[AnsweringEngine]:
    """transformers, then mtpc for each backend, scheme, KV cache dtype and K."""
    yield TransformersEngine(args.checkpoint, None, None)
    schemes, kinds = (None, *args.schemes), args.kv_cache_dtypes
    for backend, scheme, kind, k in product(args.backends, schemes, kinds, args.spec_tokens):
        tell(f"compile {backend} {scheme or 'bfloat16'} {kind} K={k}")
        options: dict[str, Any] = {"backend": backend, "quantize": scheme, "spec_tokens": k}
        options |= {"batch_buckets": BATCH, "kv_cache_dtype": kind}
        engine = MtpcEngine(args.checkpoint, lambda _: None, **options)
        engine.name += f", {scheme}" if scheme else ""
        engine.name += f", {kind} KV" if kind != "auto" else ""
        yield engine


def measure(run: Run) -> Iterator[list[dict[str, Any]]]:
    """A row for each engine; the run fails if K changed a text."""
    args, outcomes = run.args, []
    questions = read_task(args.task, args.limit)
    for engine in engines(args, run.tell):
        prompts = encode_all(questions, engine.served, None)
        run.tell(f"answer {len(prompts)} questions: {engine.name}, K={engine.spec_tokens}")
        outcomes.append(answer_questions(engine, questions, prompts, args.max_new_tokens))
    rows = compare(outcomes)
    run.failed = any(row.texts_changed_from_plain for row in rows)
    yield [asdict(row) for row in rows]


BENCHMARK = Benchmark(
    "accuracy",
    __doc__,
    measure,
    table_of,
    command.RESULTS,
    dict(kv_cache_dtypes=["auto"], spec_tokens=[0, 1, 2, 3], threads=1),
    {
        "checkpoint": dict(type=Path),
        "--task": dict(
            type=Path, required=True, metavar="FILE", help="questions, as `mtpc eval` has"
        ),
        "--limit": command.NUMBER | dict(help="the first N questions only"),
        "--backends": dict(nargs="+", default=["cpu"], metavar="NAME"),
        "--schemes": dict(nargs="*", default=["int8", "int4-g32"], metavar="SCHEME"),
        "--max-new-tokens": command.NUMBER | dict(default=8),
    },
)
main, table = BENCHMARK.commands(__name__)
