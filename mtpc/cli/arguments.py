"""The arguments of the command line. This module imports no torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mtpc
from mtpc.cli.file_arguments import add_graft, add_quantize, add_vocab
from mtpc.cli.parsing import (
    SuggestingParser,
    acceptance_length,
    buckets_up_to,
    draft_vocab,
    ids,
    number,
    numbers,
    positive,
    shares,
    speculative,
    speculative_lists,
    wiring,
)
from mtpc.cli.serve_arguments import add_server_options
from mtpc.config import SCHEMES, CompileOptions

DEFAULT_NEW_TOKENS = 128
BENCH_NEW_TOKENS = 64
ACCEPTANCE_FLOOR = 0.25
"""DeepSeek-V3 reports 85 to 90 % for its layer (arXiv:2412.19437, section 5.4.3). Layers of another
model are near 0."""


VLLM_NAMES = {
    "spec_tokens": "--num-speculative-tokens",
    "max_len": "--max-model-len",
    "page_size": "--block-size",
    "num_pages": "--num-gpu-blocks-override",
    "prefill_chunk": "--max-num-batched-tokens",
}
"""What vLLM's users call options."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments. If they are invalid, print argparse's message and exit with status 2."""
    args, unknown = _build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `CompileOptions` that the user gave."""
    given = {f.name: getattr(args, f.name, None) for f in fields(CompileOptions)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


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


def _build_parser() -> argparse.ArgumentParser:
    parser = SuggestingParser(
        prog="mtpc", description=mtpc.__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("-V", "--version", action="version", version=f"mtpc {mtpc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary, add_arguments in (
        ("run", "generate text with a captured MTP step, and show statistics", _add_run),
        ("build", "compile every step of a checkpoint into the graph cache", _add_build),
        (
            "serve",
            "serve OpenAI's API over HTTP; by default only this machine can connect",
            _add_serve,
        ),
        ("bench", "compare decoding speed for several numbers of drafts", _add_bench),
        ("check", "find what is wrong with MTP layers; measure their acceptance", _add_check),
        ("eval", "count right answers of a task, beside transformers and for each K", _add_eval),
        ("graft", "put the MTP layers of a base back into a fine-tune that lost them", add_graft),
        ("quantize", "write a quantised copy of a checkpoint", add_quantize),
        ("vocab", "list the tokens of texts, for --draft-vocab", add_vocab),
        ("cache", "show, check and clear the graph cache", _add_cache),
        ("inspect", "show the graph of one step before, between or after passes", _add_inspect),
        ("doctor", "check this machine for what mtpc needs, and advise on what is missing", None),
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
    _add_checkpoint(parser)
    _add_prompts(parser, DEFAULT_NEW_TOKENS)
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the end-of-sequence ids"
    )
    group = parser.add_argument_group("sampling (default: greedy decoding)")
    for name, kind, metavar, text in _SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    _add_threads(parser)
    _add_compile_options(parser, batch_buckets="the number of prompts")
    _add_cache_options(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    add_server_options(parser)
    _add_threads(parser)
    _add_compile_options(parser)
    _add_cache_options(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
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
    _add_threads(parser)
    _add_compile_options(
        parser,
        several_k=True,
        spec_tokens="0,1,2,3",
        batch_buckets="the number of prompts",
    )
    _add_cache_dir(parser)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    add = parser.add_argument
    text = "questions (.jsonl), or a task of lm-evaluation-harness: a name, or its .yaml"
    add("--task", required=True, metavar="FILE|NAME", help=text)
    add("--limit", type=positive, metavar="N", help="take the first N questions only")
    text = "new tokens per question of a file (default: %(default)s)"
    add("-n", "--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    text = "leave out transformers, which is slow"
    add("--no-transformers", action="store_false", dest="transformers", help=text)
    add("--out", type=Path, metavar="FILE", help="write rows, texts and scores as JSON")
    _add_threads(parser)
    several = {"backend": "auto, or several as eager,cpu", "spec_tokens": "0,1,2,3"}
    _add_compile_options(parser, several_k=True, **several)
    _add_cache_options(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    _add_prompts(parser, BENCH_NEW_TOKENS)
    parser.add_argument(
        "--floor",
        type=float,
        default=ACCEPTANCE_FLOOR,
        metavar="P",
        help="a smaller accepted share of first drafts means that the MTP layers belong to another "
        "model (default: %(default)s)",
    )
    _add_threads(parser)
    _add_compile_options(parser, backend="eager", batch_buckets="the number of prompts")


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
    _add_checkpoint(parser)
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
    _add_threads(parser)
    _add_compile_options(parser, several_k=True, backend="cpu")


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
            _add_checkpoint(action)
            _add_threads(action)
            _add_compile_options(action)
        elif name == "prune":
            _add_prune(action)
        _add_cache_dir(action)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="remove every entry")
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="also remove entries older than this"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing, and show what would be removed"
    )


def _add_cache_dir(parser: Any) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="the graph cache (default: MTPC_CACHE_DIR, else the user's)",
    )


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("graph cache")
    _add_cache_dir(group)
    group.add_argument(
        "--no-cache",
        action="store_false",
        dest="use_cache",
        default=None,
        help="do not read or write the cache",
    )
    group.add_argument(
        "--frozen",
        action="store_true",
        default=None,
        help="build nothing: a step that is not in the cache is an error",
    )
    group.add_argument(
        "--require-sha256",
        metavar="DIGEST",
        help="load only the entries with this digest, which `mtpc build` prints; implies --frozen",
    )


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads (default: 1 for checkpoints under 64 MiB, else torch's choice)",
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
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
    _add_compile_options(parser)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="CHECKPOINT",
        help="directory with config.json and *.safetensors, or an id of the local hub cache "
        "(default: the demo model)",
    )


def _add_compile_options(
    parser: argparse.ArgumentParser, several_k: bool = False, **defaults: str
) -> None:
    """Add the options of `mtpc.compile`. `CompileOptions` has the defaults of absent options.

    Args:
        parser: the command's parser.
        several_k: whether `--spec-tokens` accepts a list.
        **defaults: default values to show in the help for options whose default differs here.
    """
    group = parser.add_argument_group("compile options")
    drafts = (
        "K,K" if several_k else "K",
        f"drafts per step{', one or several' * several_k}; 0 decodes plainly, auto adapts to load",
    )
    for name, kind, metavar, text in (
        ("spec_tokens", numbers if several_k else number, *drafts),
        ("spec_tiers", ids, "K,K", "numbers that 'auto' chooses from (default: 0,1,2,3)"),
        ("batch_buckets", ids, "R,R", "request counts to capture"),
        ("max_len", int, "N", "longest sequence in tokens, prompt and new tokens together"),
        ("page_size", int, "N", "tokens per KV page"),
        ("num_pages", int, "N", "pages in the KV pool (default: enough for the largest bucket)"),
        ("snapshot_bytes", int, "N", "most bytes of snapshots of state that is not in KV pages"),
        ("snapshot_distance", int, "N", "tokens from one snapshot of a long prompt to the next"),
        ("prefill_chunk", int, "N", "tokens per prefill step (default: 512 or 64)"),
        (
            *("busy_prefill_chunk", int, "N"),
            "prompt tokens per prefill step while other requests decode (default: up to 64)",
        ),
        (
            *("prefill_rows", int, "R"),
            "requests that may share a prefill step (default: enough for the largest bucket)",
        ),
        ("backend", str, "NAME", "auto, cpu, cuda, eager or null"),
        ("draft_vocab", draft_vocab, "N|FILE", "draft only the N lowest ids, or the ids in FILE"),
        ("wiring", wiring, "RULE=VALUE,..", "rules of the MTP layers; `mtpc check` measures them"),
        ("dtype", str, "NAME", "dtype of the weights (default: the checkpoint's)"),
        ("quantize", str, "SCHEME", f"quantise weights: {', '.join(SCHEMES)}"),
    ):
        default = defaults.get(name, getattr(CompileOptions, name))
        shown = "" if default in (None, ()) else f" (default: {_listed(default)})"
        flag = f"--{name.replace('_', '-')}"
        others = [VLLM_NAMES[name]] if name in VLLM_NAMES else []
        group.add_argument(flag, *others, type=kind, metavar=metavar, help=text + shown)
    _add_vllm_options(group, several_k)
    for flag, dest in (("--disable-pass", "disabled_passes"), ("--enable-pass", "enabled_passes")):
        text = f"{flag[2:].replace('-', ' an optional ')} by name; repeatable"
        group.add_argument(flag, action="append", dest=dest, metavar="PASS", help=text)
    for flag, text in (
        ("--async-scheduling", "on a GPU, launch a step before the previous one is read"),
        ("--verify-passes", "check the graph with fake tensors after every pass"),
    ):
        group.add_argument(flag, action="store_true", default=None, help=text)


def _add_vllm_options(group: Any, several_k: bool) -> None:
    """Options of vLLM's that are others here, in another form."""
    group.add_argument(
        "--max-num-seqs",
        type=buckets_up_to,
        dest="batch_buckets",
        metavar="N",
        help="most requests that decode at once: as --batch-buckets 1,2,4,..,N",
    )
    group.add_argument(
        "--speculative-config",
        type=speculative_lists if several_k else speculative,
        dest="spec_tokens",
        metavar="JSON",
        help='as --spec-tokens: \'{"method": "mtp", "num_speculative_tokens": 3}\'',
    )


def _listed(value: object) -> str:
    """A value as the user types it on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
