"""The arguments of the command line. This module imports no torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mtpc
from mtpc.cli.compile_arguments import (
    add_cache_dir,
    add_cache_options,
    add_checkpoint,
    add_compile_options,
    add_output_options,
    add_ranks,
    add_threads,
)
from mtpc.cli.file_arguments import add_graft, add_quantize, add_vocab
from mtpc.cli.parsing import (
    SuggestingParser,
    above_zero,
    acceptance_length,
    ids,
    positive,
    shares,
    whole,
)
from mtpc.cli.plan_arguments import add_plan
from mtpc.cli.serve_arguments import add_server_options

DEFAULT_NEW_TOKENS = 128
BENCH_NEW_TOKENS = 64
ACCEPTANCE_FLOOR = 0.25
"""DeepSeek-V3 reports 85 to 90 % for its layer (arXiv:2412.19437, section 5.4.3). Layers of another
model are near 0."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments. If they are invalid, print argparse's message and exit with status 2."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that the user gave."""
    given = {name: getattr(args, name, None) for name, *_ in _SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


_SAMPLING = (
    ("temperature", float, "T", "divides the logits; 0 is greedy"),
    ("top_k", int, "N", "sample from the N most probable tokens"),
    ("top_p", float, "P", "sample from the most probable tokens whose probabilities sum to P"),
    ("min_p", float, "P", "exclude tokens less probable than P times the most probable one"),
    ("seed", int, "N", "seed of the random numbers (default: random)"),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = SuggestingParser(
        prog="mtpc", description=mtpc.__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("-V", "--version", action="version", version=f"mtpc {mtpc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary, add_arguments in (
        ("run", "generate text with a captured MTP step, and show statistics", _add_run),
        ("chat", "talk with a checkpoint in the terminal, by its chat template", _add_chat),
        ("build", "compile every step of a checkpoint into the graph cache", _add_build),
        ("serve", "serve OpenAI's API over HTTP, by default to this machine only", _add_serve),
        ("bench", "compare decoding speed for several numbers of drafts", _add_bench),
        ("check", "find what is wrong with MTP layers; measure their acceptance", _add_check),
        ("eval", "count right answers of a task, beside transformers and for each K", _add_eval),
        ("graft", "put the MTP layers of a base back into a fine-tune that lost them", add_graft),
        ("tune-head", "train the MTP layers of a checkpoint on your texts", _add_tune_head),
        ("quantize", "write a quantised copy of a checkpoint", add_quantize),
        ("vocab", "list the tokens of texts, for --draft-vocab", add_vocab),
        ("cache", "show, check and clear the graph cache", _add_cache),
        ("inspect", "show the graph of one step before, between or after passes", _add_inspect),
        ("plan", "plan memory and step time on several devices, on paper", add_plan),
        ("doctor", "check this machine for what mtpc needs, and advise on what is missing", None),
        ("completion", "print a script that completes commands in your shell", _add_completion),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        command.add_argument(
            "--traceback", action="store_true", help="print the Python traceback of an error"
        )
        if add_arguments is not None:
            add_arguments(command)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_output_options(parser)
    _add_prompts(parser, DEFAULT_NEW_TOKENS)
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the end-of-sequence ids"
    )
    _add_sampling(parser)
    add_threads(parser)
    add_ranks(parser)
    add_compile_options(parser, batch_buckets="a power of two that holds the prompts")
    add_cache_options(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: greedy decoding)")
    for name, kind, metavar, text in _SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    for flag, kind, metavar, text in (
        ("--system", str, "TEXT", "the message that begins the conversation"),
        ("--chat-template", Path, "FILE", "Jinja template (default: the checkpoint's)"),
        ("--max-new-tokens", positive, "N", "tokens of an answer (default: what max-len leaves)"),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    _add_sampling(parser)
    add_threads(parser)
    add_compile_options(parser, batch_buckets="1")
    add_cache_options(parser)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="your shell")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_server_options(parser)
    add_threads(parser)
    add_ranks(parser)
    add_compile_options(parser, spec_tokens="auto, built while it serves; without a cache 3")
    add_cache_options(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_output_options(parser)
    _add_prompts(parser, BENCH_NEW_TOKENS)
    parser.add_argument(
        "--compare",
        action="append",
        metavar="PASS",
        help="also measure each K with this pass enabled; repeatable",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=3,
        metavar="N",
        help="rounds of measurements; each round runs every variant once (default: %(default)s)",
    )
    for flag, kind, metavar, text in (
        ("length", acceptance_length, "L|NAME", "tokens per step, or a golden length by name"),
        ("rates", shares, "P,P,..", "the share of steps that accept each draft and all before it"),
    ):
        parser.add_argument(
            f"--synthetic-acceptance-{flag}",
            type=kind,
            metavar=metavar,
            help=f"accept drafts whatever they are: {text}. The text is then not the model's",
        )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw speed and acceptance by K: PNG or SVG"
    )
    add_threads(parser)
    add_ranks(parser)
    add_compile_options(
        parser,
        several_k=True,
        spec_tokens="0,1,2,3",
        batch_buckets="the number of prompts",
    )
    add_cache_dir(parser)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_output_options(parser)
    add = parser.add_argument
    text = "questions (.jsonl), or a task of lm-evaluation-harness: a name, or its .yaml"
    add("--task", required=True, metavar="FILE|NAME", help=text)
    add("--limit", type=positive, metavar="N", help="take the first N questions only")
    text = "new tokens per question of a file (default: %(default)s)"
    add("-n", "--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    text = "leave out transformers, which is slow"
    add("--no-transformers", action="store_false", dest="transformers", help=text)
    add("--out", type=Path, metavar="FILE", help="write rows, texts and scores as JSON")
    add_threads(parser)
    several = {"backend": "auto, or several as eager,cpu", "spec_tokens": "0,1,2,3"}
    add_compile_options(parser, several_k=True, **several)
    add_cache_options(parser)


def _add_tune_head(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "directory with config.json and *.safetensors, or an id of the local hub cache"
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    text = "UTF-8 files to learn from; the last tenth of each is held out"
    add("texts", nargs="+", type=Path, metavar="TEXT", help=text)
    add("--out", type=Path, required=True, metavar="OUT", help="the new directory")
    text = "a file of held-out text instead; repeatable"
    add("--held-out", action="append", default=[], type=Path, metavar="TEXT", help=text)
    for flag, kind, default, metavar, text in (
        ("--minutes", above_zero, None, "M", "train so long (default: 10, if no steps are given)"),
        ("--steps", positive, None, "N", "train so many steps at most"),
        ("--learning-rate", above_zero, 1e-3, "R", "the highest (default: %(default)s)"),
        ("--batch", positive, 12, "N", "texts a step (default: %(default)s)"),
        ("--length", positive, 192, "N", "tokens of a text (default: %(default)s)"),
        ("--seed", whole, 0, "N", "of the order of texts (default: %(default)s)"),
        (
            *("--continuations", whole, 1024, "N"),
            "texts of which the model writes the last three quarters (default: %(default)s)",
        ),
        ("--prompts", positive, 64, "N", "held-out prompts (default: %(default)s)"),
    ):
        add(flag, type=kind, default=default, metavar=metavar, help=text)
    text = "new tokens per held-out prompt (default: %(default)s)"
    add("-n", "--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    add("--resume", action="store_true", help="go on with a run that was interrupted")
    add("--json", type=Path, metavar="FILE", help="write acceptance and losses as JSON")
    add_threads(parser)
    add_compile_options(parser, spec_tokens="3", batch_buckets="8")
    add_cache_options(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_output_options(parser)
    _add_prompts(parser, BENCH_NEW_TOKENS)
    parser.add_argument(
        "--floor",
        type=float,
        default=ACCEPTANCE_FLOOR,
        metavar="P",
        help="a smaller accepted share of first drafts means that the MTP layers belong to another "
        "model (default: %(default)s)",
    )
    add_threads(parser)
    add_compile_options(parser, backend="eager", batch_buckets="the number of prompts")


def _add_prompts(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    prompt: dict[str, Any] = {"action": "append", "dest": "prompts"}
    parser.add_argument(
        "-p", "--prompt", **prompt, metavar="TEXT", help="a prompt; repeat the option for a batch"
    )
    parser.add_argument(
        "--ids", **prompt, type=ids, metavar='"1 2 3"', help="a prompt as token ids"
    )
    parser.add_argument(
        "-n",
        "--max-new-tokens",
        type=positive,
        default=new_tokens,
        metavar="N",
        help="new tokens per prompt (default: %(default)s)",
    )


def _add_build(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_output_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        dest="cache_dir",
        metavar="DIR",
        help="the cache directory (default: MTPC_CACHE_DIR, else the user's)",
    )
    parser.add_argument(
        "--split",
        action="store_true",
        help="also build verify and propose as separate graphs, for hosts that schedule",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="processes (default: one per core, if memory holds the weights once per process)",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="NAME",
        help="instead, compile the steps' Triton kernels for this GPU (hip:gfx942, hip:gfx950, "
        "cuda:80, cuda:90, cuda:100), which this machine need not have; repeatable. The GPU's "
        "machine can use the kernels only with the same wheel of Triton and the same Python",
    )
    add_threads(parser)
    add_ranks(parser)
    add_compile_options(parser, several_k=True, backend="cpu")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in (
        ("ls", "list entries with their age, their size, and whether they are stale"),
        ("inspect", "show one entry: its key, passes and build times, or a graph's text"),
        ("verify", "check every file of every entry against its SHA-256"),
        ("why", "show for each step of a checkpoint whether the cache holds it, and if not, why"),
        ("prune", "remove stale and damaged entries, and leftovers of killed builds"),
    ):
        description = f"{summary[0].upper()}{summary[1:]}."
        action = actions.add_parser(name, help=summary, description=description)
        action.set_defaults(parser=parser)
        if name == "inspect":
            action.add_argument("entry", metavar="ENTRY", help="the entry's name, or its beginning")
            action.add_argument(
                "--graph",
                metavar="PASS",
                help="print the graph after this pass; 'traced' prints the graph before all passes",
            )
        elif name == "why":
            add_checkpoint(action)
            add_threads(action)
            add_compile_options(action)
        elif name == "prune":
            _add_prune(action)
        add_cache_dir(action)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="remove every entry")
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="also remove entries older than this"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing, and show what would be removed"
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--after", metavar="PASS", help="stop after this pass (default: the last)")
    where.add_argument("--before", metavar="PASS", help="stop before this pass")
    parser.add_argument(
        "--phase",
        choices=("decode", "prefill"),
        default="decode",
        help="which step to show (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="R", help="its requests (default: %(default)s)"
    )
    parser.add_argument("--nodes", action="store_true", help="print every node of the graph")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the step to a file")
    add_compile_options(parser)
