"""Milliseconds per decode step at long contexts, and the time to read weights and KV.

    python -m benchmarks.context                     # the 0.5B shape, K = 0 and 3, batches 1 and 4
    python -m benchmarks.context --vllm-python VENV/bin/python --llama-bench DIRECTORY
    python -m benchmarks.context --kv-cache-dtypes auto int8 fp8 --spec-tokens 0 --batches 1
    python -m benchmarks.context --shape tiny --backend eager --contexts 64 128

For mtpc no prompt is computed. Its pool has random KV, and the prefix index has an entry for each
page of each prompt. So the engine reuses these pages, computes the rest of the prompt, and decodes.
A step's time does not depend on the values of KV. vLLM computes its prompts once, and reuses them.
llama.cpp computes them for each sample. The other engines run after mtpc, one after the other, each
in its own process. Samples are taken as in `benchmarks.decode`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.decoders import Decoder, MtpcDecoder, Prompts, opened
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import SHAPES, Checkpoint, Shape
from benchmarks.harness.results import SAMPLES_NOTE, Record, Table, publish_parts, sample_counts
from benchmarks.harness.sampling import Case, Row, Tell, measure, rows_of
from benchmarks.peers.decoders import peer_decoders
from mtpc.config import KV_CACHE_DTYPES
from mtpc.engine.request import Request

COLUMNS = (
    "engine", "K", "batch", "context", "ms/step", "over vLLM", "GB/s", "KV MiB", "limit ms",
    "of the memory limit", "of the KV limit", "samples",
)  # fmt: skip
NOTES = (
    "ms/step: one decode step of the whole batch (K drafts verified, K proposed); medians.",
    "over vLLM: its ms/step over this, at the same K, batch and context.",
    "KV MiB: read by a step: every layer's rows of all requests once, the MTP layer's K times.",
    "limit ms: the time that reading weights and KV takes at the bandwidth around the sample.",
    "of the KV limit: what the KV beyond the shortest context takes at that bandwidth, over what a "
    "step takes beyond the one at the shortest context.",
    SAMPLES_NOTE,
)
ENGINES = {name: f"mtpc, {name} KV" for name in KV_CACHE_DTYPES} | {KV_CACHE_DTYPES[0]: "mtpc"}
"""Names of mtpc's rows by KV cache dtype."""
PREFILL_CHUNK = 64
"""Rows of a prefill step, which computes the last page of a prompt."""

RANDOM_PAGES = 64
HEADROOM = 64
"""Tokens by which max_len exceeds a text: a few pages, so that no prompt page is evicted."""


