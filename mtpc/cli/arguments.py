"""The arguments of the command line. This module imports no torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mtpc
from mtpc import CompileOptions
from mtpc.cli.compile_arguments import add_checkpoint, add_compile_options, add_fields
from mtpc.cli.parsing import (
    SuggestingParser,
    acceptance_length,
    add_switches,
    add_values,
    counts,
    ids,
    microseconds,
    positive,
    shares,
    size,
)
from mtpc.cli.train_arguments import add_train_draft, add_tune_head
from mtpc.config import SCHEMES
from mtpc.errors import OptionError
from mtpc.server.options import ServerOptions

DEFAULT_NEW_TOKENS = 128
BENCH_NEW_TOKENS = 64
COMPARED_SPEC_TOKENS = (0, 1, 2, 3)
"""The numbers of drafts that `mtpc bench`, `eval` and `plan` compare."""
_K = ",".join(map(str, COMPARED_SPEC_TOKENS))
ACCEPTANCE_FLOOR = 0.25
"""DeepSeek-V3 reports 85 to 90 % for its layer (arXiv:2412.19437, section 5.4.3). Layers of another
model are near 0."""
DEFAULT_LEN = 8192
"""Tokens of a request that `mtpc plan` counts with."""
DEVICE_NAMES = ("h200", "mi300x")
FIELDS = ("max_len", "page_size", "dtype", "quantize", "kv_cache_dtype")
"""Fields of `CompileOptions` that a plan on paper depends on, beside K."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments. If they are invalid, print argparse's message and exit with status 2."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that the user gave.

    Raises:
        OptionError: the user gave some, and `--no-sampling`.
    """
    named = {name: getattr(args, name, None) for name, *_ in _SAMPLING}
    given = {name: value for name, value in named.items() if value is not None}
    if given and args.sampling is False:
        flag = next(iter(given)).replace("_", "-")
        raise OptionError(f"--{flag} with --no-sampling; leave out one of them")
    return given


_SAMPLING = (
    ("temperature", float, "T", "divides the logits; 0 is greedy"),
    ("top_k", int, "N", "sample from the N most probable tokens"),
    ("top_p", float, "P", "sample from the most probable tokens whose probabilities sum to P"),
    ("min_p", float, "P", "exclude tokens less probable than P times the most probable one"),
    ("seed", int, "N", "seed of the random numbers (default: random)"),
)


def build_parser() -> SuggestingParser:
    parser = SuggestingParser(
        prog="mtpc", description=mtpc.__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("-V", "--version", action="version", version=f"mtpc {mtpc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary, add_arguments in (
        ("run", "generate text with a captured MTP step, and show statistics", _add_run),
        ("chat", "chat with a checkpoint in the terminal, by its chat template", _add_chat),
        ("build", "compile every step of a checkpoint into the graph cache", _add_build),
        ("serve", "serve OpenAI's API over HTTP, by default to this machine only", _add_serve),
        ("bench", "compare decoding speed for several numbers of drafts", _add_bench),
        ("check", "find what is wrong with MTP layers; measure their acceptance", _add_check),
        ("eval", "count right answers of a task, by transformers and by mtpc", _add_eval),
        ("graft", "put the MTP layers of a base back into a fine-tune that lost them", _add_graft),
        ("tune-head", "train the MTP layers of a checkpoint on your texts", add_tune_head),
        ("train-draft", "train drafts for a model that ships none", add_train_draft),
        ("quantize", "write a quantised copy of a checkpoint", _add_quantize),
        ("vocab", "list the tokens of texts, for --draft-vocab", _add_vocab),
        ("models", "list the models that run", _add_models),
        ("cache", "show, check and clear the graph cache", _add_cache),
        ("inspect", "show the graph of one step before, between or after passes", _add_inspect),
        ("plan", "plan memory and step time on several devices, on paper", _add_plan),
        ("doctor", "check this machine for what mtpc needs, and advise on what is missing", None),
        ("completion", "print a script that completes commands in your shell", _add_completion),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        command.set_defaults(parser=command, module=name.replace("-", "_"))
        add_switches(command, ("--traceback", "print the Python traceback of an error"))
        if add_arguments is not None:
            add_arguments(command)
    return parser


def _add_run(parser: SuggestingParser) -> None:
    add_checkpoint(parser, verbose=True, output=True)
    _add_prompts(parser, DEFAULT_NEW_TOKENS)
    text = "also measure how many times faster than K = 0 the drafts are"
    add_switches(parser, ("--compare", text))
    _add_sampling(parser)
    shown = "a power of two that holds the prompts"
    ignore = ("--ignore-eos", "do not stop at the end-of-sequence ids")
    add_switches(parser.further("further options"), ignore)
    add_compile_options(parser, cache=True, ranks=True, batch_buckets=shown)


def _add_sampling(parser: SuggestingParser) -> None:
    group = parser.add_argument_group("sampling (default: greedy decoding)")
    further = parser.further("further sampling options")
    for name, *row in _SAMPLING:
        place = further if name in ("top_k", "min_p") else group
        add_values(place, (f"--{name.replace('_', '-')}", *row))


def _add_chat(parser: SuggestingParser) -> None:
    add_checkpoint(parser, verbose=True)
    add_values(
        parser,
        ("--system", str, "TEXT", "the message that begins the conversation"),
        ("--chat-template", Path, "FILE", "Jinja template (default: the checkpoint's)"),
        ("--max-new-tokens", positive, "N", "tokens of an answer (default: what max-len leaves)"),
    )
    _add_sampling(parser)
    add_compile_options(parser, cache=True, batch_buckets="1")


def _add_completion(parser: SuggestingParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="your shell")


def _add_serve(parser: SuggestingParser) -> None:
    add_checkpoint(parser, verbose=True)
    group = parser.group("server")
    key = group.add_mutually_exclusive_group()
    text = "key that clients must send; other users of this machine can see it in ps"
    add_values(key, ("--api-key", str, "KEY", text))
    text = "file whose first line is the key (default: MTPC_API_KEY, if it is set)"
    add_values(key, ("--api-key-file", Path, "FILE", text))
    add_fields(parser, ServerOptions)
    text = "ignored, for vLLM's users: tools are on if the format of tool calls is known"
    add_switches(group, ("--enable-auto-tool-choice", text))
    shown = "auto, built while it serves; without a cache 3"
    add_compile_options(parser, cache=True, ranks=True, spec_tokens=shown)


def _add_bench(parser: SuggestingParser) -> None:
    add_checkpoint(parser, verbose=True, output=True)
    _add_prompts(parser, BENCH_NEW_TOKENS)
    text = "also measure each K with this pass enabled; repeatable"
    parser.add_argument("--compare", action="append", metavar="PASS", help=text)
    text = "rounds of measurements; each round runs every variant once"
    add_values(parser, ("--repeats", positive, "N", text, 3))
    for flag, kind, metavar, text in (
        ("length", acceptance_length, "L|NAME", "tokens per step, or a golden length by name"),
        ("rates", shares, "P,P,..", "the share of steps that accept each draft and all before it"),
    ):
        text = f"accept drafts whatever they are: {text}. The text is then not the model's"
        add_values(parser, (f"--synthetic-acceptance-{flag}", kind, metavar, text))
    add_values(parser, ("--plot", Path, "FILE", "draw speed and acceptance by K: PNG or SVG"))
    shown: dict[str, Any] = {"spec_tokens": _K, "batch_buckets": "the number of prompts"}
    add_compile_options(parser, several_k=True, ranks=True, **shown)
    add_fields(parser, CompileOptions, "cache_dir")


def _add_eval(parser: SuggestingParser) -> None:
    add_checkpoint(parser, verbose=True, output=True)
    text = "questions (.jsonl), or a task of lm-evaluation-harness: a name, or its .yaml"
    parser.add_argument("--task", required=True, metavar="FILE|NAME", help=text)
    add_values(parser, ("--limit", positive, "N", "take the first N questions only"))
    _add_new_tokens(parser, 64, "question of a file")
    text = "leave out transformers, which is slow"
    parser.add_argument("--no-transformers", action="store_false", dest="transformers", help=text)
    add_values(parser, ("--out", Path, "FILE", "write rows, texts and scores as JSON"))
    several: dict[str, Any] = {"backend": "auto, or several as eager,cpu", "spec_tokens": _K}
    add_compile_options(parser, cache=True, several_k=True, **several)


def _add_check(parser: SuggestingParser) -> None:
    add_checkpoint(parser, output=True)
    _add_prompts(parser, BENCH_NEW_TOKENS)
    text = (
        "a smaller accepted share of first drafts means that the MTP layers belong to another model"
    )
    add_values(parser, ("--floor", float, "P", text, ACCEPTANCE_FLOOR))
    add_compile_options(parser, backend="eager", batch_buckets="the number of prompts")


def _add_prompts(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    prompt: dict[str, Any] = {"action": "append", "dest": "prompts"}
    parser.add_argument(
        "-p", "--prompt", **prompt, metavar="TEXT", help="a prompt; repeat the option for a batch"
    )
    parser.add_argument(
        "--ids", **prompt, type=ids, metavar='"1 2 3"', help="a prompt as token ids"
    )
    _add_new_tokens(parser, new_tokens, "prompt")


def _add_new_tokens(parser: argparse.ArgumentParser, count: int, what: str) -> None:
    text = f"new tokens per {what} (default: %(default)s)"
    add = parser.add_argument
    add("-n", "--max-new-tokens", type=positive, default=count, metavar="N", help=text)


def _add_build(parser: SuggestingParser) -> None:
    add_checkpoint(parser, verbose=True, output=True)
    text = "the cache directory (default: MTPC_CACHE_DIR, else the user's)"
    parser.add_argument("--out", type=Path, dest="cache_dir", metavar="DIR", help=text)
    text = "also build verify and propose as separate graphs, for hosts that schedule"
    add_switches(parser, ("--split", text))
    text = "processes (default: one per core, if memory holds the weights once per process)"
    add_values(parser, ("--jobs", positive, "N", text))
    parser.add_argument(
        "--target",
        action="append",
        metavar="NAME",
        help="instead, compile the steps' Triton kernels for this GPU (as hip:gfx942 or cuda:90: "
        "docs/gpu.md), which this machine need not have; repeatable. The GPU's machine can use the "
        "kernels only with the same wheel of Triton and the same Python",
    )
    add_compile_options(parser, several_k=True, ranks=True, backend="cpu")


def _add_cache(parser: SuggestingParser) -> None:
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
            text = "print the graph after this pass; 'traced' prints the graph before all passes"
            action.add_argument("--graph", metavar="PASS", help=text)
        elif name == "why":
            add_checkpoint(action)
            add_compile_options(action)
        elif name == "prune":
            add_switches(action, ("--all", "remove every entry"))
            text = "also remove entries older than this"
            add_values(action, ("--older-than", float, "DAYS", text))
            add_switches(action, ("--dry-run", "remove nothing, and show what would be removed"))
        add_fields(action, CompileOptions, "cache_dir")


def _add_inspect(parser: SuggestingParser) -> None:
    add_checkpoint(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--after", metavar="PASS", help="stop after this pass (default: the last)")
    where.add_argument("--before", metavar="PASS", help="stop before this pass")
    phases, text = ("decode", "prefill"), "which step to show (default: %(default)s)"
    parser.add_argument("--phase", choices=phases, default=phases[0], help=text)
    add_values(parser, ("--batch", int, "R", "its requests", 1))
    add_switches(parser, ("--nodes", "print every node of the graph"))
    add_switches(parser, ("--certificate", "print what is proven of every value of the step"))
    add_values(parser, ("--svg", Path, "FILE", "draw the step to a file"))
    text = "show the step of the first of N ranks (default: 1)"
    add_values(parser, ("--tensor-parallel-size", positive, "N", text))
    add_compile_options(parser, threads=False)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "checkpoint of plain weights, a GGUF file, or an id of the Hugging Face hub"
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    add("out", type=Path, metavar="OUT", help="the new directory, or the new GGUF file")
    add("--scheme", required=True, metavar="SCHEME", help=f"one of {', '.join(SCHEMES)}")
    text = "text that shows which inputs are large; without FILE, Python's help topics"
    add("--calibration", nargs="?", type=Path, const=Path(), metavar="FILE", help=text)
    text = "bits a weight on average: more than the scheme's where it pays most; calibrates"
    add("--bits", type=float, metavar="B", help=text)
    text = "quantise output heads, too: vLLM reads them since March 2026, SGLang does not"
    add_switches(parser, ("--head", text))
    text = "leave modules of these names plain, as '*.self_attn.*'; repeatable"
    add("--keep", action="append", metavar="PATTERN", help=text)


def _add_graft(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("base", "checkpoint with MTP layers, of which the fine-tune was made"),
        ("finetune", "checkpoint that lost them, or holds broken ones"),
    ):
        parser.add_argument(name, type=Path, metavar=name.upper(), help=text)
    parser.add_argument("out", type=Path, metavar="OUT", help="the new directory")


def _add_vocab(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "checkpoint with the tokenizer (default: the demo model)"
    add_values(parser, ("--checkpoint", Path, "DIR", text))
    add("texts", nargs="+", type=Path, metavar="TEXT", help="text files whose tokens are counted")
    text = "keep the N most frequent tokens (default: all)"
    add("-n", "--tokens", type=positive, metavar="N", help=text)
    text = "output file, one id per line"
    add("--out", type=Path, required=True, metavar="FILE", help=text)


def _add_models(parser: argparse.ArgumentParser) -> None:
    text = "classes of transformers, as LlamaForCausalLM: say whether each runs, or why it does not"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    add_switches(parser, ("--all", "ask every causal LM class of transformers; takes a minute"))


def _add_plan(parser: SuggestingParser) -> None:
    text = "hub id, or directory with config.json and perhaps *.safetensors (headers are read)"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    shared = "devices that share one replica of the model (default: all)"
    add_values(
        parser,
        ("--devices", positive, "N", "devices in all", 1),
        ("--tensor-parallel-size", positive, "N", shared),
        ("--memory", size, "SIZE", "memory of one device (default: the device's)"),
        ("--bandwidth", size, "RATE", "its memory bandwidth (default: the device's)"),
        ("--link-bandwidth", size, "RATE", "its bandwidth to others, one way (default: known)"),
        ("--collective-latency", microseconds, "US", "latency of a collective, assumed", 10.0),
        ("--batch", counts(1), "R,R", "requests of a step", "1,64"),
        ("--spec-tokens", counts(0), "K,K", f"drafts per step (default: {_K})"),
    )
    add_fields(parser, CompileOptions, *FIELDS, max_len=f"{DEFAULT_LEN}, or the model's most")
    text = "device with published figures (default: %(default)s)"
    parser.add_argument("--device", choices=DEVICE_NAMES, default=DEVICE_NAMES[0], help=text)
    text = "give each device whole experts, by transformers' expert plan"
    add_switches(parser, ("--enable-expert-parallel", text))
