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
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.decoders import Decoder, MtpcDecoder, Prompts, opened
from benchmarks.harness.models import SHAPES, Checkpoint, Shape
from benchmarks.harness.rounds import Case, decode_case
from benchmarks.harness.tables import SAMPLES, Column, Record, Row, TableForm, fields, over
from benchmarks.peers.decoders import peer_decoders
from mtpc.config import KV_CACHE_DTYPES
from mtpc.engine.request import Request

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


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of each group of decoders and each context."""
    checkpoint, args = run.write_mimo(), run.args
    for group in _groups(checkpoint, run):
        with opened(group) as decoders:
            is_ours = isinstance(decoders[0], ContextDecoder)
            for context in (c for c in args.contexts if is_ours or c <= args.peer_context):
                run.tell(f"context {context}")
                yield run.sample(list(_cases(decoders, context, checkpoint, run)))


def _cases(
    decoders: Iterable[Decoder], context: int, checkpoint: Checkpoint, run: Run
) -> Iterator[Case]:
    prompts = run.prompts(max(run.args.batches), context)
    for decoder, batch in product(decoders, run.args.batches):
        if isinstance(decoder, ContextDecoder):
            decoder.pretend(prompts)
        kv = kv_bytes(SHAPES[run.args.shape], decoder.spec_tokens, context, decoder.engine)
        size = checkpoint.step_bytes(decoder.spec_tokens) + batch * kv
        row = dict(context=context, model="mimo", weights="random")
        decode = partial(decoder.decode, new_tokens=run.args.new_tokens)
        yield decode_case(row, decoder, decode, prompts[:batch], size, run.probe)


def _groups(checkpoint: Checkpoint, run: Run) -> Iterator[Iterable[Decoder]]:
    """The groups of decoders that are sampled in rounds: mtpc's, then each other engine."""
    args = run.args
    yield _decoders(checkpoint, run)
    known = [context for context in args.contexts if context <= args.peer_context]
    sizes = (_max_len(args, max(known, default=0)), max(args.batches))
    place = (args, checkpoint.directory, args.spec_tokens, sizes, run.tell)
    yield from ([peer] for peer in peer_decoders(*place, enable_prefix_caching=True))


def _decoders(checkpoint: Checkpoint, run: Run) -> Iterator[Decoder]:
    args = run.args
    for k, kind in product(args.spec_tokens, args.kv_cache_dtypes):
        run.tell(f"compile K={k}, {kind}")
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


def kv_bytes(shape: Shape, spec_tokens: int, context: int, engine: str = "mtpc") -> int:
    """Bytes of KV that a step reads for one request: bfloat16, or codes and scales."""
    head_dim = shape.hidden_size // shape.num_attention_heads
    is_coded = engine in ENGINES.values() and engine != ENGINES["auto"]
    row = 2 * shape.num_key_value_heads * (head_dim + 4 if is_coded else 2 * head_dim)
    return context * row * (shape.num_hidden_layers + spec_tokens)


CASE = ("engine", "spec_tokens", "batch")


def _rows(record: Record) -> list[Row]:
    """By case and context, with the bytes of KV, and the share of their limit."""
    shape = SHAPES[record["arguments"]["shape"]]
    rows = sorted(record["rows"], key=lambda row: [row[name] for name in (*CASE, "context")])
    shortest: dict[tuple[object, ...], Row] = {}
    shown = []
    for row in rows:
        first = shortest.setdefault(tuple(row[name] for name in CASE), row)
        kv = row["batch"] * kv_bytes(shape, row["spec_tokens"], row["context"], row["engine"])
        more = row["ms_per_step"] - first["ms_per_step"]
        limit = 1e-6 * (row["step_bytes"] - first["step_bytes"]) / row["bandwidth_gb_s"]
        of_kv = limit / more if limit and more > 0 else None
        shown.append({**row, "kv_mib": kv / 2**20, "of_kv": of_kv})
    return shown


FORM = TableForm(
    "Decoding at long contexts",
    (
        *fields("engine, K=spec_tokens, batch, context"),
        Column(
            "ms/step", "ms_per_step", ".2f",
            "one decode step of the whole batch (K drafts verified, K proposed); medians.",
        ),
        Column(
            "over vLLM", over("ms_per_step", (*CASE, "context"), inverse=True, engine="vLLM"),
            ".2fx", "its ms/step over this, at the same K, batch and context.",
        ),
        Column("GB/s", "bandwidth_gb_s", ".1f"),
        Column(
            "KV MiB", "kv_mib", ".0f",
            "read by a step: every layer's rows of all requests once, the MTP layer's K times.",
        ),
        Column(
            "limit ms", "roofline_ms", ".2f",
            "the time that reading weights and KV takes at the bandwidth around the sample.",
        ),
        Column("of the memory limit", "efficiency", ".0%"),
        Column(
            "of the KV limit", "of_kv", ".0%",
            "what the KV beyond the shortest context takes at that bandwidth, over what a step "
            "takes beyond the one at the shortest context.",
        ),
        SAMPLES,
    ),
    rows=_rows,
)  # fmt: skip


BENCHMARK = Benchmark(
    "context",
    __doc__,
    measure,
    FORM.of,
    (*command.DECODING, "--shape", *command.PEERS, "--peer-context", "--backend"),
    dict(batches=[1, 4], spec_tokens=[0, 3], kv_cache_dtypes=["auto"], new_tokens=32, repeats=2),
    {"--contexts": command.NUMBERS | dict(default=[512, 2048, 8192, 32768], help="tokens")},
    lambda parser, args: command.check_peer_context(parser, args, args.contexts),
)
main, table = BENCHMARK.commands(__name__)
