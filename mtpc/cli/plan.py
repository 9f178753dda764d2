"""`mtpc plan`: the memory of each device, what fits, and the time of a step, on paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtpc import CompileOptions
from mtpc.cli.arguments import COMPARED_SPEC_TOKENS, DEFAULT_LEN, FIELDS
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.tables import format_bytes, print_table, say
from mtpc.errors import OptionError
from mtpc.models.from_config import announces_drafts, load_shapes
from mtpc.plan import make_plan
from mtpc.scale import ALLOWANCE, DEVICES, Device, RankModel

_PAPER = (
    "These times are computed, and have not been compared with hardware: bytes over published "
    "bandwidths, and one collective after another, without arithmetic and overlap. docs/scale.md "
    "says what mtpc itself runs on several devices."
)


def command(args: argparse.Namespace) -> int:
    """Run the subcommand; the exit code is 1 if the weights do not fit."""
    ranks = args.tensor_parallel_size or args.devices
    if args.devices % ranks:
        raise OptionError(
            f"--devices {args.devices} does not divide into replicas of {ranks}; expected a "
            "--tensor-parallel-size that divides it"
        )
    asked = {name: value for name, value in compile_options(args).items() if name in FIELDS}
    CompileOptions.parse(asked)
    device = _device(args)
    numbers = args.spec_tokens or COMPARED_SPEC_TOKENS
    if args.spec_tokens is None and not announces_drafts(args.checkpoint):
        print("note: no drafts, K = 0: the model announces no MTP layers", file=sys.stderr)
        numbers = (0,)
    shapes = load_shapes(args.checkpoint, args.dtype, max(numbers) > 0)
    scheme = args.quantize or shapes.scheme
    most = min(DEFAULT_LEN, shapes.loaded.max_positions or DEFAULT_LEN)
    given = {"batch_buckets": (1,), "max_len": most, **asked}
    models = [
        RankModel(
            shapes.loaded,
            make_plan(CompileOptions.parse({**given, "spec_tokens": k, "quantize": scheme})),
            ranks,
            args.enable_expert_parallel,
        )
        for k in numbers
    ]
    say(f"device: {device.title}")
    alone = "config.json alone, without weight files"
    origin = "headers of its files" if shapes.has_headers else alone
    counted = f"; counted in the scheme {scheme}" if scheme else ""
    say(f"weights: from {origin}{counted}")
    return _print(models, device, args)


def _print(models: Sequence[RankModel], device: Device, args: argparse.Namespace) -> int:
    largest = max(models, key=lambda model: model.plan.spec_tokens)
    ranks = largest.ranks
    print_table(
        f"A rank of {ranks}, {args.devices // ranks} replica(s), memory",
        ("what", "size"),
        [*_memory(largest, device)],
    )
    fits = largest.free(device.memory) >= 0
    if fits:
        print_table(
            f"A step of a replica, requests of {largest.plan.max_len} tokens, ms",
            ("K", "batch", "weights", "KV, state", "transfer", "latency", "step", "break-even"),
            [*_times(models, device, args.batch, args.collective_latency * 1e-6)],
        )
        say("break-even: tokens a request must emit in a step to be as fast as K = 0")
    else:
        needed = format_bytes(largest.weight_bytes + ALLOWANCE)
        say(
            f"the weights do not fit: a rank needs {needed} and has {format_bytes(device.memory)}; "
            "let more devices share a replica, or use --quantize"
        )
    say(_PAPER)
    return 0 if fits else 1


def _device(args: argparse.Namespace) -> Device:
    device = DEVICES[args.device]
    given = {"memory": args.memory, "bandwidth": args.bandwidth, "link": args.link_bandwidth}
    changes = {name: value for name, value in given.items() if value is not None}
    title = device.title + "".join(f"; {name} as given" for name in changes)
    return replace(device, title=title, **changes)


def _memory(model: RankModel, device: Device) -> Iterator[tuple[str, str]]:
    for (part, kind), nbytes in sorted(model.by_kind().items(), reverse=True):
        yield f"weights of the {'MTP layers' if part == 'mtp' else part}, {kind}", \
            format_bytes(nbytes)  # fmt: skip
    yield "weights in all", format_bytes(model.weight_bytes)
    yield "allowance for activations and workspaces", format_bytes(ALLOWANCE)
    yield "left for requests", format_bytes(max(0, model.free(device.memory)))
    yield "KV a token", format_bytes(int(model.token_bytes))
    yield "state a request", format_bytes(model.request_bytes)
    limit = model.plan.max_len
    yield f"requests of {limit} tokens that fit", str(model.largest_batch(device.memory))
    yield "tokens of one request that fit", str(model.largest_context(device.memory))


def _times(
    models: Sequence[RankModel], device: Device, batches: Sequence[int], latency: float
) -> Iterator[tuple[str, ...]]:
    """Rows of the table of step times. `break-even` compares with the model without drafts."""
    plain = next((m for m in models if m.plan.spec_tokens == 0), None)
    for batch in batches:
        base = plain.step_time(device, batch, latency).total if plain else None
        for model in models:
            k = str(model.plan.spec_tokens)
            if batch > model.largest_batch(device.memory):
                yield k, str(batch), *("",) * 4, "does not fit", ""
                continue
            time = model.step_time(device, batch, latency)
            terms = (time.weights, time.caches, time.transfer, time.latency, time.total)
            yield (
                k,
                str(batch),
                *(f"{1e3 * term:.2f}" for term in terms),
                f"{time.total / base:.2f}" if base else "",
            )
