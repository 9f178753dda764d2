"""Milliseconds per decode step and tokens per second of mtpc and other engines, in one run.

    python -m benchmarks.decode                      # the 0.5B shape, batches 1 4 8, K = 0..3
    python -m benchmarks.decode --vllm-python VENV/bin/python
    python -m benchmarks.decode --quantize int4-g32 int8 --llama-bench DIRECTORY --no-peers
    python -m benchmarks.decode --shape tiny --backend eager --batches 1 2 --spec-tokens 0 1

For each workload (a model with random or accepting weights) one set of weights is loaded, every
engine and every K runs on it, and samples are taken in rounds. Then everything is freed before the
next workload. GLM-4 is there for transformers' `generate(use_mtp=True)`, which drafts at batch 1.
Shapes with experts or latent attention run on demand: `--workloads glm4-moe-random
deepseek-random`. So does the demo model, `--workloads demo`, whose acceptance depends on the text.
llama.cpp decodes dense MiMo without drafts (K = 0). For Qwen3.5, llama-server drafts with each K:
`--workloads qwen3_5-accepting --quantize int4-g32 --llama-bench DIRECTORY --no-peers --no-int8`.
With `--quantize`, vLLM runs the quantised copies in place of the plain weights, and drafts nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.decoders import (
    Decoder,
    MtpcDecoder,
    Prompts,
    TransformersDecoder,
    opened,
)
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import (
    HYBRID_SHAPES,
    MOE_SHAPES,
    SHAPES,
    Checkpoint,
    Shape,
    demo,
    text_prompts,
    write_checkpoint,
)
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Record,
    Table,
    publish_parts,
    sample_counts,
)
from benchmarks.harness.sampling import Case, Plan, Row, Tell, measure
from benchmarks.peers.llama_decoder import LlamaDecoder, llama_decoders
from benchmarks.peers.llama_server import server_decoders
from benchmarks.peers.vllm_decoder import VLLM, vllm_decoders
from mtpc import Progress
from mtpc.cli.parsing import acceptance_length
from mtpc.config import SCHEMES

INT8 = "mtpc, int8 drafts"
"""mtpc with the pass quantise-draft."""
LONG_STAGES = ("trace model", "lower")
"""Stages of compilation that are reported."""
FEWEST_NEW_TOKENS = 8
"""The fewest new tokens: the first and the last steps are not timed."""


@dataclass(frozen=True)
class Workload:
    """A model, its weights, and what to run on it.

    Attributes:
        model: family name.
        weights: "random", "accepting", or "demo": the demo model, with text as prompts.
        is_peer: whether it is for comparing with transformers' drafts (K = 1, batch 1).
        shapes: the model's sizes by name.
    """

    model: str
    weights: str
    is_peer: bool = False
    shapes: Mapping[str, Shape] = field(default_factory=lambda: SHAPES)

    def spec_tokens(self, asked: Sequence[int]) -> tuple[int, ...]:
        """The requested values of K that this workload runs."""
        return tuple(k for k in asked if k <= 1) if self.is_peer else tuple(asked)


WORKLOADS = {
    "mimo-random": Workload("mimo", "random"),
    "mimo-accepting": Workload("mimo", "accepting"),
    "glm4-random": Workload("glm4_moe", "random", is_peer=True),
    "glm4-accepting": Workload("glm4_moe", "accepting", is_peer=True),
    "glm4-moe-random": Workload("glm4_moe", "random", shapes=MOE_SHAPES),
    "glm4-moe-accepting": Workload("glm4_moe", "accepting", shapes=MOE_SHAPES),
    "deepseek-random": Workload("deepseek_v3", "random", shapes=MOE_SHAPES),
    "deepseek-accepting": Workload("deepseek_v3", "accepting", shapes=MOE_SHAPES),
    "qwen3_5-random": Workload("qwen3_5", "random", shapes=HYBRID_SHAPES),
    "qwen3_5-accepting": Workload("qwen3_5", "accepting", shapes=HYBRID_SHAPES),
    "demo": Workload("glm4_moe", "demo"),
}
DEFAULT = ("mimo-random", "mimo-accepting", "glm4-random")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell, probe = command.begin(args), BandwidthProbe(args.probe_mib << 20)
    with command.working_directory(args.workdir) as workdir:
        parts = (_measure(WORKLOADS[n], workdir / n, args, probe, tell) for n in args.workloads)
        publish_parts("decode", args, parts, table)
    return 0


def _measure(
    workload: Workload, directory: Path, args: argparse.Namespace, probe: BandwidthProbe, tell: Tell
) -> list[Row]:
    """Measure all rows of one workload, after what the previous one has left is freed."""
    gc.collect()
    plan = command.plan_of(args)
    checkpoint, prompts = _prepare(workload, directory, plan, args, tell)
    weights = workload.weights + _dictated(args)
    with opened(_decoders(workload, checkpoint, directory.parent, args, tell)) as decoders:
        cases = [
            Case(workload.model, weights, d, batch, _step_bytes(checkpoint, d, batch))
            for d in decoders
            for batch in args.batches
            if d.largest_batch is None or batch <= d.largest_batch
        ]
        return measure(cases, plan, prompts, probe, tell)


def _step_bytes(checkpoint: Checkpoint, decoder: Decoder, batch: int) -> int:
    """The bytes that a step of a decoder reads."""
    if isinstance(decoder, LlamaDecoder):
        return decoder.step_bytes(checkpoint.embedding_bytes)
    engine, _, scheme = decoder.engine.partition(" ")
    weights = checkpoint.quantised(scheme) if scheme in SCHEMES else checkpoint
    if engine == VLLM:
        weights = replace(weights, head_bytes=checkpoint.head_bytes)
    return weights.step_bytes(decoder.spec_tokens, decoder.engine == INT8, batch)


def _prepare(
    workload: Workload, directory: Path, plan: Plan, args: argparse.Namespace, tell: Tell
) -> tuple[Checkpoint, Prompts]:
    """The checkpoint, and prompts for the largest batch."""
    count = max(args.batches)
    if workload.weights == "demo":
        checkpoint = demo()
        return checkpoint, text_prompts(checkpoint.directory, count, plan.prompt_tokens)
    shape = workload.shapes[args.shape]
    tell(f"write {directory}")
    accepting = workload.weights == "accepting"
    checkpoint = write_checkpoint(directory, workload.model, shape, accepting, args.seed)
    return checkpoint, plan.prompts(count, shape.vocab_size)


def _decoders(
    workload: Workload, checkpoint: Checkpoint, workdir: Path, args: argparse.Namespace, tell: Tell
) -> Iterator[Decoder]:
    """Make a decoder for every engine and K, on one set of weights.

    Args:
        workload: the workload.
        checkpoint: its weights.
        workdir: directory for quantised checkpoints, and for vLLM's caches and logs.
        args: the command line.
        tell: receives lines of progress.
    """
    target = checkpoint.load_target()
    numbers = workload.spec_tokens(args.spec_tokens)
    if args.peers:
        drafting = numbers if workload.is_peer else (0,)
        yield from (TransformersDecoder(target, k) for k in drafting)
    for k in numbers:
        yield _compile(target, k, args, tell)
        if k > 0 and args.int8 and not workload.is_peer:
            yield _compile(target, k, args, tell, INT8)
        for scheme in args.quantize:
            source = checkpoint.write_quantised(scheme, workdir)
            yield _compile(source, k, args, tell, f"mtpc {scheme}")
    if args.llama_bench and workload.model == "mimo":
        tell("write GGUF files")
        yield from llama_decoders(args.llama_bench, args.gguf_python, checkpoint.directory)
    if args.llama_bench and workload.model == "qwen3_5":
        tell("write GGUF files")
        yield from server_decoders(args.llama_bench, checkpoint.directory, numbers)
    if args.vllm_python:
        tell("start vLLM")
        sizes = (command.max_len(args), max(args.batches), workdir, args.vllm_relaunch)
        if not args.quantize:
            yield from vllm_decoders(args.vllm_python, checkpoint.directory, numbers, *sizes)
        for scheme in args.quantize:  # Its MiMo reads no quantised head.
            source = checkpoint.write_quantised(scheme, workdir, head=False)
            yield from vllm_decoders(args.vllm_python, source, (0,), *sizes, f"{VLLM} {scheme}")


def _dictated(args: argparse.Namespace) -> str:
    """The synthetic acceptance that the rows' weights stand for, for the table."""
    length = args.synthetic_acceptance_length
    return "" if length is None else f", synthetic {length}"


