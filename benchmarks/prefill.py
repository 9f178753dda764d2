"""Tokens per second of a long prompt, of mtpc and other engines, in one run.

    python -m benchmarks.prefill                     # the 0.5B shape, 512 tokens, K = 0 and 1
    python -m benchmarks.prefill --vllm-python VENV/bin/python --llama-bench DIRECTORY
    python -m benchmarks.prefill --prompt-tokens 2048 8192 32768 --peer-context 8192
    python -m benchmarks.prefill --shape tiny --backend eager --no-peers

Times are from a prompt's arrival to its first new token, one prompt at a time, without prefix
reuse. llama.cpp's time has the prompt only. mtpc prefills in chunks, with one engine for each size
of `--chunks`. Samples of one length are taken in rounds, with the machine's bandwidth, as in
`benchmarks.decode`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness.decoders import Decoded, Decoder, MtpcDecoder, Prompts, opened
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import SHAPES, Checkpoint
from benchmarks.harness.results import SAMPLES_NOTE, Record, Table, publish_parts, sample_counts
from benchmarks.harness.sampling import Case, Row, Tell, measure, rows_of
from benchmarks.peers.decoders import peer_decoders
from benchmarks.peers.llama_decoder import LlamaDecoder
from benchmarks.peers.vllm_decoder import VllmDecoder

NEW_TOKENS = 8
"""Room after the prompt, of which one token is used."""
WARM_UP_TOKENS = 2048
"""What a warm-up computes of a prompt: some chunks of any engine. 32,768 tokens take minutes."""
COLUMNS = (
    "prompt", "engine", "K", "ms", "tokens/s", "GFLOP/s", "over transformers", "over vLLM",
    "over llama.cpp", "samples",
)  # fmt: skip
NOTES = (
    "prompt: tokens; ms: from a prompt's arrival to its first new token; medians.",
    "GFLOP/s: of the target's layers, two a weight and token; attention and drafts not counted.",
    "over transformers: tokens/s over generate's; over vLLM: over its CPU build's at the same K; "
    "over llama.cpp: over its BF16's, which computes the prompt alone.",
    SAMPLES_NOTE,
)


class MtpcPrefill(MtpcDecoder):
    """A `SpecModel` with a given prefill chunk."""

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """First tokens, one prompt after another; `new_tokens` is ignored."""

        def first_token(prompt: list[int]) -> None:
            self.model.engine.add(prompt, 1)
            while self.model.engine.has_work:
                self.model.engine.step()

        return _timed(prompts, first_token)


class TransformersPrefill(Decoder):
    """transformers' `generate`, for one token."""

    engine, spec_tokens = "transformers", 0

    def __init__(self, model: Any) -> None:
        self.model = model

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """First tokens, one prompt after another; `new_tokens` is ignored."""

        def first_token(prompt: list[int]) -> None:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            self.model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)

        return _timed(prompts, first_token)


class VllmPrefill(VllmDecoder):
    """vLLM in its own process, which measures the time."""

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """First tokens, one prompt after another; `new_tokens` is ignored."""
        done = self.process.ask({"prefill": list(prompts)})
        tokens = sum(len(prompt) for prompt in prompts)
        return Decoded(len(prompts), tokens, done["seconds"], None, done["cpu_s"])


class LlamaPrefill(LlamaDecoder):
    """llama-batched-bench, one process per sample, with its own prompts of the same length."""

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """The time of the prompts; `new_tokens` is ignored."""
        found, cpu_s = self.run(len(prompts), len(prompts[0]), 1)
        tokens = sum(len(prompt) for prompt in prompts)
        return Decoded(len(prompts), tokens, found.prompt_s, None, cpu_s)


