"""`mtpc bench`: compare the speed of a checkpoint for several values of K and with passes."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mtpc
from mtpc.cli.arguments import COMPARED_SPEC_TOKENS
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint, chosen_prompts
from mtpc.cli.opening import Prompt, check_tokenizer, drafts, set_threads
from mtpc.cli.plot import check_plot, draw_plot
from mtpc.cli.ranks import follow
from mtpc.cli.tables import print_rows, say
from mtpc.errors import MtpcError, OptionError, RequestError
from mtpc.layout.display import Tell, stage_listener
from mtpc.layout.terminal import show_progress
from mtpc.option_checks import AUTO, OWN
from mtpc.plan import make_plan

WARM_UP_TOKENS = 4
TIMES = ("ms_per_step", "tokens_per_s", "host_us")
NOTES = (
    "ms/step, tokens/s and host us are medians of rounds; each round runs every variant once",
    "tokens/step: tokens per decode step of one request",
    "host us: time from the end of a replay to the start of the next one, while there is work",
    "kernels: launches of the largest decode step's graph, including copies and fills; GPUs only",
)

SYNTHETIC_NOTE = (
    "SYNTHETIC: drafts are accepted as the options say, whatever they are; the text is not the "
    "model's, except at K=0"
)


@dataclass(frozen=True)
class Variant:
    """One way to compile a checkpoint.

    Attributes:
        draft: the option `draft`; "own" is the model's own MTP layers.
        passes: passes to enable in addition to the user's.
        without: passes that only other variants enable.
    """

    spec_tokens: int | str
    draft: str
    passes: tuple[str, ...]
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = [self.draft] * (self.draft != OWN)
        return " ".join([f"K={self.spec_tokens}", *named, *self.passes])


@dataclass(frozen=True)
class Sample:
    """The measurements of one run of all prompts. Only decode steps count.

    Attributes:
        tokens_per_s: new tokens of all requests per second.
        tokens_per_step: mean new tokens of one request per step.
        results: the continuation of each prompt.
        host_us: mean microseconds between two replays.
    """

    ms_per_step: float
    tokens_per_s: float
    tokens_per_step: float
    acceptance_rate: float | None
    results: Sequence[Prompt]
    replays_per_step: float
    host_us: float


def command(args: argparse.Namespace) -> int:
    prompts: list[Prompt] = chosen_prompts(args)
    checkpoint = chosen_checkpoint(args.checkpoint)
    given = compile_options(args)
    options = {"batch_buckets": (len(prompts),), **given}
    numbers = options.pop("spec_tokens", COMPARED_SPEC_TOKENS)
    drafters = str(options.pop("draft", OWN)).split(",")
    variants = list(_variants(numbers, drafters, args.compare or ()))
    check_tokenizer(checkpoint, prompts)
    if args.plot is not None:
        check_plot(args.plot)
    with show_progress(sys.stderr, args.quiet) as tell:
        tell("import torch")
        own = {name: value for name, value in given.items() if name != "draft"}
        if OWN in drafters and not drafts(checkpoint, own):
            variants = [v for v in variants if v.draft != OWN or v.spec_tokens == 0]
        for variant in variants:
            _check(_options_of(variant, options))
        set_threads(args.threads, checkpoint, args.tensor_parallel_size)
        measure = partial(take, checkpoint, prompts, args=args, tell=tell)
        samples, failure = _measure(variants, args.repeats, options, measure, tell)
        if not samples:
            return 0  # Rank 0 has measured.
        # This comes last: the profiler's hooks would slow down later measurements. It compiles the
        # programs again, from the cache.
        import torch

        kernels: dict[Variant, int | None] = dict.fromkeys(samples)
        for variant in samples if torch.cuda.is_available() and failure is None else ():
            chosen = _options_of(variant, options)
            kernels[variant] = count_kernels(mtpc.compile(checkpoint, **chosen))
    is_synthetic = any(name.startswith("synthetic") for name in options)
    (first, *_) = samples.values()
    rows = [_row(v, taken, first[0].results, kernels[v]) for v, taken in samples.items()]
    if args.as_json:
        fastest = rows.index(_fastest(rows))
        args.result = {"rows": rows, "synthetic": is_synthetic, "fastest": fastest}
    else:
        _print(rows, is_synthetic, args.quiet)
    if args.plot is not None:
        told = ", SYNTHETIC acceptance" * is_synthetic
        title = f"{checkpoint.absolute().name}, {len(prompts)} prompt(s){told}"
        draw_plot([str(variant) for variant in samples], rows, title, args.plot)
    if failure is not None:
        raise failure
    return 0


def _measure(
    variants: Sequence[Variant],
    repeats: int,
    options: dict[str, Any],
    measure: Callable[..., Sample | None],
    tell: Tell,
) -> tuple[dict[Variant, list[Sample]], BaseException | None]:
    """Samples of each variant that has some, and the error that ended the rounds early. Raises
    MtpcError: there was an error, and no sample before it."""
    samples = defaultdict[Variant, list[Sample]](list)
    try:
        for turn in range(1, repeats + 1):
            for variant in variants:
                tell(f"round {turn} of {repeats}: {variant}")
                if taken := measure(_options_of(variant, options)):
                    samples[variant].append(taken)
    except (MtpcError, OSError, KeyboardInterrupt) as error:
        if not samples:
            raise
        return samples, error
    return samples, None


def _variants(
    numbers: Sequence[int | str], drafters: Sequence[str], compare: Sequence[str]
) -> Iterator[Variant]:
    if not numbers:
        raise OptionError("--spec-tokens is empty; expected numbers such as 0,1,3")
    for k in numbers:
        for draft in drafters if k != 0 else (OWN,):
            yield Variant(k, draft, (), tuple(compare))
            for name in compare if k != 0 else ():
                others = tuple(other for other in compare if other != name)
                yield Variant(k, draft, (name,), others)


def _options_of(variant: Variant, options: dict[str, Any]) -> dict[str, Any]:
    from mtpc.backends.pipeline import pass_names

    enabled, disabled = options.get("enabled_passes", ()), options.get("disabled_passes", ())
    # Passes that are off by default are not disabled, because the cache's key has these names.
    left_out = (name for name in variant.without if name not in pass_names("off"))
    return {
        **options,
        **_synthetic(variant.spec_tokens, options),
        "spec_tokens": variant.spec_tokens,
        "draft": None if variant.draft == OWN else variant.draft,
        "enabled_passes": (*(n for n in enabled if n not in variant.without), *variant.passes),
        "disabled_passes": (*(n for n in disabled if n not in variant.passes), *left_out),
    }


def _synthetic(spec_tokens: int | str, options: dict[str, Any]) -> dict[str, Any]:
    """Synthetic acceptance for one K: the first K rates, and none without drafts."""
    if spec_tokens == 0:
        return {"synthetic_acceptance_rates": (), "synthetic_acceptance_length": None}
    rates = options.get("synthetic_acceptance_rates", ())
    return {"synthetic_acceptance_rates": rates[:spec_tokens]} if spec_tokens != AUTO else {}


def _check(options: dict[str, Any]) -> None:
    """Check a variant's options now, before the measurements of others take minutes."""
    from mtpc.backends.pipeline import select_passes

    select_passes(make_plan(mtpc.CompileOptions.parse(options)))


