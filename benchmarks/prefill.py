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

from collections.abc import Iterator
from itertools import product

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.decoders import Decoder, MtpcDecoder, TransformersDecoder, opened
from benchmarks.harness.models import SHAPES, Checkpoint
from benchmarks.harness.rounds import decode_case
from benchmarks.harness.tables import SAMPLES, Column, Record, Row, TableForm, fields, over
from benchmarks.peers.decoders import peer_decoders

NEW_TOKENS = 8
"""Room after the prompt, of which one token is used."""
WARM_UP_TOKENS = 2048
"""What a warm-up computes of a prompt: some chunks of any engine. 32,768 tokens take minutes."""
KEYS = ("prompt_tokens", "engine", "spec_tokens")


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of each length."""
    checkpoint, args = run.write_mimo(), run.args
    with opened(_engines(checkpoint, run)) as decoders:
        for length in args.prompt_tokens:
            row = dict(prompt_tokens=length, model="mimo", weights="random")
            prompts, size = run.prompts(1, length), checkpoint.step_bytes(0)
            yield run.sample(
                [
                    decode_case(row, d, d.prefill, prompts, size, run.probe, WARM_UP_TOKENS)
                    for d in decoders
                    if length <= args.peer_context or isinstance(d, MtpcDecoder)
                ]
            )


def _engines(checkpoint: Checkpoint, run: Run) -> Iterator[Decoder]:
    target, args = checkpoint.load_target(), run.args
    if args.peers:
        yield TransformersDecoder(target, 0)
    for k, chunk in product(args.spec_tokens, args.chunks):
        run.tell(f"compile K={k}, chunks of {chunk}")
        yield MtpcDecoder.compile(
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
    sizes = (max(known, default=0) + NEW_TOKENS, 1)
    yield from peer_decoders(args, checkpoint.directory, args.spec_tokens, sizes, run.tell)


def _rows(record: Record) -> list[Row]:
    """With the operations of the target's layers; the step of K = 0 reads them and the head."""
    shape, rows = SHAPES[record["arguments"]["shape"]], record["rows"]
    target_bytes = rows[0]["step_bytes"] - 2 * shape.hidden_size * shape.vocab_size
    return [{**row, "gflops": row["tokens_per_s"] * target_bytes / 1e9} for row in rows]


FORM = TableForm(
    "Prompts from arrival to first token",
    (
        Column("prompt", "prompt_tokens", "", "tokens."),
        *fields("engine, K=spec_tokens"),
        Column(
            "ms", "ms_per_step", ".1f", "from a prompt's arrival to its first new token; medians."
        ),
        Column("tokens/s", "tokens_per_s", ".0f"),
        Column(
            "GFLOP/s", "gflops", ".0f",
            "of the target's layers, two a weight and token; attention and drafts not counted.",
        ),
        Column(
            "over transformers",
            over("tokens_per_s", KEYS, engine="transformers", spec_tokens=0), ".2fx",
            "tokens/s over generate's.",
        ),
        Column(
            "over vLLM", over("tokens_per_s", KEYS, engine="vLLM"), ".2fx",
            "over its CPU build's at the same K.",
        ),
        Column(
            "over llama.cpp",
            over("tokens_per_s", KEYS, engine="llama.cpp BF16", spec_tokens=0), ".2fx",
            "over its BF16's, which computes the prompt alone.",
        ),
        SAMPLES,
    ),
    rows=_rows,
)  # fmt: skip


BENCHMARK = Benchmark(
    "prefill",
    __doc__,
    measure,
    FORM.of,
    (*command.DECODING, "--shape", "--peers", *command.PEERS, "--peer-context", "--backend"),
    dict(prompt_tokens=[512], spec_tokens=[0, 1], repeats=5),
    {"--chunks": command.NUMBERS | dict(default=[128, 512], help="mtpc's")},
    lambda parser, args: command.check_peer_context(parser, args, args.prompt_tokens),
)
main, table = BENCHMARK.commands(__name__)