def _compile(
    target: Any,
    spec_tokens: int,
    args: argparse.Namespace,
    tell: Tell,
    engine: str = "mtpc",
) -> MtpcDecoder:
    """Compile a model: decode steps for the requested batches, and a prefill step."""

    def listen(progress: Progress) -> None:
        if progress.stage in LONG_STAGES:
            step = progress.key or f"{progress.total} steps"
            tell(f"compile {engine} K={spec_tokens}: {progress.stage}, {step}")

    return MtpcDecoder.compile(
        target,
        engine,
        progress=listen,
        spec_tokens=spec_tokens,
        **command.decode_options(args),
        enabled_passes=("quantise-draft",) if engine == INT8 else (),
        synthetic_acceptance_length=args.synthetic_acceptance_length if spec_tokens else None,
    )


NOTES = (
    "ms/step: one decode step (K drafts verified, K proposed) without prefill; medians.",
    "of plain step: ms/step over the same engine's at K = 0, same model, weights and batch.",
    "over plain: tokens/s over the same engine's at K = 0, same model, weights and batch.",
    "over vLLM: tokens/s over vLLM's CPU build at the same K, same model, weights and batch; "
    "(memory ...) where the bandwidth was that much faster or slower for this row than for vLLM's.",
    "over Q4_0: tokens/s over llama.cpp's of the same weights in that type, which decodes plainly.",
    "over transformers: tokens/s over generate at K = 0, same model, weights and batch.",
    "over use_mtp: tokens/s over generate(use_mtp=True) at batch 1, same K, model and weights.",
    "limit ms: the time that reading the step's weights takes at the bandwidth around the sample: "
    "the target once, the MTP layer K times, the head K + 1 times.",
    "of the memory limit: limit ms over ms/step.",
    "The limit counts a mixture's experts as if rows chose independently. Similar rows choose "
    "fewer experts.",
    "The limit means nothing for a model that the caches hold, such as the demo model.",
    "Where vLLM was started anew for each round (--vllm-relaunch), its best sample counts.",
    SAMPLES_NOTE,
)
COMPARABLE = 1.1
"""The cell of a ratio is marked if the bandwidths of its two rows differ by more than this."""