def take(
    checkpoint: Path,
    prompts: list[Prompt],
    options: dict[str, Any],
    args: argparse.Namespace,
    tell: Tell,
) -> Sample | None:
    """Compile, warm up, and run once. The model is freed, so that variants do not share memory.

    Returns None in a rank other than 0.
    """
    model = mtpc.compile(checkpoint, progress=stage_listener(tell, args.verbose), **options)
    if follow(model):
        return None
    model.generate(prompts, WARM_UP_TOKENS, ignore_eos=True)
    earlier = deepcopy(model.stats)
    results = model.generate(prompts, args.max_new_tokens, ignore_eos=True)
    model.close()
    stats = model.stats
    counts = stats.decode_counts() - earlier.decode_counts()
    if not counts.steps:
        raise RequestError(
            f"{args.max_new_tokens} new token(s) take no decode step; expected 2 or more"
        )
    new = stats.replays - earlier.replays
    replays = sum(count for key, count in new.items() if key.phase == "decode")
    return Sample(
        1e3 * counts.seconds / counts.steps,
        counts.tokens / counts.seconds,
        counts.tokens / counts.request_steps,
        counts.acceptance_rate,
        results,
        replays / counts.steps,
        1e6 * (stats.host_gap_s - earlier.host_gap_s) / max(1, stats.host_gaps - earlier.host_gaps),
    )