class ContextDecoder(MtpcDecoder):
    """A `SpecModel` whose pool holds the KV of prompts that were never computed."""

    def __init__(self, model: mtpc.SpecModel, build_s: float, engine: str) -> None:
        super().__init__(model, build_s, engine)
        program = model.engine.program
        for name, spec in program.layout.items():
            if spec.is_paged:
                _fill(program.shared[name])

    def pretend(self, prompts: Prompts) -> None:
        """Add the full pages of these prompts to an empty prefix index."""
        engine = self.model.engine
        engine.reset_prefix_cache()
        prefixes = engine.scheduler.prefixes
        assert prefixes is not None
        for prompt in prompts:
            request = Request(-1, prompt, 1)
            request.pages = engine.pages.take(len(prompt) // prefixes.page_size)
            request.num_prefilled = len(prompt)
            prefixes.learn(request)
            engine.pages.give_back(request.pages)


def _fill(pages: torch.Tensor) -> None:
    """Fill a pool with random numbers that repeat every few pages; more would take minutes."""
    some = torch.randn(pages[:RANDOM_PAGES].shape)
    some = (10 * some if pages.dtype == torch.int8 else some).to(pages.dtype)
    for part in pages.split(RANDOM_PAGES):
        part.copy_(some[: len(part)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell, probe = command.begin(args), BandwidthProbe(args.probe_mib << 20)
    with command.working_directory(args.workdir) as workdir:
        checkpoint = command.write_mimo(args, workdir, tell)
        parts = (
            rows
            for group in _groups(checkpoint, args, tell)
            for rows in _measure(group, checkpoint, args, probe, tell)
        )
        publish_parts("context", args, parts, table)
    return 0


def _groups(
    checkpoint: Checkpoint, args: argparse.Namespace, tell: Tell
) -> Iterator[Iterable[Decoder]]:
    """The groups of decoders that are sampled in rounds: mtpc's, then each other engine."""
    yield _decoders(checkpoint, args, tell)
    known = [context for context in args.contexts if context <= args.peer_context]
    sizes = (_max_len(args, max(known, default=0)), max(args.batches))
    place = (args, checkpoint.directory, args.spec_tokens, sizes, tell)
    yield from ([peer] for peer in peer_decoders(*place, enable_prefix_caching=True))


def _decoders(checkpoint: Checkpoint, args: argparse.Namespace, tell: Tell) -> Iterator[Decoder]:
    for k, kind in product(args.spec_tokens, args.kv_cache_dtypes):
        tell(f"compile K={k}, {kind}")
        yield ContextDecoder.compile(
            checkpoint.directory,
            ENGINES[kind],
            spec_tokens=k,
            batch_buckets=tuple(args.batches),
            max_len=_max_len(args, max(args.contexts)),
            prefill_chunk=PREFILL_CHUNK,
            busy_prefill_chunk=PREFILL_CHUNK,
            backend=args.backend,
            kv_cache_dtype=kind,
        )


def _max_len(args: argparse.Namespace, context: int) -> int:
    return int(context + args.new_tokens + HEADROOM)


def _measure(
    group: Iterable[Decoder],
    checkpoint: Checkpoint,
    args: argparse.Namespace,
    probe: BandwidthProbe,
    tell: Tell,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each context."""
    shape = SHAPES[args.shape]
    with opened(group) as decoders:
        is_ours = isinstance(decoders[0], ContextDecoder)
        for context in (c for c in args.contexts if is_ours or c <= args.peer_context):
            tell(f"context {context}")
            plan = command.plan_of(args, prompt_tokens=context)
            prompts, cases = plan.prompts(max(args.batches), shape.vocab_size), list[Case]()
            for decoder, batch in product(decoders, args.batches):
                if isinstance(decoder, ContextDecoder):
                    decoder.pretend(prompts)
                kv = kv_bytes(shape, decoder.spec_tokens, context, decoder.engine)
                size = checkpoint.step_bytes(decoder.spec_tokens) + batch * kv
                cases.append(Case("mimo", "random", decoder, batch, size))
            rows = measure(cases, plan, prompts, probe, tell)
            yield [{"context": context, **asdict(row)} for row in rows]


def kv_bytes(shape: Shape, spec_tokens: int, context: int, engine: str = "mtpc") -> int:
    """Bytes of KV that a step reads for one request: bfloat16, or codes and scales."""
    head_dim = shape.hidden_size // shape.num_attention_heads
    is_coded = engine in ENGINES.values() and engine != ENGINES["auto"]
    row = 2 * shape.num_key_value_heads * (head_dim + 4 if is_coded else 2 * head_dim)
    return context * row * (shape.num_hidden_layers + spec_tokens)


def table(record: Record) -> Table:
    """A record's table."""
    shape = SHAPES[record["arguments"]["shape"]]
    rows = rows_of(record, "context")
    rows.sort(key=lambda pair: (pair[1].engine, pair[1].spec_tokens, pair[1].batch, pair[0]))
    return Table("Decoding at long contexts", COLUMNS, cells(rows, shape), NOTES)


def cells(rows: Sequence[tuple[int, Row]], shape: Shape) -> list[list[str]]:
    """The table's body.

    Args:
        rows: pairs of a context and its row, ordered by context for each engine, K and batch.
        shape: the model's sizes.
    """
    by_key = {_key(context, row): row for context, row in rows}
    body, first = list[list[str]](), rows[0][1]
    for context, row in rows:
        if _key(0, row) != _key(0, first) or context == rows[0][0]:
            first = row
        other = by_key.get(("vLLM", *_key(context, row)[1:]))
        more = row.ms_per_step - first.ms_per_step
        limit = 1e-6 * (row.step_bytes - first.step_bytes) / row.bandwidth_gb_s
        body.append(
            [
                row.engine,
                str(row.spec_tokens),
                str(row.batch),
                str(context),
                f"{row.ms_per_step:.2f}",
                f"{other.ms_per_step / row.ms_per_step:.2f}x" if other else "-",
                f"{row.bandwidth_gb_s:.1f}",
                f"{row.batch * kv_bytes(shape, row.spec_tokens, context, row.engine) / 2**20:.0f}",
                f"{row.roofline_ms:.2f}",
                f"{row.efficiency:.0%}",
                f"{limit / more:.0%}" if limit and more > 0 else "-",
                sample_counts(row),
            ]
        )
    return body


def _key(context: int, row: Row) -> tuple[str, int, int, int]:
    return row.engine, row.spec_tokens, row.batch, context


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "context", __doc__, *command.FILES, "--shape", *command.PEERS, "--peer-context",
        "--backend", *command.SAMPLING, "--probe-mib", batches=[1, 4], spec_tokens=[0, 3],
        kv_cache_dtypes=["auto"], new_tokens=32, repeats=2,
    )  # fmt: skip
    contexts: dict[str, Any] = dict(nargs="+", type=command.positive, metavar="N", help="tokens")
    parser.add_argument("--contexts", default=[512, 2048, 8192, 32768], **contexts)
    args = parser.parse_args(argv)
    command.check_peer_context(parser, args, args.contexts)
    return args


if __name__ == "__main__":
    sys.exit(main())
