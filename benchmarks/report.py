"""Rows of the decode benchmark as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.command import print_results
from benchmarks.harness.sampling import Row

NOTES = (
    "ms/step: one decode step (K drafts verified, K proposed), prefill not counted; medians.",
    "speedup: tokens/s over the same engine's at K=0, same model, weights and batch.",
    "vs vLLM: tokens/s over vLLM's CPU build at the same K, same model, weights and batch.",
    "vs tf: tokens/s over transformers' generate at K=0, same model, weights and batch.",
    "vs use_mtp: tokens/s over generate(use_mtp=True), same K, model, weights; of batch 1.",
    "roofline: reading the step's weights once each at the bandwidth measured around the sample.",
    "of a mixture, experts count as if rows chose independently; alike ones choose fewer.",
    "where vLLM was started anew for each round (--vllm-relaunch), its best sample counts.",
    "roofline, efficiency: mean nothing for a model that the caches hold, as they do the demo's.",
    "samples: kept + dropped because others used the CPU; *: all were disturbed, none dropped.",
)

_PlainKey = tuple[str, str, str, int]
"""Engine, model, weights, batch."""
_Cells = Callable[[Row, "_Baselines"], str]


class _Baselines:
    """Finds the rows that others are compared with."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._all = {(row.spec_tokens, *_plain_key(row, row.engine)): row for row in rows}
        self._plain = {_plain_key(row, row.engine): row for row in rows if row.spec_tokens == 0}

    def ratio(self, row: Row, engine: str | None = None) -> str:
        """Tokens/s of a row over those of an engine that decodes plainly; its own by default."""
        plain = self._plain.get(_plain_key(row, engine or row.engine.split(",")[0]))
        return f"{row.tokens_per_s / plain.tokens_per_s:.2f}x" if plain else "-"

    def same(self, row: Row, engine: str) -> str:
        """Tokens/s of a row over those of an engine with the same number of drafts."""
        return self._over(row, _plain_key(row, engine))

    def use_mtp(self, row: Row) -> str:
        """Tokens/s of a row over those of transformers that drafts, which takes one request."""
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
    "speedup": lambda row, plain: plain.ratio(row),
    "vs tf": lambda row, plain: plain.ratio(row, "transformers"),
    "vs use_mtp": lambda row, plain: plain.use_mtp(row),
    "vs vLLM": lambda row, plain: plain.same(row, "vLLM"),
    "GB/s": lambda row, _: f"{row.bandwidth_gb_s:.1f}",
    "roofline ms": lambda row, _: f"{row.roofline_ms:.2f}",
    "efficiency": lambda row, _: _percent(row.efficiency),
    "samples": lambda row, _: f"{row.samples}+{row.discarded}{row.disturbed * '*'}",
}


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table's body; batches side by side within a model, engine and K."""
    baselines = _Baselines(rows)
    return [[cell(row, baselines) for cell in COLUMNS.values()] for row in rows]


def print_rows(rows: Sequence[Row]) -> None:
    """The table on standard output."""
    print_results("Decoding", list(COLUMNS), cells(rows), NOTES)