_PlainKey = tuple[str, str, str, int]
"""Engine, model, weights, batch."""
_Cells = Callable[[Row, "_Baselines"], str]


class _Baselines:
    """Finds the rows with which others are compared."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._all = {(row.spec_tokens, *_plain_key(row, row.engine)): row for row in rows}
        self._plain = {_plain_key(row, row.engine): row for row in rows if row.spec_tokens == 0}

    def ratio(self, row: Row, engine: str | None = None) -> str:
        """Tokens/s of a row relative to plain decoding, of its own engine by default."""
        plain = self._plain.get(_plain_key(row, engine or row.engine.split(",")[0]))
        return f"{row.tokens_per_s / plain.tokens_per_s:.2f}x" if plain else "-"

    def step_ratio(self, row: Row) -> str:
        """Milliseconds per step of a row relative to its own engine's plain decoding."""
        plain = self._plain.get(_plain_key(row, row.engine.split(",")[0]))
        return f"{row.ms_per_step / plain.ms_per_step:.2f}" if plain else "-"

    def same(self, row: Row, engine: str) -> str:
        """Tokens/s of a row relative to an engine with the same K."""
        key = _plain_key(row, engine)
        other = self._all.get((row.spec_tokens, *key))
        faster = row.bandwidth_gb_s / other.bandwidth_gb_s if other else 1.0
        is_comparable = 1 / COMPARABLE <= faster <= COMPARABLE
        return self._over(row, key) + ("" if is_comparable else f" (memory {faster:.2f}x)")

    def use_mtp(self, row: Row) -> str:
        """Tokens/s of a row relative to transformers' `use_mtp`, which takes one request."""
        return self._over(row, _plain_key(row, "transformers", 1)) if row.spec_tokens else "-"

    def _over(self, row: Row, plain_key: _PlainKey) -> str:
        other = self._all.get((row.spec_tokens, *plain_key))
        return f"{row.tokens_per_s / other.tokens_per_s:.2f}x" if other else "-"


