"""A benchmark's table, declared once as columns with their notes, and rendered of any record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtpc.cli.tables import output, print_table

Row = dict[str, Any]
"""One row of a record: what identifies it, and its figures by name."""
Record = dict[str, Any]
"""`benchmark` (its module's name), `machine`, `versions`, `arguments`, `rows`, and more by name."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: what stands above it.
        of: the field of a row, or what makes a value of a row and all rows; default: the heading.
        form: as `format` takes it; an "x" may follow. "-" stands for None, and for what is absent.
        note: a line below the table, which begins with the heading.
        factor: what numbers are multiplied by.
    """

    heading: str
    of: str | Callable[[Row, Sequence[Row]], Any] = ""
    form: str = ""
    note: str = ""
    factor: float = 1

    def cell(self, row: Row, rows: Sequence[Row]) -> str:
        """The text of a row's cell."""
        name = self.of or self.heading
        value = row.get(name) if isinstance(name, str) else name(row, rows)
        if value is None:
            return "-"
        if not self.form or isinstance(value, str):
            return str(value)
        form = self.form.removesuffix("x")
        return format(value * self.factor, form) + self.form[len(form) :]


def fields(text: str) -> list[Column]:
    """Columns without notes, by "HEADING=FIELD:FORM", with commas between them.

    A field that has the heading's name, and a form that is `str`'s, may be left out.
    """
    found = []
    for each in text.split(", "):
        named, _, form = each.partition(":")
        heading, _, name = named.rpartition("=")
        found.append(Column(heading or name, name, form))
    return found


def other_row(row: Row, rows: Sequence[Row], keys: Sequence[str], **other: Any) -> Row | None:
    """The row that differs from `row` in no key but those of `other`, where it has their values."""
    wanted = {key: row.get(key) for key in keys} | other
    fitting = (r for r in rows if all(r.get(key) == value for key, value in wanted.items()))
    return next(fitting, None)


def over(
    name: str, keys: Sequence[str], inverse: bool = False, **other: Any
) -> Callable[[Row, Sequence[Row]], float | None]:
    """What makes the ratio of a row's figure to that of `other_row`.

    Args:
        name: of the figure.
        keys: see `other_row`.
        inverse: the other row's figure over this one's.
        **other: see `other_row`; of a function, its value for the row.
    """

    def ratio(row: Row, rows: Sequence[Row]) -> float | None:
        changes = {key: value(row) if callable(value) else value for key, value in other.items()}
        base = other_row(row, rows, keys, **changes)
        if base is None:
            return None
        return base[name] / row[name] if inverse else row[name] / base[name]

    return ratio


def _sample_counts(row: Row, rows: Sequence[Row]) -> str:
    return f"{row['samples']}+{row['discarded']}{'*' * row['disturbed']}"


SAMPLES = Column(
    "samples",
    _sample_counts,
    note="kept + dropped because other processes used the CPU; *: all were disturbed, none "
    "dropped.",
)


@dataclass(frozen=True)
class Table:
    """A record's rows as text.

    Attributes:
        title: what was measured.
        columns: headings.
        cells: the body, a text for each column.
        notes: lines below it.
    """

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str]

    def print(self) -> None:
        """Write it to standard output."""
        console = output()
        print_table(self.title, self.columns, self.cells)
        for note in self.notes:
            console.print(note, style="dim", soft_wrap=True)


@dataclass(frozen=True)
class TableForm:
    """How records become tables.

    Attributes:
        title: what was measured; it may name the record's arguments in braces.
        columns: in their order.
        notes: lines below the table, after those of columns; or what makes them of a record.
        rows: what makes the rows to show of a record; default: its rows.
        hides_empty: leave out columns in which no row has anything.
    """

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] | Callable[[Record], Iterable[str]] = ()
    rows: Callable[[Record], Sequence[Row]] = lambda record: record["rows"]
    hides_empty: bool = False

    def of(self, record: Record) -> Table:
        """A record's table."""
        rows = self.rows(record)
        cells = [[column.cell(row, rows) for column in self.columns] for row in rows]
        shown = [
            index
            for index in range(len(self.columns))
            if not self.hides_empty or any(line[index] != "-" for line in cells)
        ]
        columns = [self.columns[index] for index in shown]
        notes = [f"{column.heading}: {column.note}" for column in columns if column.note]
        notes += self.notes(record) if callable(self.notes) else self.notes
        title = self.title.format(**record.get("arguments", {}))
        body = [[line[index] for index in shown] for line in cells]
        return Table(title, [column.heading for column in columns], body, notes)


def pipes(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def to_markdown(record: Record, table: Table) -> str:
    """The table, its notes, and what it was measured on."""
    notes = list(table.notes)
    for name in ("machine", "versions", "arguments"):
        if record[name]:
            notes.append(f"{name}: {', '.join(f'{k} {v}' for k, v in record[name].items())}")
    return "\n".join([*pipes(table.columns, table.cells), "", *(f"- {n}" for n in notes), ""])
