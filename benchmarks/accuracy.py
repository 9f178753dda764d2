"""Right answers of a checkpoint with transformers and with mtpc, plain and quantised, for each K.

    python examples/train_addition_model.py --out addition
    python -m benchmarks.accuracy addition --task addition/held-out.jsonl --out RESULTS.json

Every engine gets the same questions, whose answers can be verified. Differences are paired; the
texts of K = 1 to 3 must be those of K = 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.results import Record, Table, publish
from mtpc.evaluation.compare import COLUMNS, NOTES, Row, answer_questions, cells, compare
from mtpc.evaluation.engines import AnsweringEngine, MtpcEngine, TransformersEngine
from mtpc.evaluation.tasks import encode_all, read_task

BATCH = (8,)


def table(record: Record) -> Table:
    """A record's table."""
    rows = [Row(**row) for row in record["rows"]]
    body = [cells(row, place == 0) for place, row in enumerate(rows)]
    return Table("Right answers", COLUMNS, body, NOTES)


def engines(args: argparse.Namespace, tell: Any) -> Iterator[AnsweringEngine]:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code. It is 1 if K changed a text."""
    args = _parse(argv)
    tell = command.begin(args)
    questions = read_task(args.task, args.limit)
    outcomes = []
    for engine in engines(args, tell):
        prompts = encode_all(questions, engine.served, None)
        tell(f"answer {len(prompts)} questions: {engine.name}, K={engine.spec_tokens}")
        outcomes.append(answer_questions(engine, questions, prompts, args.max_new_tokens))
    rows = compare(outcomes)
    publish("accuracy", args, {"rows": [asdict(row) for row in rows]}, table)
    return int(any(row.texts_changed_from_plain for row in rows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = dict[str, Any](kv_cache_dtypes=["auto"], spec_tokens=[0, 1, 2, 3], threads=1)
    parser = command.new_parser("accuracy", __doc__, *command.RESULTS, **defaults)
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("--task", type=Path, required=True, metavar="FILE", help="questions, as `mtpc eval` has")
    add("--limit", type=positive, metavar="N", help="the first N questions only")
    add("--backends", nargs="+", default=["cpu"], metavar="NAME")
    add("--schemes", nargs="*", default=["int8", "int4-g32"], metavar="SCHEME")
    add("--max-new-tokens", type=positive, default=8, metavar="N")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
