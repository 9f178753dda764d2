"""From which acceptance rate K drafts pay on this machine, at synthetic acceptance.

    python -m benchmarks.acceptance --out RESULTS.json
    python -m benchmarks.acceptance --quantize int4-g32 --vllm-python FILE --llama-bench DIRECTORY
    python -m benchmarks.plot RESULTS.json PICTURE.png

The weights are random. The engine accepts each draft with a given probability, whatever the draft
is (`synthetic_acceptance_rates`), and a step has its full cost. The speed-up over K = 0 shows from
which acceptance K pays.

Other engines can be measured, too: vLLM, whose CPU build refuses synthetic acceptance, so that its
rows have the acceptance of random weights; and llama.cpp, which decodes this model without drafts.
One process of another engine runs at a time, after mtpc's models are freed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.decoders import Decoded, Decoder, MtpcDecoder, Prompts, opened
from benchmarks.harness.rounds import decode_case
from benchmarks.harness.tables import SAMPLES, Column, Record, Row, TableForm, fields, over
from benchmarks.peers.decoders import peer_decoders

CASE = ("engine", "spec_tokens", "batch")
"""The keys of rows that differ only in acceptance."""


class SyntheticDecoder(MtpcDecoder):
    """A model that accepts each draft with one probability.

    Args:
        decoder: the decoder whose model it shares.
        probability: the probability that a draft is accepted if all drafts before it are.
    """

    def __init__(self, decoder: MtpcDecoder, probability: float):
        super().__init__(decoder.model, decoder.build_s, decoder.engine)
        self.rates = tuple(probability**count for count in range(1, self.spec_tokens + 1))

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        self.model.set_synthetic_acceptance(self.rates)
        return super().decode(prompts, new_tokens)


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of each group of decoders."""
    prompts = run.prompts(max(run.args.batches))
    for group in groups(run):
        gc.collect()  # What the group before has left.
        with opened(group) as decoders:
            cases = []
            for decoder in decoders:
                decode = partial(decoder.decode, new_tokens=run.args.new_tokens)
                row = _dictated(decoder)
                for batch in run.args.batches:
                    cases.append(decode_case(row, decoder, decode, prompts[:batch], 0, run.probe))
            yield [_with_tokens(row) for row in run.sample(cases)]


def _dictated(decoder: Decoder) -> Row:
    """The acceptance, and the tokens of one request in a step that are expected at it."""
    rates = decoder.rates if isinstance(decoder, SyntheticDecoder) else None
    if not rates:
        return dict(synthetic_acceptance=None)
    return dict(synthetic_acceptance=rates[0], tokens_per_step=1 + sum(rates))


def _with_tokens(row: Row) -> Row:
    """With the tokens of a step where nothing is dictated."""
    measured = 1 + row["spec_tokens"] * (row["acceptance_rate"] or 0.0)
    return {"tokens_per_step": measured, "accepted": row["acceptance_rate"], **row}


def rows_of(record: Record) -> list[Row]:
    """A record's rows, with the tokens per second of a batch at their acceptance."""
    return [
        {**row, "tokens_per_s": 1e3 * row["batch"] * row["tokens_per_step"] / row["ms_per_step"]}
        for row in record["rows"]
    ]


over_plain = over("tokens_per_s", CASE, spec_tokens=0)
"""Tokens per second over those of the same engine at K = 0, at the row's batch."""


def pays_from(rows: Sequence[Row], row: Row) -> float | None:
    """The acceptance from which a row's K is as fast as K = 0 at its batch, or None.

    Between two measured acceptances the speed-up is interpolated linearly.
    """
    same = [r for r in rows if all(r[name] == row[name] for name in CASE)]
    line = sorted((r["synthetic_acceptance"] or 0.0, over_plain(r, rows) or 0.0) for r in same)
    if line[0][1] >= 1:
        return line[0][0]
    for (low, before), (high, after) in pairwise(line):
        if after >= 1:
            return low + (high - low) * (1 - before) / (after - before)
    return None


def share(start: float | None) -> str:
    """The cell "pays from"."""
    return "never" if start is None else f"{start:.0%}"


def _pays(row: Row, rows: Sequence[Row]) -> str | None:
    return None if row["synthetic_acceptance"] is None else share(pays_from(rows, row))


FORM = TableForm(
    "Speed by synthetic acceptance",
    (
        *fields("engine, K=spec_tokens, batch"),
        Column(
            "synthetic acceptance", "synthetic_acceptance", ".0%",
            "SYNTHETIC: the probability with which the engine accepts a draft, given that all "
            "before it are accepted. It is dictated; the weights are random.",
        ),
        Column(
            "tokens/step", "tokens_per_step", ".2f",
            "what this probability gives on average, the target's own token included.",
        ),
        Column("ms/step", "ms_per_step", ".2f"),
        Column(
            "tokens/s", "tokens_per_s", ".1f",
            "tokens/step times the batch, over the measured time of a step.",
        ),
        Column("over K=0", over_plain, ".2fx", "tokens/s over the same engine's at K=0."),
        Column(
            "pays from", _pays, "",
            "the acceptance at which K is as fast as K=0, between two measured ones.",
        ),
        Column(
            "GB/s", "bandwidth_gb_s", ".1f",
            "bandwidth of reading memory around the samples. It drifts, and bounds a step: compare "
            "rows of different engines only where it agrees.",
        ),
        SAMPLES,
    ),
    (
        "Engines but mtpc: nothing is dictated. vLLM accepts what random weights happen to agree "
        "on.",
    ),
    rows_of,
)  # fmt: skip


def groups(run: Run) -> Iterator[Iterable[Decoder]]:
    """The groups of decoders that are sampled in rounds, each on one set of weights.

    A group is made after the previous one is closed. Each other engine is a group of its own.
    """
    args, checkpoint = run.args, run.write_mimo()
    yield _ours("mtpc", checkpoint.load_target(), run)
    for scheme in args.quantize:
        source = checkpoint.write_quantised(scheme, run.workdir)
        yield _ours(f"mtpc {scheme}", source, run)
    sizes = (run.max_len, max(args.batches))
    kinds = ("BF16", "Q4_0") if args.quantize else ("BF16",)
    place = (args, checkpoint.directory, (0, *args.spec_tokens), sizes, run.tell, kinds)
    yield from ([peer] for peer in peer_decoders(*place))


def _ours(engine: str, source: Any, run: Run) -> Iterator[Decoder]:
    """K = 0, and every K at every acceptance."""
    for k in (0, *run.args.spec_tokens):
        run.tell(f"compile {engine} K={k}")
        rates = (0.0,) * k
        decoder = MtpcDecoder.compile(
            source, engine, spec_tokens=k, **run.decode_options(), synthetic_acceptance_rates=rates
        )
        yield from [SyntheticDecoder(decoder, p) for p in run.args.acceptance] if k else [decoder]


BENCHMARK = Benchmark(
    "acceptance",
    __doc__,
    measure,
    FORM.of,
    (*command.DECODING, "--shape", "--quantize", *command.PEERS, "--backend"),
    dict(
        batches=[1, 4, 8], spec_tokens=[1, 2, 3], acceptance=[0, 0.25, 0.5, 0.75, 1],
        prompt_tokens=32, new_tokens=64, repeats=3,
    ),
)  # fmt: skip
main, table = BENCHMARK.commands(__name__)
