"""The rows of benchmarks.gpu's CSV, and the findings from them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FUSED, LATE = "mtpc, one graph", "mtpc, one graph, read late"
APART, COMPILED = "mtpc, a graph a piece", "mtpc, compiled pieces"
ENGINES = (FUSED, LATE, APART, COMPILED)
"""Of one compiled step; the last two of the same pieces of it."""
_KEYS = ("part", "shape", "engine", "spec_tokens", "batch")


@dataclass
class Row:
    """The results of one case. Fields that do not apply are None.

    Attributes:
        part: "ops", "gate", "invariance", "sampling", "aot", "speed", "profile"; "time" of a kernel
            alone; "gap" and "kernel" of a profile.
        device: where.
        shape: the model: a shape's or a family's name; of ops the op's.
        engine: one of ENGINES, or what was compared; of a profile's parts the kernel.
        spec_tokens: K.
        batch: requests.
        passed: of a check; False also of what raised an error.
        ms_step: wall time of a decode step, host included.
        ms_device: of it, on the device.
        host_us: of it, when the device had nothing to do.
        launch_us: host time until an iteration's launch returned.
        launches: graphs (or compiled pieces) launched per iteration.
        kernels: per iteration.
        tokens_per_s: all requests together.
        acceptance: accepted over verified drafts.
        step_bytes: weights that a step has to read.
        copy_gb_s: a copy's bandwidth just before, read and written.
        of_bandwidth: step_bytes over ms_device, over copy_gb_s.
        floor_ms: step_bytes over copy_gb_s.
        gap_ms: ms_device beyond floor_ms.
        graph_mib: device memory that capture took.
        build_s: seconds to trace, compile and capture.
        note: anything else.
    """

    part: str
    device: str
    shape: str
    engine: str
    spec_tokens: int
    batch: int
    passed: bool | None = None
    ms_step: float | None = None
    ms_device: float | None = None
    host_us: float | None = None
    launch_us: float | None = None
    launches: float | None = None
    kernels: int | None = None
    tokens_per_s: float | None = None
    acceptance: float | None = None
    step_bytes: int | None = None
    copy_gb_s: float | None = None
    of_bandwidth: float | None = None
    floor_ms: float | None = None
    gap_ms: float | None = None
    graph_mib: float | None = None
    build_s: float | None = None
    note: str = ""

    @property
    def case(self) -> tuple[str, ...]:
        """The key of the case; a CSV has one row for each."""
        return tuple(str(getattr(self, key)) for key in _KEYS)


class RowFile:
    """A CSV to which rows are written at once, so that an interrupt loses none.

    Args:
        path: of the file, or None.
        resume: keep what is there, but for what failed.
    """

    def __init__(self, path: Path | None, resume: bool = False):
        self._path, self.there = path, set[tuple[str, ...]]()
        if path is None:
            return
        kept: list[dict[str, str]] = []
        if resume and path.is_file():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if row["passed"] != "False"]
        self.there |= {tuple(row[key] for key in _KEYS) for row in kept}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(kept)

    def add(self, row: Row) -> None:
        """Write one more row."""
        self.there.add(row.case)
        if self._path is None:
            return
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writerow({name: _cell(value) for name, value in asdict(row).items()})


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


FIGURES = {
    "K": ("spec_tokens", ".0f"),
    "batch": ("batch", ".0f"),
    "ms a step": ("ms_step", ".3f"),
    "ms on the device": ("ms_device", ".4f"),
    "host us": ("host_us", ".0f"),
    "kernels": ("kernels", ".0f"),
    "tokens/s": ("tokens_per_s", ".0f"),
    "accepted": ("acceptance", ".0%"),
    "of bandwidth": ("of_bandwidth", ".0%"),
}
"""Columns of tables: field and format."""


def figures(row: Mapping[str, Any]) -> list[str]:
    """The cells of `FIGURES`; empty where a row has none."""
    known = ((row.get(name), form) for name, form in FIGURES.values())
    return ["" if value is None else format(value, form) for value, form in known]


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Lines that compare the rows with the project's goals."""
    fused = [row for row in rows if row.engine == FUSED and row.ms_device]
    if not fused:
        return
    launches = {row.launches for row in fused}
    yield f"graph launches per iteration: {sorted(launches, key=str)} (goal 1)"
    for engine, how in ((FUSED, "read at once"), (LATE, "read late")):
        times = [row.host_us for row in rows if row.engine == engine and row.host_us is not None]
        if times:
            yield f"host time per iteration, {how}: at most {max(times):.0f} us (goal 50 us)"
    for row in (r for r in fused if r.batch == 1 and r.of_bandwidth):
        yield (
            f"{row.shape}, K={row.spec_tokens}, batch 1: {row.of_bandwidth:.0%} of the copy "
            "bandwidth (goal 75%)"
        )
    yield from _against_pieces(rows, fused)
    yield from _draft_costs(fused)
    for row in (r for r in rows if r.part == "gap"):
        yield (
            f"{row.shape}, K={row.spec_tokens}: {row.engine} takes {row.ms_device:.3f} ms, "
            f"{row.gap_ms:.3f} ms beyond its bytes"
        )


def _against_pieces(rows: Sequence[Row], fused: Iterable[Row]) -> Iterator[str]:
    apart = {r.case[1:2] + r.case[3:]: r for r in rows if r.engine == APART and r.ms_step}
    for row in fused:
        other = apart.get(row.case[1:2] + row.case[3:])
        if other is not None and row.spec_tokens:
            gain = (other.ms_step or 0) / (row.ms_step or 1)
            yield (
                f"{row.shape}, K={row.spec_tokens}, batch {row.batch}: {gain:.2f}x the speed of a "
                "graph a piece (goal 1.15x at small batch)"
            )


def _draft_costs(fused: Sequence[Row]) -> Iterator[str]:
    """A draft's time over that of reading its bytes: between the fewest and the most drafts."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in fused:
        if row.spec_tokens:
            groups.setdefault((row.shape, row.batch), []).append(row)
    for (shape, batch), group in groups.items():
        few, many = (f(group, key=lambda r: r.spec_tokens) for f in (min, max))
        nbytes = (many.step_bytes or 0) - (few.step_bytes or 0)
        if nbytes and many.copy_gb_s:
            seconds = 1e-3 * ((many.ms_device or 0) - (few.ms_device or 0))
            ratio = seconds * many.copy_gb_s * 1e9 / nbytes
            yield f"{shape}, batch {batch}: a draft costs {ratio:.2f}x its bytes (goal 1.3x)"
