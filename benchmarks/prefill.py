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
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness.bandwidth import BandwidthProbe
from benchmarks.harness.command import positive
from benchmarks.harness.decoders import Decoded, Decoder, MtpcDecoder, Prompts
from benchmarks.harness.models import SHAPES, Checkpoint, write_checkpoint
from benchmarks.harness.results import SAMPLES_NOTE, Record, Table, publish, sample_counts
from benchmarks.harness.sampling import Case, Plan, Row, Tell, sample_in_turns, summarise
from benchmarks.peers.llama_decoder import LlamaDecoder, llama_decoders
from benchmarks.peers.vllm_decoder import VllmProcess

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


class VllmPrefill(Decoder):
    """vLLM in its own process, which measures the time."""

    engine = "vLLM"

    def __init__(self, process: VllmProcess) -> None:
        self._process, self.spec_tokens = process, process.spec_tokens
        self.build_s = process.build_s

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """First tokens, one prompt after another; `new_tokens` is ignored."""
        done = self._process.ask({"prefill": list(prompts)})
        tokens = sum(len(prompt) for prompt in prompts)
        return Decoded(len(prompts), tokens, done["seconds"], None, done["cpu_s"])


class LlamaPrefill(Decoder):
    """llama-batched-bench, one process per sample, with its own prompts of the same length."""

    spec_tokens, stays_warm = 0, False

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._decoder, self.engine = decoder, decoder.engine

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """The time of the prompts; `new_tokens` is ignored."""
        found, cpu_s = self._decoder.run(len(prompts), len(prompts[0]), 1)
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
    tell, probe = command.begin(args), BandwidthProbe(args.probe_mib << 20)
    rows = list[dict[str, Any]]()
    with command.working_directory(args.workdir) as workdir, ExitStack() as closing:
        tell(f"write {workdir / 'mimo'}")
        shape = SHAPES[args.shape]
        checkpoint = write_checkpoint(workdir / "mimo", "mimo", shape, False, args.seed)
        decoders = list[Decoder]()
        for decoder in _engines(checkpoint, args, tell):
            closing.callback(decoder.close)
            decoders.append(decoder)
        for length in args.prompt_tokens:
            plan = Plan(
                length, NEW_TOKENS, args.repeats, args.max_foreign, args.seed, WARM_UP_TOKENS
            )
            cases = [
                Case("mimo", "random", decoder, 1, checkpoint.step_bytes(0))
                for decoder in decoders
                if length <= args.peer_context or isinstance(decoder, MtpcPrefill)
            ]
            sample_in_turns(cases, plan, plan.prompts(1, shape.vocab_size), probe, tell)
            found = [asdict(summarise(case, plan.max_foreign)) for case in cases]
            rows += [{"prompt_tokens": length, **row} for row in found]
    publish("prefill", args, {"rows": rows}, table)
    return 0


def _engines(checkpoint: Checkpoint, args: argparse.Namespace, tell: Tell) -> Iterator[Decoder]:
    target = checkpoint.load_target()
    if args.peers:
        yield TransformersPrefill(target)
    for k in args.spec_tokens:
        for chunk in args.chunks:
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
                enabled_passes=tuple(args.enable),
            )
    for k in args.spec_tokens if args.vllm_python else ():
        tell(f"start vLLM K={k}")
        directory = checkpoint.directory
        longest = max(n for n in args.prompt_tokens if n <= args.peer_context) + NEW_TOKENS
        kept = directory.parent / "vllm"
        yield VllmPrefill(VllmProcess.of(args.vllm_python, directory, k, longest, 1, kept))
    if args.llama_bench:
        tell("write a GGUF file")
        for decoder in llama_decoders(
            args.llama_bench, args.gguf_python, checkpoint.directory, ("BF16",)
        ):
            yield LlamaPrefill(decoder)


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
    rows = [
        (row["prompt_tokens"], Row(**{k: v for k, v in row.items() if k != "prompt_tokens"}))
        for row in record["rows"]
    ]
    shape = SHAPES[record["arguments"]["shape"]]
    # The step of K = 0 reads the target's layers and the head.
    target_bytes = rows[0][1].step_bytes - 2 * shape.hidden_size * shape.vocab_size
    return Table("Prompts from arrival to first token", COLUMNS, cells(rows, target_bytes), NOTES)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("prefill", __doc__)
    add = parser.add_argument
    command.add_shared(parser, "--shape")
    add("--prompt-tokens", nargs="+", type=positive, default=[512], metavar="N")
    add("--spec-tokens", nargs="+", type=int, default=[0, 1], metavar="K")
    add("--chunks", nargs="+", type=positive, default=[128, 512], metavar="N", help="mtpc's")
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="run transformers")
    command.add_shared(
        parser,
        "--vllm-python",
        "--llama-bench",
        "--gguf-python",
        "--peer-context",
        "--backend",
        "--enable",
    )
    command.add_sampling(parser, 5)
    command.add_shared(parser, "--probe-mib")
    command.add_files(parser)
    args = parser.parse_args(argv)
    command.check_peer_context(parser, args, args.prompt_tokens)
    return args


if __name__ == "__main__":
    sys.exit(main())