def _timed(prompts: Prompts, first_token: Any) -> Decoded:
    start = time.perf_counter()
    for prompt in prompts:
        first_token(prompt)
    seconds = time.perf_counter() - start
    return Decoded(len(prompts), sum(len(prompt) for prompt in prompts), seconds, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    with command.working_directory(args.workdir) as workdir:
        checkpoint = command.write_mimo(args, workdir, tell)
        with opened(_engines(checkpoint, args, tell)) as decoders:
            publish_parts("prefill", args, _measure(decoders, checkpoint, args, tell), table)
    return 0


def _measure(
    decoders: Sequence[Decoder], checkpoint: Checkpoint, args: argparse.Namespace, tell: Tell
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each length."""
    probe = BandwidthProbe(args.probe_mib << 20)
    for length in args.prompt_tokens:
        plan = command.plan_of(
            args, prompt_tokens=length, new_tokens=NEW_TOKENS, warm_up_tokens=WARM_UP_TOKENS
        )
        cases = [
            Case("mimo", "random", decoder, 1, checkpoint.step_bytes(0))
            for decoder in decoders
            if length <= args.peer_context or isinstance(decoder, MtpcPrefill)
        ]
        prompts = plan.prompts(1, SHAPES[args.shape].vocab_size)
        rows = measure(cases, plan, prompts, probe, tell)
        yield [{"prompt_tokens": length, **asdict(row)} for row in rows]


def _engines(checkpoint: Checkpoint, args: argparse.Namespace, tell: Tell) -> Iterator[Decoder]:
    target = checkpoint.load_target()
    if args.peers:
        yield TransformersPrefill(target)
    for k, chunk in product(args.spec_tokens, args.chunks):
        tell(f"compile K={k}, chunks of {chunk}")
        yield MtpcPrefill.compile(
            target,
            f"mtpc, chunks of {chunk}",
            spec_tokens=k,
            batch_buckets=(1,),
            max_len=max(args.prompt_tokens) + NEW_TOKENS,
            prefill_chunk=chunk,
            prefix_caching=False,
            backend=args.backend,
        )
    known = [length for length in args.prompt_tokens if length <= args.peer_context]
    sizes, directory = (max(known, default=0) + NEW_TOKENS, 1), checkpoint.directory
    place = (args, directory, args.spec_tokens, sizes, tell)
    yield from peer_decoders(*place, llama=LlamaPrefill, vllm=VllmPrefill)


def cells(rows: Sequence[tuple[int, Row]], target_bytes: int) -> list[list[str]]:
    """The cells of the table.

    Args:
        rows: pairs of a prompt length and its row.
        target_bytes: bytes of the target's layers in bfloat16.
    """
    by_key = {(length, row.engine, row.spec_tokens): row for length, row in rows}

    def ratio(row: Row, other: Row | None) -> str:
        return f"{row.tokens_per_s / other.tokens_per_s:.2f}x" if other else "-"

    return [
        [
            str(length),
            row.engine,
            str(row.spec_tokens),
            f"{row.ms_per_step:.1f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.tokens_per_s * target_bytes / 1e9:.0f}",
            ratio(row, by_key.get((length, "transformers", 0))),
            ratio(row, by_key.get((length, "vLLM", row.spec_tokens))),
            ratio(row, by_key.get((length, "llama.cpp BF16", 0))),
            sample_counts(row),
        ]
        for length, row in rows
    ]


def table(record: Record) -> Table:
    """A record's table."""
    rows = rows_of(record, "prompt_tokens")
    shape = SHAPES[record["arguments"]["shape"]]
    # The step of K = 0 reads the target's layers and the head.
    target_bytes = rows[0][1].step_bytes - 2 * shape.hidden_size * shape.vocab_size
    return Table("Prompts from arrival to first token", COLUMNS, cells(rows, target_bytes), NOTES)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "prefill", __doc__, *command.FILES, "--shape", "--peers", *command.PEERS, "--peer-context",
        "--backend", *command.SAMPLING, "--probe-mib", prompt_tokens=[512], spec_tokens=[0, 1],
        repeats=5,
    )  # fmt: skip
    chunks: dict[str, Any] = dict(nargs="+", type=command.positive, metavar="N", help="mtpc's")
    parser.add_argument("--chunks", default=[128, 512], **chunks)
    args = parser.parse_args(argv)
    command.check_peer_context(parser, args, args.prompt_tokens)
    return args


if __name__ == "__main__":
    sys.exit(main())
