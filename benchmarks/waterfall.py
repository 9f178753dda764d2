"""Where a decode step's time goes: its memory limit, then the time beyond it, largest part first.

    python -m benchmarks.waterfall --spec-tokens 0 3 --batches 1 8

The whole step is timed without a profiler, and the bandwidth is measured before and after. A second
run under torch's profiler gives each operator's share, which is scaled to the time without it. The
rest is time between operators, and host work between steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.machine import CpuWatch
from benchmarks.harness.tables import Row, TableForm, fields

LINEARS = tuple(
    f"mtpc_cpu::{name}"
    for name in ("packed_linear", "packed_linear_max", "packed_gated_linear", "linear_chain",
                 "packed_head_linear", "packed_experts", "float32_linear", "grouped_linear",
                 "grouped_linear_max", "grouped_gated_linear", "grouped_experts")
)  # fmt: skip
PROMPT_TOKENS, HEADROOM, WARM_UP_STEPS = 32, 8, 3


def measure(run: Run) -> Iterator[list[Row]]:
    """The parts of a step, for each K and batch."""
    args, checkpoint = run.args, run.write_mimo()
    for k in args.spec_tokens:
        run.tell(f"compile K={k}")
        model = mtpc.compile(
            checkpoint.directory,
            spec_tokens=k,
            batch_buckets=tuple(args.batches),
            max_len=PROMPT_TOKENS + (k + 1) * (args.steps * 2 + WARM_UP_STEPS + HEADROOM),
            prefill_chunk=PROMPT_TOKENS,
            backend="cpu",
        )
        for batch in args.batches:
            run.tell(f"measure K={k} batch {batch}")
            yield _waterfall(model, batch, checkpoint.step_bytes(k), run)


def _waterfall(model: mtpc.SpecModel, batch: int, bytes_read: int, run: Run) -> list[Row]:
    engine, steps = model.engine, run.args.steps
    new_tokens = engine.options.max_len - PROMPT_TOKENS
    ids = [engine.add(prompt, new_tokens) for prompt in run.prompts(batch, PROMPT_TOKENS)]
    before = engine.stats.decode_steps
    while engine.stats.decode_steps < before + WARM_UP_STEPS:
        engine.step()
    watch, bandwidth = CpuWatch(), run.probe.read()
    seconds = median(_timed(engine) for _ in range(steps))
    bandwidth = (bandwidth + run.probe.read()) / 2
    if watch.foreign_share() > run.args.max_foreign:
        run.tell(f"disturbed: others used {watch.foreign_share():.0%} of the CPU")
    parts = _parts(seconds, bytes_read / bandwidth, _profiled_shares(engine, steps))
    for request_id in ids:
        engine.abort(request_id)
    case = dict(spec_tokens=engine.options.spec_tokens, batch=batch)
    return [
        {**case, "part": name, "ms": 1e3 * spent, "share": spent / seconds} for name, spent in parts
    ]


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


def _parts(seconds: float, limit: float, shares: Counter[str]) -> list[tuple[str, float]]:
    """Seconds of the whole step, of the limit, then those beyond it, largest part first."""
    ops = {name: share * seconds for name, share in shares.items() if "::" in name}
    linears = sum(ops.pop(name, 0.0) for name in LINEARS)
    top = {"linears beyond the limit": linears - limit}
    for name, spent in ops.items():
        part = name.removeprefix("mtpc_cpu::") if name.startswith("mtpc_cpu::") else "torch's own"
        top[part] = top.get(part, 0.0) + spent
    top["the rest"] = seconds - limit - sum(top.values())
    ordered = sorted(top.items(), key=lambda item: item[1], reverse=True)
    return [("whole step", seconds), ("limit", limit), *ordered]


FORM = TableForm(
    "A decode step",
    (*fields("K=spec_tokens, batch, part, ms:.2f, share:.0%"),),
    (
        "limit: reading the step's weights once each at the bandwidth around the measurement.",
        "linears beyond it: compute where rows are many, threads that start and wait, norms in "
        "chains.",
        "the rest: what stands between operators, and the host.",
    ),
)
BENCHMARK = Benchmark(
    "waterfall",
    __doc__,
    measure,
    FORM.of,
    (*command.DECODING, "--shape"),
    dict(spec_tokens=[0, 1, 3], batches=[1, 8]),
    {"--steps": command.NUMBER | dict(default=16, help="decode steps a measurement")},
)
main, table = BENCHMARK.commands(__name__)
