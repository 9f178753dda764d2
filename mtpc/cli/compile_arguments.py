"""Arguments that several commands have: the checkpoint, the compile options and the graph cache.

This module imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from mtpc.cli.parsing import (
    SuggestingParser,
    add_switches,
    add_values,
    buckets_up_to,
    draft_vocab,
    ids,
    number,
    numbers,
    positive,
    speculative,
    threads,
    wiring,
)
from mtpc.config import KV_CACHE_DTYPES, CompileOptions
from mtpc.option_checks import SCHEMES

VLLM_NAMES = {
    "spec_tokens": "--num-speculative-tokens",
    "max_len": "--max-model-len",
    "page_size": "--block-size",
    "num_pages": "--num-gpu-blocks-override",
    "prefill_chunk": "--max-num-batched-tokens",
}
"""vLLM's names of these options."""


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `CompileOptions` that the user gave."""
    given = {f.name: getattr(args, f.name, None) for f in fields(CompileOptions)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def add_cache_dir(parser: Any) -> None:
    """Add `--cache-dir`."""
    text = "the graph cache (default: MTPC_CACHE_DIR, else the user's)"
    add_values(parser, ("--cache-dir", Path, "DIR", text))


def add_cache_options(parser: SuggestingParser) -> None:
    """Add the options of the graph cache."""
    group = parser.add_further_group("graph cache")
    add_cache_dir(group)
    no_cache: Any = {"action": "store_false", "dest": "use_cache", "default": None}
    group.add_argument("--no-cache", **no_cache, help="do not read or write the cache")
    text = "build nothing: a step that is not in the cache is an error"
    add_switches(group, ("--frozen", text), default=None)
    text = "load only the entries with this digest, which `mtpc build` prints; implies --frozen"
    group.add_argument("--require-sha256", metavar="DIGEST", help=text)


def add_output_options(parser: SuggestingParser) -> None:
    """Add `--quiet` and `--json`. With the latter a command sets `args.result`."""
    text = "print results only: no stages and no statistics"
    parser.add_argument("-q", "--quiet", action="store_true", help=text)
    text = "print one JSON object, and nothing else"
    parser.add_argument("--json", action="store_true", dest="as_json", help=text)


def add_verbose(parser: SuggestingParser) -> None:
    """Add `--verbose`."""
    text = "show each stage of each step, and what the cache lacks"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)


def add_threads(parser: SuggestingParser) -> None:
    """Add `--threads`."""
    text = "CPU threads (default: 1 for checkpoints under 64 MiB, else torch's choice)"
    group = parser.add_further_group("further options")
    add_values(group, ("--threads", threads, "N", text))


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, an optional argument."""
    text = (
        "directory with config.json and *.safetensors, or an id of the local hub cache "
        "(default: the demo model)"
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help=text)


_COMMON = ("spec_tokens", "max_len", "draft", "quantize")
"""Compile options that `--help` shows without `--help-all`."""
_SWITCHES = (
    ("--images", "compile for prompts with images, of models with a vision tower"),
    ("--batch-invariant", "on a GPU, text does not depend on K, batch or chunk; slower"),
    (
        "--build-in-background",
        "start without drafts, and use each K once another process has built its steps",
    ),
    ("--verify-passes", "check the graph with fake tensors after every pass"),
)


