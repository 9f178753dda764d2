"""Tables and units of the command line's output. Only functions that print import rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 240
"""The width in columns of output that is not a terminal, so wide that no cell wraps."""


def output() -> Console:
    """A console for standard output, with colours on a terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False)


def say(text: str = "", style: str | None = None) -> None:
    """Print a line, however long."""
    output().print(text, style=style, soft_wrap=True)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    total: Sequence[object] | None = None,
) -> None:
    """Print a table under a title, with a last row `total` if there is one. Columns that hold only
    numbers and quantities are aligned on the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
    )
    for index, heading in enumerate(columns):
        numeric = all(row[index][:1].isdigit() or not row[index] for row in cells)
        table.add_column(Text(heading), justify="right" if numeric and cells else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    if total is not None:
        table.add_section()
        table.add_row(*(Text(str(cell), style="bold") for cell in total))
    output().print(table)


def print_rows(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    print_table(title, [*rows[0]] if rows else (), ([*row.values()] for row in rows))


def format_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_shape(shape: Iterable[object]) -> str:
    """`(8, 64)` -> `[8, 64]`. Products of symbols have the usual order, R*Q."""
    return f"[{', '.join(str(size) for size in shape)}]".replace("Q*R", "R*Q")
