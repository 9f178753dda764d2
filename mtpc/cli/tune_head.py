"""`mtpc tune-head` and `mtpc train-draft`: train MTP layers, or a new drafter, on texts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.opening import check_tokenizer, set_threads
from mtpc.cli.tables import print_rows, say
from mtpc.config import DEFAULT_SPEC_TOKENS
from mtpc.layout.terminal import show_progress
from mtpc.weights.hub import find_directory
from mtpc.weights.plain_file import write_output

if TYPE_CHECKING:
    from mtpc.tuning.run import Plan, Tuned

DEFAULT_MINUTES = 10.0


def command(args: argparse.Namespace) -> int:
    """Train MTP layers or, with a form, a new drafter; print what came of it, and return 0."""
    checkpoint = find_directory(args.checkpoint)
    options = {"spec_tokens": DEFAULT_SPEC_TOKENS, **compile_options(args)}
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        from mtpc.tuning.run import Tuning

        set_threads(args.threads, checkpoint)
        check_tokenizer(checkpoint, [str(path) for path in args.texts])
        given = (args.texts, args.held_out, args.out, _plan(args), options, tell)
        tuned = Tuning(checkpoint, *given, args.form).run(args.resume)
    _print(args, tuned)
    if args.json:
        write_output(args.json, (json.dumps(asdict(tuned)) + "\n").encode())
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from mtpc.tuning.run import Plan
    from mtpc.tuning.train import Schedule

    minutes = DEFAULT_MINUTES if args.minutes is None and args.steps is None else args.minutes
    schedule = Schedule(args.steps, minutes, args.batch, args.learning_rate, args.seed)
    numbers = (args.length, args.continuations, args.prompts, args.max_new_tokens)
    return Plan(schedule, *numbers, args.vocabulary, args.disk)


def _print(args: argparse.Namespace, tuned: Tuned) -> None:
    rows = [
        {
            "MTP layers": name,
            "accepted/step": f"{found.per_step:.2f}",
            "by position": "  ".join(f"{rate:.1%}" for rate in found.by_position),
            "accepted": f"{sum(found.accepted)} of {sum(found.drafted)}",
        }
        for name, found in (("before", tuned.before), ("after", tuned.after))
        if found is not None
    ]
    print_rows("Accepted drafts on held-out text", rows)
    gain = f"{tuned.gain:+.1%} accepted drafts a step; " if tuned.before else ""
    say(
        f"{args.out}: {gain}{len(tuned.tensors)} tensors "
        f"trained on {tuned.texts[0]} texts of {tuned.texts[1]} tokens in {tuned.progress.step} "
        f"steps ({tuned.progress.seconds:.0f} s)"
    )
    if tuned.before and tuned.gain <= 0:
        say(f"no gain: keep {args.checkpoint}, or train longer on more text")
