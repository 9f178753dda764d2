"""The table of the decode benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.results import SAMPLES_NOTE, Record, Table, sample_counts
from benchmarks.harness.sampling import Row

NOTES = (
    "ms/step: one decode step (K drafts verified, K proposed) without prefill; medians.",
    "of plain step: ms/step over the same engine's at K = 0, same model, weights and batch.",
    "over plain: tokens/s over the same engine's at K = 0, same model, weights and batch.",
    "over vLLM: tokens/s over vLLM's CPU build at the same K, same model, weights and batch; "
    "(memory ...) where the bandwidth was that much faster or slower for this row than for vLLM's.",
    "over Q4_0: tokens/s over llama.cpp's of the same weights in that type, which decodes plainly.",
    "over transformers: tokens/s over generate at K = 0, same model, weights and batch.",
    "over use_mtp: tokens/s over generate(use_mtp=True) at batch 1, same K, model and weights.",
    "limit ms: the time that reading the step's weights takes at the bandwidth around the sample: "
    "the target once, the MTP layer K times, the head K + 1 times.",
    "of the memory limit: limit ms over ms/step.",
    "The limit counts a mixture's experts as if rows chose independently. Similar rows choose "
    "fewer experts.",
    "The limit means nothing for a model that the caches hold, such as the demo model.",
    "Where vLLM was started anew for each round (--vllm-relaunch), its best sample counts.",
    SAMPLES_NOTE,
)
COMPARABLE = 1.1
"""The cell of a ratio is marked if the bandwidths of its two rows differ by more than this."""

_PlainKey = tuple[str, str, str, int]
"""Engine, model, weights, batch."""
_Cells = Callable[[Row, "_Baselines"], str]


class _Baselines:
    """Finds the rows with which others are compared."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._all = {(row.spec_tokens, *_plain_key(row, row.engine)): row for row in rows}
        self._plain = {_plain_key(row, row.engine): row for row in rows if row.spec_tokens == 0}

    def ratio(self, row: Row, engine: str | None = None) -> str:
        """Tokens/s of a row relative to plain decoding, of its own engine by default."""
        plain = self._plain.get(_plain_key(row, engine or row.engine.split(",")[0]))
        return f"{row.tokens_per_s / plain.tokens_per_s:.2f}x" if plain else "-"

    def step_ratio(self, row: Row) -> str:
        """Milliseconds per step of a row relative to its own engine's plain decoding."""
        plain = self._plain.get(_plain_key(row, row.engine.split(",")[0]))
        return f"{row.ms_per_step / plain.ms_per_step:.2f}" if plain else "-"

    def same(self, row: Row, engine: str) -> str:
        """Tokens/s of a row relative to an engine with the same K."""
        key = _plain_key(row, engine)
        other = self._all.get((row.spec_tokens, *key))
        faster = row.bandwidth_gb_s / other.bandwidth_gb_s if other else 1.0
        is_comparable = 1 / COMPARABLE <= faster <= COMPARABLE
        return self._over(row, key) + ("" if is_comparable else f" (memory {faster:.2f}x)")

    def use_mtp(self, row: Row) -> str:
        """Tokens/s of a row relative to transformers' `use_mtp`, which takes one request."""
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
    "of plain step": lambda row, plain: plain.step_ratio(row),
    "over plain": lambda row, plain: plain.ratio(row),
    "over Q4_0": lambda row, plain: plain.ratio(row, "llama.cpp Q4_0"),
    "over transformers": lambda row, plain: plain.ratio(row, "transformers"),
    "over use_mtp": lambda row, plain: plain.use_mtp(row),
    "over vLLM": lambda row, plain: plain.same(row, "vLLM"),
    "GB/s": lambda row, _: f"{row.bandwidth_gb_s:.1f}",
    "limit ms": lambda row, _: f"{row.roofline_ms:.2f}",
    "of the memory limit": lambda row, _: _percent(row.efficiency),
    "samples": lambda row, _: sample_counts(row),
}


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table; rows of one model, engine and K are adjacent."""
    baselines = _Baselines(rows)
    return [[cell(row, baselines) for cell in COLUMNS.values()] for row in rows]


def table(record: Record) -> Table:
    """A record's table, without empty columns."""
    rows = [Row(**row) for row in record["rows"]]
    lines = cells(rows)
    told = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in lines)]
    shown = [[line[i] for i in told] for line in lines]
    return Table("Decoding", [list(COLUMNS)[i] for i in told], shown, NOTES)
