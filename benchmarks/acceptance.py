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

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.decoders import Decoded, Decoder, MtpcDecoder, Prompts, opened
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import SHAPES
from benchmarks.harness.results import (
    SAMPLES_NOTE,
    Columns,
    Counts,
    Record,
    Table,
    publish_parts,
    sample_counts,
)
from benchmarks.harness.sampling import Case, Tell, sample_in_turns
from benchmarks.harness.sampling import summarise as summarise_case
from benchmarks.peers.decoders import peer_decoders

NOTES = (
    "SYNTHETIC acceptance: the probability with which the engine accepts a draft, given that all "
    "before it are accepted. It is dictated; the weights are random.",
    "tokens/step: what this probability gives on average, the target's own token included. "
    "tokens/s: this times the batch, over the measured time of a step.",
    "over K=0: tokens/s over the same engine's at K=0.",
    "pays from: the acceptance at which K is as fast as K=0, between two measured ones.",
    "GB/s: bandwidth of reading memory around the samples. It drifts, and bounds a step: compare "
    "rows of different engines only where it agrees.",
    "Engines but mtpc: nothing is dictated. vLLM accepts what random weights happen to agree on.",
    SAMPLES_NOTE,
)


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


@dataclass(frozen=True)
class Row(Counts):
    """One K, batch and acceptance: medians over samples.

    Attributes:
        engine: "mtpc", with the scheme of a quantised copy, or another engine.
        spec_tokens: K.
        batch: number of requests.
        synthetic_acceptance: the probability; None without synthetic acceptance.
        tokens_per_step: tokens of one request, expected at this probability, or else measured.
        ms_per_step: milliseconds per step.
        accepted: share of the drafts that were accepted in the samples.
        bandwidth_gb_s: memory bandwidth before and after the samples; None in older records.
    """

    engine: str
    spec_tokens: int
    batch: int
    synthetic_acceptance: float | None
    tokens_per_step: float
    ms_per_step: float
    accepted: float | None
    bandwidth_gb_s: float | None = None

    @property
    def case(self) -> tuple[str, int, int]:
        """The key of rows that differ only in acceptance."""
        return self.engine, self.spec_tokens, self.batch

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.batch * self.tokens_per_step / self.ms_per_step


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a sampled case."""
    decoder, found = case.decoder, summarise_case(case, max_foreign)
    rates = decoder.rates if isinstance(decoder, SyntheticDecoder) else None
    emitted = 1 + decoder.spec_tokens * (found.acceptance_rate or 0.0)
    return Row(
        engine=decoder.engine,
        spec_tokens=decoder.spec_tokens,
        batch=case.batch,
        synthetic_acceptance=rates[0] if rates else None,
        tokens_per_step=1 + sum(rates) if rates else emitted,
        ms_per_step=found.ms_per_step,
        accepted=found.acceptance_rate,
        bandwidth_gb_s=found.bandwidth_gb_s,
        **case.counts(max_foreign),
    )


def over_plain(rows: Sequence[Row], row: Row) -> float:
    """Tokens per second over those of the same engine at K = 0, at the row's batch."""
    plain = next(r for r in rows if r.case == (row.engine, 0, row.batch))
    return row.tokens_per_s / plain.tokens_per_s


def pays_from(rows: Sequence[Row], row: Row) -> float | None:
    """The acceptance from which a row's K is as fast as K = 0 at its batch, or None.

    Between two measured acceptances the speed-up is interpolated linearly.
    """
    line = sorted(
        (r.synthetic_acceptance or 0.0, over_plain(rows, r)) for r in rows if r.case == row.case
    )
    if line[0][1] >= 1:
        return line[0][0]
    for (low, before), (high, after) in pairwise(line):
        if after >= 1:
            return low + (high - low) * (1 - before) / (after - before)
    return None


def share(start: float | None) -> str:
    """The cell "pays from"."""
    return "never" if start is None else f"{start:.0%}"


def rows_of(record: Record) -> list[Row]:
    """A record's rows."""
    return [Row(**row) for row in record["rows"]]


def table(record: Record) -> Table:
    """A record's table."""
    rows = rows_of(record)

    def known(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    columns: Columns[Row] = {
        "engine": lambda row: row.engine,
        "K": lambda row: str(row.spec_tokens),
        "batch": lambda row: str(row.batch),
        "synthetic acceptance": lambda row: known(row.synthetic_acceptance, ".0%"),
        "tokens/step": lambda row: f"{row.tokens_per_step:.2f}",
        "ms/step": lambda row: f"{row.ms_per_step:.2f}",
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "over K=0": lambda row: f"{over_plain(rows, row):.2f}x",
        "pays from": lambda row: (
            "-" if row.synthetic_acceptance is None else share(pays_from(rows, row))
        ),
        "GB/s": lambda row: known(row.bandwidth_gb_s, ".1f"),
        "samples": sample_counts,
    }
    return Table.of("Speed by synthetic acceptance", columns, rows, NOTES)


def groups(args: argparse.Namespace, workdir: Path, tell: Tell) -> Iterator[Iterable[Decoder]]:
    """The groups of decoders that are sampled in rounds, each on one set of weights.

    A group is made after the previous one is closed. Each other engine is a group of its own.
    """
    checkpoint = command.write_mimo(args, workdir, tell)
    yield _ours("mtpc", checkpoint.load_target(), args, tell)
    for scheme in args.quantize:
        source = checkpoint.write_quantised(scheme, workdir)
        yield _ours(f"mtpc {scheme}", source, args, tell)
    sizes = (command.max_len(args), max(args.batches))
    kinds = ("BF16", "Q4_0") if args.quantize else ("BF16",)
    numbers = (0, *args.spec_tokens)
    place = (args, checkpoint.directory, numbers, sizes, tell, kinds)
    yield from ([peer] for peer in peer_decoders(*place))


def _ours(engine: str, source: Any, args: argparse.Namespace, tell: Tell) -> Iterator[Decoder]:
    """K = 0, and every K at every acceptance."""
    for k in (0, *args.spec_tokens):
        tell(f"compile {engine} K={k}")
        decoder = MtpcDecoder.compile(
            source,
            engine,
            spec_tokens=k,
            **command.decode_options(args),
            synthetic_acceptance_rates=(0.0,) * k,
        )
        yield from [SyntheticDecoder(decoder, p) for p in args.acceptance] if k else [decoder]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell, probe = command.begin(args), BandwidthProbe(args.probe_mib << 20)
    plan = command.plan_of(args)
    prompts = plan.prompts(max(args.batches), SHAPES[args.shape].vocab_size)

    def measured(group: Iterable[Decoder]) -> list[Row]:
        gc.collect()  # What the group before has left.
        with opened(group) as decoders:
            cases = [
                Case("mimo", "random", d, batch, 0) for d in decoders for batch in args.batches
            ]
            sample_in_turns(cases, plan, prompts, probe, tell)
            return [summarise(case, args.max_foreign) for case in cases]

    with command.working_directory(args.workdir) as workdir:
        parts = map(measured, groups(args, workdir, tell))
        publish_parts("acceptance", args, parts, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "acceptance", __doc__, *command.FILES, "--shape", "--quantize", *command.PEERS, "--backend",
        *command.SAMPLING, "--probe-mib", batches=[1, 4, 8], spec_tokens=[1, 2, 3],
        acceptance=[0, 0.25, 0.5, 0.75, 1], prompt_tokens=32, new_tokens=64, repeats=3,
    )  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
