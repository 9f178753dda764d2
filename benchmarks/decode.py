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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.bandwidth import BandwidthProbe
from benchmarks.harness.command import positive
from benchmarks.harness.decoders import Decoder, MtpcDecoder, Prompts, TransformersDecoder
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
from benchmarks.harness.results import save
from benchmarks.harness.sampling import Case, Plan, Row, Tell, sample_in_turns, summarise
from benchmarks.peers.llama_decoder import LlamaDecoder, llama_decoders
from benchmarks.peers.llama_drafts import ServerDecoder, server_decoders
from benchmarks.peers.vllm_decoder import VLLM, vllm_decoders
from benchmarks.report import table
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
    rows: list[Row] = []
    with command.working_directory(args.workdir) as workdir:
        for name in args.workloads:
            rows += _measure(WORKLOADS[name], workdir / name, args, probe, tell)
            # After each workload, so that an interrupt loses only the running workload.
            saved = save("decode", args, {"rows": [asdict(row) for row in rows]}, table)
            gc.collect()
    tell("done")
    saved.print()
    return 0


def _measure(
    workload: Workload,
    directory: Path,
    args: argparse.Namespace,
    probe: BandwidthProbe,
    tell: Tell,
) -> list[Row]:
    """Measure all rows of one workload. Everything is freed afterwards."""
    plan = Plan(args.prompt_tokens, args.new_tokens, args.repeats, args.max_foreign, args.seed)
    checkpoint, prompts = _prepare(workload, directory, plan, args, tell)
    with ExitStack() as closing:
        decoders = []
        for decoder in _decoders(workload, checkpoint, directory.parent, args, tell):
            closing.callback(decoder.close)
            decoders.append(decoder)
        cases = [
            Case(
                workload.model,
                workload.weights + _dictated(args),
                decoder,
                batch,
                _step_bytes(checkpoint, decoder, batch),
            )
            for decoder in decoders
            for batch in args.batches
            if decoder.largest_batch is None or batch <= decoder.largest_batch
        ]
        sample_in_turns(cases, plan, prompts, probe, tell)
    return [summarise(case, plan.max_foreign) for case in cases]


def _step_bytes(checkpoint: Checkpoint, decoder: Decoder, batch: int) -> int:
    """The bytes that a step of a decoder reads."""
    if isinstance(decoder, LlamaDecoder | ServerDecoder):
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
    enabled = (*args.enable, *(["quantise-draft"] if engine == INT8 else []))

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
        enabled_passes=enabled,
        synthetic_acceptance_length=args.synthetic_acceptance_length if spec_tokens else None,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("decode", __doc__)
    add = parser.add_argument
    command.add_shared(parser, "--shape")
    add("--workloads", nargs="+", choices=WORKLOADS, help=f"default: {' '.join(DEFAULT)}")
    add("--batches", nargs="+", type=positive, default=[1, 4, 8], metavar="N")
    add("--spec-tokens", nargs="+", type=int, default=[0, 1, 2, 3], metavar="K")
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="run transformers")
    add("--int8", action=argparse.BooleanOptionalAction, default=True, help="int8 drafts, too")
    length = "accept drafts whatever they are: tokens per step, or a golden length by name"
    add("--synthetic-acceptance-length", type=acceptance_length, metavar="L|NAME", help=length)
    command.add_shared(parser, "--vllm-python", "--llama-bench", "--gguf-python", "--quantize")
    relaunch = "start vLLM anew for each round, and take its best sample: launches differ"
    add("--vllm-relaunch", action=argparse.BooleanOptionalAction, default=False, help=relaunch)
    command.add_shared(parser, "--backend", "--enable")
    add("--prompt-tokens", type=positive, default=32, metavar="N")
    add("--new-tokens", type=positive, default=96, metavar="N")
    command.add_sampling(parser, 3)
    command.add_shared(parser, "--probe-mib")
    command.add_files(parser)
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
