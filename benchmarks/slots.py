"""DeepSeek-V4's attention, one call of its operator: the reference beside the C++ kernel.

    python -m benchmarks.slots                      # 64 heads of 512, a window of 128, 2,000 tokens
    python -m benchmarks.slots --heads 2 --width 16 --length 300 --seconds 0

One row and four are decode steps, of as many requests. More rows are a prefill chunk that ends at
the given length. HCA reads all closed entries of a request slot, one for 128 tokens; CSA reads 512
of those for 4 tokens. `max_len` says for how many tokens a request slot has places for entries.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.results import Record, Table, add_result_files, publish
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.models.deepseek_v4_attention import closed_windows
from mtpc.models.slot_rings import SlotRing, WindowMasks
from mtpc.step.metadata import flat_metadata
from mtpc.step.records import Metadata

WINDOW, CHOICES, DECODED = 128, 512, 4
LAYERS = (("window", 0, 0), ("HCA", 128, 8192), ("HCA", 128, 32768), ("CSA", 4, 8192))
"""Name of a layer's kind, tokens of an entry, and `max_len`."""
COLUMNS = ("layer", "max_len", "rows", "keys a row sees", "reference ms", "kernel ms", "times")
NOTES = ("ms: the best of all calls. keys: of the last row.",)


@dataclass(frozen=True)
class Row:
    """The figures of one call."""

    layer: str
    max_len: int
    rows: int
    keys: int
    reference_ms: float
    kernel_ms: float


def calls(args: argparse.Namespace) -> Iterator[tuple[str, int, int, int, tuple[Any, ...]]]:
    """Layer, `max_len`, rows, keys of the last row, and the operator's arguments, of each case."""
    for layer, ratio, max_len in LAYERS:
        for count in args.rows:
            metadata = _metadata(count, args.length)
            slots = len(metadata.state_slots) + 1
            ring = _new(slots, WINDOW, args.width)
            masks = WindowMasks.of(metadata, SlotRing(ring), WINDOW)
            keys = int(masks.ring[-1].sum() + masks.fresh[-1].sum())
            older: tuple[Tensor | None, ...] = (None, None, None)
            if ratio:
                places = max_len // ratio
                counts = closed_windows(masks.rows, ratio).clamp(max=places)
                entries = _new(slots, places, args.width)
                chosen = _choose(counts, masks.rows.slot, places) if layer == "CSA" else None
                counts = counts if chosen is None else counts.clamp(max=CHOICES)
                keys += int(counts[-1])
                older = (entries, counts, chosen)
            query, fresh = _new(count, args.heads, args.width), _new(count, args.width)
            seen = (masks.rows.slot, masks.ring, masks.fresh)
            scale = (_new(args.heads), args.width**-0.5, WINDOW)
            yield layer, max_len, count, keys, (query, fresh, ring, *seen, *scale, *older)


def _new(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def _metadata(count: int, length: int) -> Metadata:
    """Of a prefill chunk that ends at the length, or of a decode step of as many requests after
    it."""
    is_chunk = count > DECODED
    requests, rows = (1, count) if is_chunk else (count, 1)
    lens = torch.full((requests,), length - count if is_chunk else length, dtype=torch.int32)
    slots, starts = torch.arange(requests) + 1, (torch.arange(requests + 1) * rows).int()
    table = slots[:, None].int()  # A page holds all of a request.
    flat = flat_metadata(lens, slots > 0, table, starts, count, length + 1)
    return Metadata(*flat, starts, table, slots, torch.full_like(lens, rows))


def _choose(counts: Tensor, slots: Tensor, places: int) -> Tensor:
    """Random entries of each row, ascending, as `choose_slots` gives them."""
    chosen = torch.full((len(counts), min(CHOICES, places)), -1, dtype=torch.int32)
    for row, (count, slot) in enumerate(zip(counts.tolist(), slots.tolist(), strict=True)):
        picked = torch.randperm(count)[:CHOICES].sort().values
        chosen[row, : len(picked)] = picked + slot * places
    return chosen


def best_ms(call: Callable[[], Any], seconds: float) -> float:
    """The shortest time of as many calls as the time allows, but of three at least."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table."""
    return [
        [
            row.layer,
            f"{row.max_len:,}" if row.max_len else "",
            str(row.rows),
            str(row.keys),
            f"{row.reference_ms:.2f}",
            f"{row.kernel_ms:.2f}",
            f"{row.reference_ms / row.kernel_ms:.0f}x",
        ]
        for row in rows
    ]


def table(record: Record) -> Table:
    """A record's table."""
    told = record["arguments"]
    title = f"slot_attention: {told['heads']} heads of {told['width']}, {told['length']} tokens"
    return Table(title, COLUMNS, cells([Row(**row) for row in record["rows"]]), NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    load_kernels()
    torch.manual_seed(args.seed)
    rows = []
    for layer, max_len, count, keys, given in calls(args):
        reference, kernel = (
            best_ms(lambda: operator(*given), args.seconds)  # noqa: B023
            for operator in (torch.ops.mtpc.slot_attention, torch.ops.mtpc_cpu.slot_attention)
        )
        rows.append(Row(layer, max_len, count, keys, reference, kernel))
        tell(f"{layer}, {max_len}, {count} rows: {reference:.2f} and {kernel:.2f} ms")
    publish("slots", args, {"rows": [asdict(row) for row in rows]}, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("slots", __doc__)
    add = parser.add_argument
    add("--heads", type=positive, default=64, metavar="N")
    add("--width", type=positive, default=512, metavar="N", help="of a key")
    add("--length", type=positive, default=2000, metavar="N", help="tokens of each request")
    add("--rows", nargs="+", type=positive, default=[1, DECODED, 256], metavar="N")
    add("--seconds", type=float, default=1.0, metavar="S", help="for each time that is taken")
    command.add_threads(parser)
    add("--seed", type=int, default=0)
    add_result_files(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