def _plain_key(row: Row, engine: str, batch: int | None = None) -> _PlainKey:
    return engine, row.model, row.weights, batch or row.batch


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


COLUMNS: dict[str, _Cells] = {
    "model": lambda row, _: row.model,
    "weights": lambda row, _: row.weights,
    "engine": lambda row, _: row.engine,
    "K": lambda row, _: str(row.spec_tokens),
    "batch": lambda row, _: str(row.batch),
    "ms/step": lambda row, _: f"{row.ms_per_step:.2f}",
    "tokens/s": lambda row, _: f"{row.tokens_per_s:.1f}",
    "accepted": lambda row, _: _percent(row.acceptance_rate),
    "of plain step": lambda row, plain: plain.step_ratio(row),
    "over plain": lambda row, plain: plain.ratio(row),
    "over Q4_0": lambda row, plain: plain.ratio(row, "llama.cpp Q4_0"),
    "over transformers": lambda row, plain: plain.ratio(row, "transformers"),
    "over use_mtp": lambda row, plain: plain.use_mtp(row),
    "over vLLM": lambda row, plain: plain.same(row, "vLLM"),
    "GB/s": lambda row, _: f"{row.bandwidth_gb_s:.1f}",
    "limit ms": lambda row, _: f"{row.roofline_ms:.2f}",
    "of the memory limit": lambda row, _: _percent(row.efficiency),
    "samples": lambda row, _: sample_counts(row),
}


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table; rows of one model, engine and K are adjacent."""
    baselines = _Baselines(rows)
    return [[cell(row, baselines) for cell in COLUMNS.values()] for row in rows]


def table(record: Record) -> Table:
    """A record's table, without empty columns."""
    rows = [Row(**row) for row in record["rows"]]
    lines = cells(rows)
    told = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in lines)]
    shown = [[line[i] for i in told] for line in lines]
    return Table("Decoding", [list(COLUMNS)[i] for i in told], shown, NOTES)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "decode", __doc__, *command.FILES, "--shape", "--peers", *command.PEERS, "--quantize",
        "--backend", *command.SAMPLING, "--probe-mib", batches=[1, 4, 8], spec_tokens=[0, 1, 2, 3],
        prompt_tokens=32, new_tokens=96, repeats=3,
    )  # fmt: skip
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, help=f"default: {' '.join(DEFAULT)}")
    add("--int8", action=argparse.BooleanOptionalAction, default=True, help="int8 drafts, too")
    length = "accept drafts whatever they are: tokens per step, or a golden length by name"
    add("--synthetic-acceptance-length", type=acceptance_length, metavar="L|NAME", help=length)
    relaunch = "start vLLM anew for each round, and take its best sample: launches differ"
    add("--vllm-relaunch", action=argparse.BooleanOptionalAction, default=False, help=relaunch)
    args = parser.parse_args(argv)
    if args.new_tokens < FEWEST_NEW_TOKENS:
        parser.error(f"--new-tokens is {args.new_tokens}; expected at least {FEWEST_NEW_TOKENS}")
    if args.synthetic_acceptance_length is not None and args.vllm_python:
        parser.error("vLLM's CPU build refuses synthetic acceptance; leave out --vllm-python")
    if args.workloads is None:
        args.workloads = [name for name in DEFAULT if args.peers or not WORKLOADS[name].is_peer]
    return args


if __name__ == "__main__":
    sys.exit(main())