def add_compile_options(
    parser: SuggestingParser,
    several_k: bool = False,
    **defaults: object,
) -> None:
    """Add the options of `mtpc.compile`. `CompileOptions` has the defaults of absent options.

    Args:
        parser: the command's parser.
        several_k: whether `--spec-tokens` accepts a list.
        **defaults: default values to show in the help for options whose default differs here.
    """
    common = parser.add_argument_group("compile options")
    group = parser.add_further_group("further compile options")
    drafts = (
        "K,K" if several_k else "K",
        f"drafts per step{', one or several' * several_k}; 0 decodes plainly, auto adapts to load",
    )
    pages = f"what pages of K and V hold: {', '.join(KV_CACHE_DTYPES)}"
    for name, kind, metavar, text in (
        ("spec_tokens", numbers if several_k else number, *drafts),
        ("spec_tiers", ids, "K,K", "numbers that 'auto' chooses from (default: 0,1,2,3)"),
        ("batch_buckets", ids, "R,R", "request counts to capture"),
        ("max_len", int, "N", "longest sequence in tokens, prompt and new tokens together"),
        ("page_size", int, "N", "tokens per KV page"),
        ("num_pages", int, "N", "pages in the KV pool (default: enough for the largest bucket)"),
        ("snapshot_bytes", int, "N", "most bytes of snapshots of state that is not in KV pages"),
        ("snapshot_distance", int, "N", "tokens from one snapshot of a long prompt to the next"),
        ("kv_offload_dir", Path, "DIR", "directory for evicted KV pages, and for all at the end"),
        ("kv_offload_bytes", int, "N", "most bytes of files in --kv-offload-dir"),
        ("prefill_chunk", int, "N", "tokens per prefill step (default: 512 or 64)"),
        (
            *("busy_prefill_chunk", int, "N"),
            "prompt tokens per prefill step while others decode (default: up to 64; all on GPUs)",
        ),
        ("prefill_rows", int, "R", "requests that may share a prefill step (default: by bucket)"),
        ("backend", str, "NAME", "auto, cpu, cuda, eager or null"),
        ("draft_vocab", draft_vocab, "N|FILE", "draft only the N lowest ids, or the ids in FILE"),
        ("draft", str, "DIR|copy", "a drafter's checkpoint, or copies of a request's own text"),
        ("wiring", wiring, "RULE=VALUE,..", "rules of the MTP layers; `mtpc check` measures them"),
        ("dtype", str, "NAME", "dtype of the weights (default: the checkpoint's)"),
        ("kv_cache_dtype", str, "NAME", pages),
        ("quantize", str, "SCHEME", f"quantise weights: {', '.join(SCHEMES)}"),
    ):
        default = defaults.get(name, getattr(CompileOptions, name))
        typed = ",".join(map(str, default)) if isinstance(default, tuple) else default
        shown = "" if default in (None, ()) else f" (default: {typed})"
        flags = [f"--{name.replace('_', '-')}", *filter(None, [VLLM_NAMES.get(name)])]
        add = (common if name in _COMMON else group).add_argument
        add(*flags, type=kind, metavar=metavar, help=text + shown)
    _add_vllm_options(group, several_k)
    for flag, dest in (("--disable-pass", "disabled_passes"), ("--enable-pass", "enabled_passes")):
        text = f"{flag[2:].replace('-', ' an optional ')} by name; repeatable"
        group.add_argument(flag, action="append", dest=dest, metavar="PASS", help=text)
    add_switches(group, *_SWITCHES, default=None)
    _add_steps(group)


def _add_steps(group: Any) -> None:
    """Add when steps are launched, and what they can do in addition to greedy decoding."""
    either, text = argparse.BooleanOptionalAction, "launch a step before the previous one is read"
    shown = f"{text} (default: on GPUs, where that loses nothing)"
    group.add_argument("--async-scheduling", action=either, default=None, help=shown)
    add = partial(group.add_argument, action="store_false", default=None)
    text = "compile for greedy decoding only"
    add("--no-sampling", dest="sampling", help=text)
    text = "compile no token masks, which JSON formats, grammars and required tools need"
    add("--no-structured-outputs", dest="token_mask", help=text)
    text = "the most probable tokens that a request may ask for (default: 20)"
    add_values(group, ("--max-logprobs", int, "N", text))


def add_ranks(parser: SuggestingParser) -> None:
    """Add `--tensor-parallel-size`."""
    text = (
        "processes that share the model, each with its part of the weights (default: 1, or "
        "torchrun's)"
    )
    group = parser.add_further_group("further options")
    add_values(group, ("--tensor-parallel-size", positive, "N", text))


def _add_vllm_options(group: Any, several_k: bool) -> None:
    """Add vLLM's options that mtpc has in another form."""
    add = group.add_argument
    text = "most requests that decode at once: the same as --batch-buckets 1,2,4,..,N"
    add("--max-num-seqs", type=buckets_up_to, dest="batch_buckets", metavar="N", help=text)
    text = 'vLLM\'s form of --spec-tokens: \'{"method": "mtp", "num_speculative_tokens": 3}\''
    kind = (lambda text: [speculative(text)]) if several_k else speculative
    add("--speculative-config", type=kind, dest="spec_tokens", metavar="JSON", help=text)
