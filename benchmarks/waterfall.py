"""Where a decode step's time goes: its memory limit, then the time beyond it, largest part first.

    python -m benchmarks.waterfall --spec-tokens 0 3 --batches 1 8
    python -m benchmarks.waterfall --quantize int4-g32

The whole step is timed without a profiler, and the bandwidth is measured before and after. A second
run under torch's profiler gives each operator's share, which is scaled to the time without it. The
rest is time between operators, and host work between steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

import mtpc
from benchmarks.harness import command
from benchmarks.harness.machine import BandwidthProbe, CpuWatch
from benchmarks.harness.models import Checkpoint
from benchmarks.harness.results import Record, Table, publish
from benchmarks.harness.sampling import Plan, Tell
from mtpc.config import SCHEMES

COLUMNS = ("K", "batch", "part", "ms", "share")
LINEARS = tuple(
    f"mtpc_cpu::{name}"
    for name in ("packed_linear", "packed_linear_max", "packed_gated_linear", "linear_chain",
                 "packed_head_linear", "packed_experts", "float32_linear", "grouped_linear",
                 "grouped_linear_max", "grouped_gated_linear", "grouped_experts")
)  # fmt: skip
PROMPT_TOKENS, HEADROOM, WARM_UP_STEPS = 32, 8, 3
NOTES = (
    "limit: reading the step's weights once each at the bandwidth around the measurement.",
    "linears beyond it: compute where rows are many, threads that start and wait, norms in chains.",
    "the rest: what stands between operators, and the host.",
)


@dataclass(frozen=True)
class Part:
    """One bar of the waterfall."""

    spec_tokens: int
    batch: int
    part: str
    ms: float
    share: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _parse(argv)
    tell, probe = command.teller(), BandwidthProbe()
    parts: list[Part] = []
    with command.working_directory(args.workdir) as workdir:
        checkpoint = command.write_mimo(args, workdir, tell)
        source = checkpoint.directory
        if args.quantize:
            source = checkpoint.write_quantised(args.quantize, workdir)
            checkpoint = checkpoint.quantised(args.quantize)
        for k in args.spec_tokens:
            parts += _measure(source, checkpoint, k, args, probe, tell)
    publish("waterfall", args, {"rows": [asdict(part) for part in parts]}, table)
    return 0


def table(record: Record) -> Table:
    """A record's table."""
    cells = [
        [str(p.spec_tokens), str(p.batch), p.part, f"{p.ms:.2f}", f"{p.share:.0%}"]
        for p in (Part(**row) for row in record["rows"])
    ]
    return Table("A decode step", COLUMNS, cells, NOTES)


def _measure(
    source: Path,
    checkpoint: Checkpoint,
    k: int,
    args: argparse.Namespace,
    probe: BandwidthProbe,
    tell: Tell,
) -> list[Part]:
    tell(f"compile K={k}")
    model = mtpc.compile(
        source,
        spec_tokens=k,
        batch_buckets=tuple(args.batches),
        max_len=PROMPT_TOKENS + (k + 1) * (args.steps * 2 + WARM_UP_STEPS + HEADROOM),
        prefill_chunk=PROMPT_TOKENS,
        backend="cpu",
    )
    parts = []
    for batch in args.batches:
        tell(f"measure K={k} batch {batch}")
        parts += _waterfall(model, batch, checkpoint.step_bytes(k), args, probe, tell)
    return parts


def _waterfall(
    model: mtpc.SpecModel,
    batch: int,
    bytes_read: int,
    args: argparse.Namespace,
    probe: BandwidthProbe,
    tell: Tell,
) -> list[Part]:
    engine = model.engine
    plan = Plan(PROMPT_TOKENS, 0, 0, 0, seed=0)
    new_tokens = engine.options.max_len - PROMPT_TOKENS
    ids = [engine.add(prompt, new_tokens) for prompt in plan.prompts(batch, engine.vocab_size)]
    before = engine.stats.decode_steps
    while engine.stats.decode_steps < before + WARM_UP_STEPS:
        engine.step()
    watch, bandwidth = CpuWatch(), probe.read()
    seconds = median(_timed(engine) for _ in range(args.steps))
    bandwidth = (bandwidth + probe.read()) / 2
    if watch.foreign_share() > args.max_foreign:
        tell(f"disturbed: others used {watch.foreign_share():.0%} of the CPU")
    shares = _profiled_shares(engine, args.steps)
    for request_id in ids:
        engine.abort(request_id)
    return _parts(engine.options.spec_tokens, batch, seconds, bytes_read / bandwidth, shares)


def _timed(engine: Any) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def _profiled_shares(engine: Any, steps: int) -> Counter[str]:
    """Operators' shares of the time of steps under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        total = sum(_timed(engine) for _ in range(steps))
    shares: Counter[str] = Counter()
    for event in record.key_averages():
        shares[event.key] += event.self_cpu_time_total / 1e6 / total
    return shares


def _parts(k: int, batch: int, seconds: float, limit: float, shares: Counter[str]) -> list[Part]:
    """The limit, then the time beyond it, largest part first."""
    ops = {name: share * seconds for name, share in shares.items() if "::" in name}
    linears = sum(ops.pop(name, 0.0) for name in LINEARS)
    top = {"linears beyond the limit": linears - limit}
    for name, spent in ops.items():
        part = name.removeprefix("mtpc_cpu::") if name.startswith("mtpc_cpu::") else "torch's own"
        top[part] = top.get(part, 0.0) + spent
    top["the rest"] = seconds - limit - sum(top.values())
    ordered = sorted(top.items(), key=lambda item: item[1], reverse=True)
    rows = [("whole step", seconds), ("limit", limit), *ordered]
    return [Part(k, batch, name, 1e3 * spent, spent / seconds) for name, spent in rows]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "waterfall", __doc__, *command.FILES, "--shape", "--max-foreign", spec_tokens=[0, 1, 3],
        batches=[1, 8],
    )  # fmt: skip
    add = parser.add_argument
    add("--quantize", choices=SCHEMES, metavar="SCHEME", help="measure a quantised copy")
    help_ = "decode steps a measurement"
    add("--steps", type=command.positive, default=16, metavar="N", help=help_)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
