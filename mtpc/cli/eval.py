"""`mtpc eval`: count right answers of a task, with transformers and with mtpc for each K."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mtpc
from mtpc.cli.arguments import COMPARED_SPEC_TOKENS
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.cli.opening import check_tokenizer, drafts, set_threads
from mtpc.cli.tables import print_table, say
from mtpc.errors import MtpcError, OptionError
from mtpc.layout.display import Tell, stage_listener
from mtpc.layout.terminal import show_progress
from mtpc.option_checks import AUTO
from mtpc.weights.plain_file import write_output

if TYPE_CHECKING:
    from mtpc.evaluation.compare import Outcome
    from mtpc.evaluation.engines import AnsweringEngine

    Answering = Callable[[AnsweringEngine], Outcome]


def command(args: argparse.Namespace) -> int:
    checkpoint = chosen_checkpoint(args.checkpoint)
    given = compile_options(args)
    options = dict(given)
    numbers = options.pop("spec_tokens", COMPARED_SPEC_TOKENS)
    if AUTO in numbers:
        raise OptionError("--spec-tokens is auto; expected numbers, whose texts are compared")
    backends = options.pop("backend", "auto").split(",")
    variants = [
        {"batch_buckets": (1, 2, 4, 8), **options, "backend": backend, "spec_tokens": k}
        for backend in backends
        for k in numbers
    ]
    for variant in variants:
        mtpc.CompileOptions.parse(variant)
    check_tokenizer(checkpoint, [args.task], "a task needs one")
    with show_progress(sys.stderr, args.quiet) as tell:
        tell("import torch and transformers")
        if not drafts(checkpoint, given):
            variants = [variant for variant in variants if variant["spec_tokens"] == 0]
        set_threads(args.threads, checkpoint)
        answering = _task(args, checkpoint)
        outcomes: list[Outcome] = []
        failure: BaseException | None = None
        try:
            for engine in _engines(args, checkpoint, variants, tell):
                tell(f"{engine.name}, K = {engine.spec_tokens}: answer {args.task}")
                outcomes.append(answering(engine))
        except (MtpcError, OSError, KeyboardInterrupt) as error:
            if not outcomes:
                raise
            failure = error  # What is answered already is shown first.
    from mtpc.evaluation.compare import as_json

    args.result = {"task": args.task, **as_json(outcomes)}
    if not args.as_json:
        _print(args.task, outcomes, args.quiet)
    if args.out:
        write_output(args.out, (json.dumps(args.result) + "\n").encode())
    if failure is not None:
        raise failure
    return 0


def _task(args: argparse.Namespace, checkpoint: Path) -> Answering:
    """What runs the task on an engine. Raises OptionError: the task is unknown, its file is
    invalid, or the harness is not installed."""
    if Path(args.task).suffix in (".jsonl", ".json"):
        from mtpc.evaluation.compare import answer_questions
        from mtpc.evaluation.tasks import encode_all, read_task
        from mtpc.server.chat import load_chat_template

        questions = read_task(Path(args.task), args.limit)
        has_chats = any(not isinstance(question.prompt, str) for question in questions)
        template = load_chat_template(checkpoint, None) if has_chats else None

        def answer(engine: AnsweringEngine) -> Outcome:
            prompts = encode_all(questions, engine.served, template)
            return answer_questions(engine, questions, prompts, args.max_new_tokens)

        return answer
    try:
        from mtpc.evaluation.harness import find_tasks, run_tasks
    except ImportError as error:
        raise OptionError(
            f"--task {args.task} is no file of questions (.jsonl), and lm-evaluation-harness "
            f"cannot be imported ({error}): install mtpc[eval], or give a file"
        ) from None
    tasks = find_tasks(args.task)
    return lambda engine: run_tasks(engine, tasks, args.limit)


def _engines(
    args: argparse.Namespace, checkpoint: Path, variants: list[dict[str, Any]], tell: Tell
) -> Iterator[AnsweringEngine]:
    """Yield each engine. An engine is freed before the next one is made."""
    from mtpc.evaluation.engines import MtpcEngine, TransformersEngine

    if args.transformers:
        tell(f"load {checkpoint} with transformers")
        parsed = mtpc.CompileOptions.parse(variants[0])
        yield TransformersEngine(checkpoint, parsed.dtype, parsed.max_len)
    for variant in variants:
        yield MtpcEngine(checkpoint, stage_listener(tell, args.verbose), **variant)


def _print(task: str, outcomes: list[Outcome], quiet: bool) -> None:
    from mtpc.evaluation.compare import COLUMNS, NOTES, cells, compare

    rows = [cells(row, place == 0) for place, row in enumerate(compare(outcomes))]
    print_table(f"Answers of {task}", COLUMNS, rows)
    for note in () if quiet else NOTES:
        say(note, style="dim")
