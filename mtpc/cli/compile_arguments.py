"""Arguments that several commands have: the checkpoint, the compile options and the graph cache.

The compile options follow from the declarations of `CompileOptions`. This module imports no torch,
so that `--help` is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpc import CompileOptions
from mtpc.cli.parsing import (
    SuggestingParser,
    add_values,
    buckets_up_to,
    draft_vocab,
    drafters,
    ids,
    number,
    numbers,
    origins,
    positive,
    speculative,
    thread_count,
    wiring,
)
from mtpc.declaration import GROUPS, Declared, declared

_PARSED: dict[str, Callable[[str], Any]] = {
    "K": number,
    "K,K": ids,
    "R,R": ids,
    "N,N": ids,
    "N": int,
    "R": int,
    "RANKS": positive,
    "N|FILE": draft_vocab,
    "RULE=VALUE,..": wiring,
    "DIR": Path,
    "FILE": Path,
    "S": float,
    "NAMES": lambda text: tuple(text.split(",")),
    "ORIGINS": origins,
    "DIR|copy|copy+DIR": drafters,
}
"""How the text of a value is parsed, by the value's name in the help; other values are text."""
_REPEATABLE = "PASS"
_CACHE, _RANKS = "cache", "tensor_parallel_size"


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `CompileOptions` that the user gave."""
    return given_fields(args, CompileOptions)


def given_fields(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The fields of a class of options that the user gave."""
    given = {name: getattr(args, name, None) for name, _ in declared(options)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def add_compile_options(
    parser: SuggestingParser,
    cache: bool = False,
    threads: bool = True,
    several_k: bool = False,
    ranks: bool = False,
    **defaults: object,
) -> None:
    """Add the options of `mtpc.compile`, by groups: with `cache` those of the graph cache, with
    `ranks` those of several ranks, with `several_k` a `--spec-tokens` that accepts a list.
    `defaults` are shown in the help for options whose default differs here."""
    for group in GROUPS:
        for name, said in declared(CompileOptions):
            is_added = ranks if name == _RANKS else cache or group != _CACHE
            if said.group == group and is_added:
                _add(parser, CompileOptions, name, said, several_k, defaults.get(name))
    _add_vllm_options(parser, several_k)
    if threads:
        text = "CPU threads (default: 1 for checkpoints under 64 MiB, else torch's choice)"
        further = parser.further("further options")
        add_values(further, ("--threads", thread_count, "N", text))


def add_fields(parser: SuggestingParser, options: type, *names: str, **defaults: object) -> None:
    """Add the options of fields of a class: of all, or those that are named, which help shows."""
    for name, said in declared(options):
        if name in names or not names:
            shown = replace(said, common=said.common or name in names)
            _add(parser, options, name, shown, default=defaults.get(name))


def _title(group: str) -> str:
    group = "graph cache" if group == _CACHE else group
    return f"{group} (compile options)" if group in GROUPS else group


def _add(
    parser: SuggestingParser,
    options: type,
    name: str,
    said: Declared,
    several_k: bool = False,
    default: object = None,
) -> None:
    """Add the option of a field, if it has a flag."""
    if not said.help:
        return
    flags, how = said.flags(name), dict[str, Any](dest=name, default=None)
    if said.metavar == _REPEATABLE:
        how |= {"action": "append", "metavar": said.metavar}
    elif said.metavar:
        several = several_k and said.metavar == "K"
        parse = numbers if several else _PARSED.get(said.metavar, str)
        how |= {"type": parse, "metavar": "K,K" if several else said.metavar}
    elif flags[0].startswith("--no-"):
        how |= {"action": "store_false"}
    else:
        is_open = getattr(options, name) is None
        how |= {"action": argparse.BooleanOptionalAction if is_open else "store_true"}
    shown = default if default is not None else _shown(getattr(options, name), said)
    how["help"] = f"{said.help} (default: {shown})" if shown else said.help
    place = parser.group if said.common else parser.further
    place(_title(said.group)).add_argument(*flags, **how)


def _shown(default: Any, said: Declared) -> str:
    """The default of a field that the help names."""
    if said.shown is not None or not said.metavar or default in (None, ()):
        return said.shown or ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _add_vllm_options(parser: SuggestingParser, several_k: bool) -> None:
    """Add vLLM's options that mtpc has in another form."""
    text = "most requests that decode at once: the same as --batch-buckets 1,2,4,..,N"
    how: dict[str, Any] = {"type": buckets_up_to, "dest": "batch_buckets", "metavar": "N"}
    parser.further(_title("batching")).add_argument("--max-num-seqs", **how, help=text)
    text = 'vLLM\'s form of --spec-tokens: \'{"method": "mtp", "num_speculative_tokens": 3}\''
    kind = (lambda text: [speculative(text)]) if several_k else speculative
    how = {"type": kind, "dest": "spec_tokens", "metavar": "JSON"}
    parser.further(_title("decoding")).add_argument("--speculative-config", **how, help=text)


def add_checkpoint(
    parser: argparse.ArgumentParser, verbose: bool = False, output: bool = False
) -> None:
    """Add the checkpoint, an optional argument, `--verbose`, and what says how to print.

    With `--json` a command sets `args.result`.
    """
    add = parser.add_argument
    text = (
        "directory with config.json and *.safetensors, or an id of the Hugging Face hub "
        "(default: the demo model)"
    )
    add("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help=text)
    if verbose:
        text = "show each stage of each step, and what the cache lacks"
        add("-v", "--verbose", action="store_true", help=text)
    if output:
        text = "print results only: no stages and no statistics"
        add("-q", "--quiet", action="store_true", help=text)
        text = "print one JSON object, and nothing else"
        add("--json", action="store_true", dest="as_json", help=text)
