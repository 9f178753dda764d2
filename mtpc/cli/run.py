"""`mtpc run`: compile a checkpoint, continue prompts, and show statistics."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mtpc
from mtpc.cli.arguments import sampling_fields
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import DEFAULT_PROMPT, chosen_checkpoint
from mtpc.cli.opening import Prompt, check_tokenizer, compile_model, drafts
from mtpc.cli.ranks import follow
from mtpc.cli.tables import print_table, say
from mtpc.errors import OptionError
from mtpc.layout.display import Tell
from mtpc.layout.terminal import show_progress


def command(args: argparse.Namespace) -> int:
    checkpoint = chosen_checkpoint(args.checkpoint)
    prompts: list[Prompt] = args.prompts or [DEFAULT_PROMPT]
    # A power of two, as the buckets of `mtpc.compile` are.
    options = {"batch_buckets": (1 << (len(prompts) - 1).bit_length(),), **compile_options(args)}
    sampling = mtpc.SamplingParams(**sampling_fields(args))
    mtpc.CompileOptions.parse(options)
    check_tokenizer(checkpoint, prompts)
    with show_progress(sys.stderr, args.quiet) as tell:
        tell("import torch")
        if args.compare and not drafts(checkpoint, options):
            raise OptionError("--compare compares drafts with K = 0, and K is 0; leave it out")
        reads_text = any(isinstance(prompt, str) for prompt in prompts)
        model = compile_model(checkpoint, options, args, tell, reads_text)
        if follow(model):
            _compare(checkpoint, prompts, options, args, tell)
            return 0
        tell(f"generate up to {args.max_new_tokens} tokens for {len(prompts)} prompt(s)")
        results = model.generate(
            prompts, args.max_new_tokens, ignore_eos=args.ignore_eos, sampling=sampling
        )
        model.close()
        stats, statistics = _stats(model), [*_statistics(model, args.verbose)]
        del model  # `_compare` compiles two more.
        speeds = _compare(checkpoint, prompts, options, args, tell)
    if args.as_json:
        rows = [_as_json(*pair) for pair in zip(prompts, results, strict=True)]
        args.result = {"checkpoint": str(checkpoint), "results": rows, "stats": stats}
        args.result |= {"tokens_per_s": speeds} if speeds else {}
    else:
        if speeds:
            drafted, plain = speeds.values()
            shown = f"{drafted / plain:.2f}x: {drafted:.1f} and {plain:.1f} tokens/s"
            statistics.append(("speed over K = 0", shown))
        _print_results(prompts, results, statistics, args.quiet)
    return 0


def _compare(
    checkpoint: Path,
    prompts: list[Prompt],
    options: dict[str, Any],
    args: argparse.Namespace,
    tell: Tell,
) -> dict[str, float]:
    """With `--compare`: tokens/s of decoding by drafts and at K = 0, measured as `mtpc bench` does.

    Without it, and in a rank other than 0: nothing.
    """
    if not args.compare:
        return {}
    from mtpc.cli.bench import take

    speeds = dict[str, float]()
    for name, change in (("drafted", {}), ("plain", {"spec_tokens": 0, "spec_tiers": ()})):
        tell(f"measure {'K = 0' if change else 'drafts'}")
        sample = take(checkpoint, prompts, {**options, **change}, args, tell)
        speeds |= {name: sample.tokens_per_s} if sample else {}
    return speeds


def _as_json(prompt: Prompt, result: Any) -> dict[str, Any]:
    """One continuation: its text where the prompt is text, its ids, and why it ended."""
    text = str(result) if isinstance(result, str) else None
    ids, reason = list(result.token_ids), result.finish_reason
    return {"prompt": prompt, "text": text, "ids": ids, "finish_reason": reason}


def _stats(model: mtpc.SpecModel) -> dict[str, Any]:
    """The statistics for `--json`; acceptance is None if nothing was drafted."""
    stats, is_drafted = model.stats, bool(sum(model.stats.drafted))
    return {
        "new_tokens": stats.emitted_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "prefill_s": stats.prefill_s,
        "decode_tokens": stats.decode_counts().tokens,
        "decode_s": stats.decode_s,
        "decode_steps": stats.decode_steps,
        "acceptance_length": stats.acceptance_length if is_drafted else None,
        "acceptance_rate": stats.acceptance_rate if is_drafted else None,
        "acceptance_by_position": stats.acceptance_by_position,
        "replays": {str(key): stats.replays[key] for key in sorted(model.program.steps)},
        "fallbacks": dict(stats.fallbacks),
    }


def _print_results(
    prompts: Sequence[Prompt],
    results: Sequence[Prompt],
    statistics: Sequence[tuple[str, str]],
    quiet: bool,
) -> None:
    if quiet:
        for result in results:
            say(_as_text(result))
        return
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), start=1):
        say(f"[{number}] {_as_text(prompt)}", style="dim")
        say(_as_text(result))
        say()
    print_table("Statistics", ("", ""), statistics)


def _as_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def _statistics(model: mtpc.SpecModel, verbose: bool) -> Iterator[tuple[str, str]]:
    """The rows of the table; with `verbose` the replays of each step, too."""
    stats = model.stats
    decoded = stats.decode_counts().tokens
    shared = f", {stats.joined.tokens} in shared prefill steps" if stats.joined.tokens else ""
    yield "new tokens", f"{stats.emitted_tokens}, {decoded} of them in decode steps{shared}"
    yield "prefill", f"{stats.prompt_tokens} tokens, {_rate(stats.prompt_tokens, stats.prefill_s)}"
    yield "decode", f"{decoded} tokens, {_rate(decoded, stats.decode_s)}"
    if stats.decode_steps:
        mean_ms = 1e3 * stats.decode_s / stats.decode_steps
        yield "decode step", f"{mean_ms:.2f} ms, mean of {stats.decode_steps}"
    if drafted := sum(stats.drafted):
        yield "acceptance length", f"{stats.acceptance_length:.2f} tokens per step, bonus included"
        accepted = f"{sum(stats.accepted)} of {drafted} drafts"
        yield "acceptance rate", f"{stats.acceptance_rate:.1%}: {accepted}"
        by_position = "  ".join(f"{rate:.1%}" for rate in stats.acceptance_by_position)
        yield "acceptance by position", by_position
    for key, step in sorted(model.program.steps.items()) if verbose else ():
        yield f"replays of {key}", f"{stats.replays[key]}, ready in {step.build_s:.2f} s"
    fallbacks = ", ".join(f"{why} ({count})" for why, count in stats.fallbacks.items())
    yield "fallbacks", fallbacks or "none"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if seconds else "no steps"