def count_kernels(model: mtpc.SpecModel) -> int | None:
    """The number of kernels that the graph of the largest decode step launches.

    This replays the graph once with an empty batch. Returns None if the step is not on a GPU.
    """
    program = model.program
    decode = [key for key in program.steps if key.phase == "decode"]
    key = max(decode, key=lambda key: (key.bucket.num_reqs, key.spec_tokens))
    if not program.steps[key].buffers["batch.state_indices"].is_cuda:
        return None
    from mtpc.backends.graphs import kernels_of

    program.set_batch(key, [])
    return kernels_of(program.steps[key].replay).total()


def _row(
    variant: Variant, taken: list[Sample], results: Sequence[Prompt], kernels: int | None
) -> dict[str, Any]:
    """The measurements of a variant; times are medians of the rounds."""
    return {
        "spec_tokens": variant.spec_tokens,
        "draft": variant.draft if variant.spec_tokens else None,
        "passes": list(variant.passes),
        **{name: value for name, value in vars(taken[0]).items() if name != "results"},
        **{name: median(getattr(sample, name) for sample in taken) for name in TIMES},
        "same_text": all(sample.results == results for sample in taken),
        "kernels": kernels,
    }


def _print(rows: list[dict[str, Any]], is_synthetic: bool, quiet: bool) -> None:
    base, best = rows[0]["tokens_per_s"], _fastest(rows)
    title = f"Decoding{', SYNTHETIC acceptance' * is_synthetic}"
    print_rows(title, [_cells(row, base) for row in rows])
    if len(rows) > 1:
        named = f" {_named(best)}".rstrip()
        speed, times = best["tokens_per_s"], f"{best['tokens_per_s'] / base:.2f}x the first row"
        say(f"fastest: K={best['spec_tokens']}{named}, {speed:.1f} tokens/s, {times}")
    for note in NOTES * (not quiet) + (SYNTHETIC_NOTE,) * is_synthetic:
        say(note, style="dim")


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["tokens_per_s"])


def _named(row: dict[str, Any]) -> str:
    """What a row has beside K: a drafter other than the model's own, and passes."""
    return " ".join([*[row["draft"]] * (row["draft"] not in (None, OWN)), *row["passes"]])


def _cells(row: dict[str, Any], base: float) -> dict[str, str]:
    """A row of the table by its headings; `base` is the speed of the first one."""
    rate, speed = row["acceptance_rate"], row["tokens_per_s"]
    return {
        "K": str(row["spec_tokens"]),
        "with": _named(row) or "-",
        "ms/step": f"{row['ms_per_step']:.2f}",
        "tokens/s": f"{speed:.1f}",
        "tokens/step": f"{row['tokens_per_step']:.2f}",
        "accepted": "-" if rate is None else f"{rate:.1%}",
        "vs first": f"{speed / base:.2f}x",
        "same text": "yes" if row["same_text"] else "no",
        "replays/step": f"{row['replays_per_step']:.2f}",
        "host us": f"{row['host_us']:.0f}",
        "kernels": str(row["kernels"] or "-"),
    }
