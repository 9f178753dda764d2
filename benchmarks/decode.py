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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.decoders import (
    Decoder,
    MtpcDecoder,
    Prompts,
    TransformersDecoder,
    opened,
)
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
from benchmarks.harness.rounds import decode_case, random_prompts
from benchmarks.harness.tables import SAMPLES, Column, Row, TableForm, fields, other_row, over
from benchmarks.peers.llama_decoder import KINDS, LlamaDecoder, LlamaFiles
from benchmarks.peers.llama_server import SERVED_KINDS, ConvertedFiles, ServerDecoder
from benchmarks.peers.vllm_decoder import VLLM, VllmDecoder
from mtpc import Progress
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


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of each workload, after what the previous one has left is freed."""
    for name in run.args.workloads:
        gc.collect()
        workload = WORKLOADS[name]
        checkpoint, prompts = _prepare(workload, run.workdir / name, run)
        row = dict(model=workload.model, weights=workload.weights)
        with opened(_decoders(workload, checkpoint, run)) as decoders:
            cases = [
                decode_case(
                    row,
                    decoder,
                    partial(decoder.decode, new_tokens=run.args.new_tokens),
                    prompts[:batch],
                    _step_bytes(checkpoint, decoder, batch),
                    run.probe,
                )
                for decoder in decoders
                for batch in run.args.batches
                if decoder.largest_batch is None or batch <= decoder.largest_batch
            ]
            yield run.sample(cases)


def _step_bytes(checkpoint: Checkpoint, decoder: Decoder, batch: int) -> int:
    """The bytes that a step of a decoder reads."""
    if isinstance(decoder, LlamaDecoder):
        return decoder.step_bytes(checkpoint.embedding_bytes)
    engine, _, scheme = decoder.engine.partition(" ")
    weights = checkpoint.quantised(scheme) if scheme in SCHEMES else checkpoint
    if engine == VLLM:
        weights = replace(weights, head_bytes=checkpoint.head_bytes)
    return weights.step_bytes(decoder.spec_tokens, decoder.engine == INT8, batch)


def _prepare(workload: Workload, directory: Path, run: Run) -> tuple[Checkpoint, Prompts]:
    """The checkpoint, and prompts for the largest batch."""
    args, count = run.args, max(run.args.batches)
    if workload.weights == "demo":
        checkpoint = demo()
        return checkpoint, text_prompts(checkpoint.directory, count, args.prompt_tokens)
    shape = workload.shapes[args.shape]
    run.tell(f"write {directory}")
    accepting = workload.weights == "accepting"
    checkpoint = write_checkpoint(directory, workload.model, shape, accepting, args.seed)
    return checkpoint, random_prompts(count, args.prompt_tokens, shape.vocab_size, args.seed)


def _decoders(workload: Workload, checkpoint: Checkpoint, run: Run) -> Iterator[Decoder]:
    """Make a decoder for every engine and K, on one set of weights."""
    args, target = run.args, checkpoint.load_target()
    numbers = workload.spec_tokens(args.spec_tokens)
    if args.peers:
        drafting = numbers if workload.is_peer else (0,)
        yield from (TransformersDecoder(target, k) for k in drafting)
    for k in numbers:
        yield _compile(target, k, run)
        if k > 0 and args.int8 and not workload.is_peer:
            yield _compile(target, k, run, INT8)
        for scheme in args.quantize:
            source = checkpoint.write_quantised(scheme, run.workdir)
            yield _compile(source, k, run, f"mtpc {scheme}")
    if args.llama_bench:
        yield from _llama_decoders(workload, checkpoint.directory, numbers, run)
    if args.vllm_python:
        yield from _vllm_decoders(checkpoint, numbers, run)


def _llama_decoders(
    workload: Workload, checkpoint: Path, numbers: Sequence[int], run: Run
) -> Iterator[Decoder]:
    """Of MiMo, plainly; of Qwen3.5, with each K."""
    threads, gguf, programs = torch.get_num_threads(), checkpoint / "gguf", run.args.llama_bench
    if workload.model == "mimo":
        run.tell("write GGUF files")
        plain = LlamaFiles(programs, run.args.gguf_python, checkpoint, gguf)
        yield from (LlamaDecoder(programs, plain.write(kind), kind, threads) for kind in KINDS)
    if workload.model == "qwen3_5":
        run.tell("write GGUF files")
        files = ConvertedFiles(programs, Path(sys.executable), checkpoint, gguf)
        for kind in SERVED_KINDS:
            file = files.write(kind)
            yield from (ServerDecoder(programs, file, kind, k, threads) for k in numbers)


def _vllm_decoders(checkpoint: Checkpoint, numbers: Sequence[int], run: Run) -> Iterator[Decoder]:
    run.tell("start vLLM")
    sources = [(VLLM, checkpoint.directory, k) for k in numbers]
    if run.args.quantize:  # Its MiMo reads no quantised head.
        sources = [
            (f"{VLLM} {scheme}", checkpoint.write_quantised(scheme, run.workdir, head=False), 0)
            for scheme in run.args.quantize
        ]
    for engine, source, k in sources:
        kept = run.workdir / engine.replace(" ", "-")  # Inductor's compiler takes no spaces.
        place = (source, k, run.max_len, max(run.args.batches), kept)
        yield VllmDecoder(run.args.vllm_python, *place, engine, run.args.vllm_relaunch)


def _compile(target: Any, spec_tokens: int, run: Run, engine: str = "mtpc") -> MtpcDecoder:
    """Compile a model: decode steps for the requested batches, and a prefill step."""

    def listen(progress: Progress) -> None:
        if progress.stage in LONG_STAGES:
            step = progress.key or f"{progress.total} steps"
            run.tell(f"compile {engine} K={spec_tokens}: {progress.stage}, {step}")

    return MtpcDecoder.compile(
        target,
        engine,
        progress=listen,
        spec_tokens=spec_tokens,
        **run.decode_options(),
        enabled_passes=("quantise-draft",) if engine == INT8 else (),
    )


KEYS = ("model", "weights", "engine", "spec_tokens", "batch")
COMPARABLE = 1.1
"""The cell of a ratio is marked if the bandwidths of its two rows differ by more than this."""


def _own(row: Row) -> str:
    """The engine whose plain decoding a row is compared with."""
    return str(row["engine"]).split(",")[0]


def _plain(name: str, engine: Any) -> Any:
    return over(name, KEYS, engine=engine, spec_tokens=0)


def _over_use_mtp(row: Row, rows: Sequence[Row]) -> float | None:
    ratio = over("tokens_per_s", KEYS, engine="transformers", batch=1)
    return ratio(row, rows) if row["spec_tokens"] else None


def _over_vllm(row: Row, rows: Sequence[Row]) -> str | None:
    other = other_row(row, rows, KEYS, engine=VLLM)
    if other is None:
        return None
    faster = row["bandwidth_gb_s"] / other["bandwidth_gb_s"]
    marked = "" if 1 / COMPARABLE <= faster <= COMPARABLE else f" (memory {faster:.2f}x)"
    return f"{row['tokens_per_s'] / other['tokens_per_s']:.2f}x{marked}"


BESIDE = "same model, weights and batch"
FORM = TableForm(
    "Decoding",
    (
        *fields("model, weights, engine, K=spec_tokens, batch"),
        Column(
            "ms/step", "ms_per_step", ".2f",
            "one decode step (K drafts verified, K proposed) without prefill; medians.",
        ),
        *fields("tokens/s=tokens_per_s:.1f, accepted=acceptance_rate:.0%"),
        Column(
            "of plain step", _plain("ms_per_step", _own), ".2f",
            f"ms/step over the same engine's at K = 0, {BESIDE}.",
        ),
        Column(
            "over plain", _plain("tokens_per_s", _own), ".2fx",
            f"tokens/s over the same engine's at K = 0, {BESIDE}.",
        ),
        Column(
            "over Q4_0", _plain("tokens_per_s", "llama.cpp Q4_0"), ".2fx",
            "tokens/s over llama.cpp's of the same weights in that type, which decodes plainly.",
        ),
        Column(
            "over transformers", _plain("tokens_per_s", "transformers"), ".2fx",
            f"tokens/s over generate at K = 0, {BESIDE}.",
        ),
        Column(
            "over use_mtp", _over_use_mtp, ".2fx",
            "tokens/s over generate(use_mtp=True) at batch 1, same K, model and weights.",
        ),
        Column(
            "over vLLM", _over_vllm, "",
            f"tokens/s over vLLM's CPU build at the same K, {BESIDE}; (memory ...) where the "
            "bandwidth was that much faster or slower for this row than for vLLM's.",
        ),
        Column("GB/s", "bandwidth_gb_s", ".1f"),
        Column(
            "limit ms", "roofline_ms", ".2f",
            "the time that reading the step's weights takes at the bandwidth around the sample: "
            "the target once, the MTP layer K times, the head K + 1 times.",
        ),
        Column("of the memory limit", "efficiency", ".0%", "limit ms over ms/step."),
        SAMPLES,
    ),
    (
        "The limit counts a mixture's experts as if rows chose independently. Similar rows choose "
        "fewer experts.",
        "The limit means nothing for a model that the caches hold, such as the demo model.",
        "Where vLLM was started anew for each round (--vllm-relaunch), its best sample counts.",
    ),
    hides_empty=True,
)  # fmt: skip


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.new_tokens < FEWEST_NEW_TOKENS:
        parser.error(f"--new-tokens is {args.new_tokens}; expected at least {FEWEST_NEW_TOKENS}")
    if args.workloads is None:
        args.workloads = [name for name in DEFAULT if args.peers or not WORKLOADS[name].is_peer]


_SWITCH: dict[str, Any] = dict(action=argparse.BooleanOptionalAction)
BENCHMARK = Benchmark(
    "decode",
    __doc__,
    measure,
    FORM.of,
    (*command.DECODING, "--shape", "--peers", *command.PEERS, "--quantize", "--backend"),
    dict(batches=[1, 4, 8], spec_tokens=[0, 1, 2, 3], prompt_tokens=32, new_tokens=96, repeats=3),
    {
        "--workloads": dict(nargs="+", choices=WORKLOADS, help=f"default: {' '.join(DEFAULT)}"),
        "--int8": dict(**_SWITCH, default=True, help="int8 drafts, too"),
        "--vllm-relaunch": dict(
            **_SWITCH,
            default=False,
            help="start vLLM anew for each round, and take its best sample: launches differ",
        ),
    },
    _check,
)
main, table = BENCHMARK.commands(__name__)
