"""The tables of `mtpc inspect`: passes, operators, weights, buffers and effects of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from mtpc.capture.graph import StepGraph
from mtpc.cli.anatomy import (
    accesses,
    actor,
    buffer_groups,
    growth,
    operations,
    position,
    weight_kinds,
)
from mtpc.cli.tables import format_bytes, format_shape, print_table, say
from mtpc.layout import Layout, dtype_name
from mtpc.layout.buffers import N, P, Q, R, S


def print_graph(
    graph: StepGraph,
    layouts: Sequence[Layout],
    nodes: bool,
    backend: str,
    drafter: Mapping[str, str],
) -> None:
    """Print all tables of a step, and with `nodes` every node. `layouts` are its buffers in each
    bucket, and `backend` names the backend, and of several ranks one."""
    title = f"{graph.key} {position(graph)}: {graph.num_nodes} nodes, for backend {backend}"
    say(title, style="bold")
    if nodes:
        say(graph.text())
        say()
    print_table("Drafter", ("", ""), drafter.items())
    columns = ("pass", "rewrites", "seconds", "nodes before", "after")
    passes = [
        (r.name, r.rewrites, f"{r.seconds:.3f}", r.nodes_before, r.nodes_after)
        for r in graph.history
    ]
    print_table("Passes run", columns, passes)
    _print_counts(graph)
    kinds = weight_kinds(graph)
    rows = [(*numbers, format_bytes(nbytes)) for *numbers, nbytes in kinds]
    total = ("total", sum(row[1] for row in kinds), "", format_bytes(sum(row[-1] for row in kinds)))
    print_table("Weights", ("kind", "tensors", "dequantised", "size"), rows, total)
    _print_buffers(graph, layouts)
    layout = layouts[0]
    page, request = growth(layout, N), growth(layout, S)
    say(
        f"A request costs {format_bytes(request)}, whatever its length, and "
        f"{format_bytes(page // layout.sizes[P])} per token, in pages of {layout.sizes[P]} "
        "tokens.\n"
    )
    accessed = ("buffer", "order (w: write, r: read)", "written by", "read by")
    print_table("Effects on buffers", accessed, _effect_rows(graph))
    if any(node.op == "call_module" for node in graph.graph.nodes):
        text = "  The effects inside pieces are known after the pass fuse-draft-chain."
        say(text, style="dim")


def _print_counts(graph: StepGraph) -> None:
    counted = Counter(operations(graph))
    by_piece, by_operator = Counter[str](), Counter[str]()
    for (piece, name), count in counted.items():
        by_piece[piece] += count
        by_operator[name] += count
    total = ("total", counted.total())
    print_table("Nodes by piece", ("piece", "nodes"), by_piece.most_common(), total)
    rows = [
        (name, count, ", ".join(p for (p, n), _ in counted.most_common() if n == name))
        for name, count in by_operator.most_common()
    ]
    print_table("Nodes by operator", ("operator", "nodes", "in"), rows, (*total, ""))


def _print_buffers(graph: StepGraph, layouts: Sequence[Layout]) -> None:
    """Print the shared buffers once, and the buffers of a bucket with their size in each bucket."""
    names = ("buffer", "dims", "dtype", "pad", "writer")
    parts = ("Buffers shared by all buckets", True), ("Buffers of one bucket", False)
    for title, shared in parts:
        shown = layouts[:1] if shared else layouts
        groups = buffer_groups(
            graph.layout, (name for name, spec in graph.layout.items() if spec.shared == shared)
        )
        sizes = ["size"] if shared else [f"R={x.sizes[R]}, Q={x.sizes[Q]}" for x in shown]
        rows = [
            (
                *(group.label, format_shape(group.spec.dims), dtype_name(group.spec.dtype)),
                *(str(group.spec.pad), ", ".join(group.spec.writers)),
                *(_size(layout, group.names) for layout in shown),
            )
            for group in groups
        ]
        sums = (sum(group.nbytes(layout) for group in groups) for layout in shown)
        total = ("total", *[""] * (len(names) - 1), *map(format_bytes, sums))
        print_table(title, (*names, *sizes), rows, total)


def _size(layout: Layout, names: Sequence[str]) -> str:
    times = f" x {len(names)}" if len(names) > 1 else ""
    total = sum(layout.nbytes(name) for name in names)
    return f"{format_shape(layout.shape(names[0]))}{times} {format_bytes(total)}"


def _effect_rows(graph: StepGraph) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row with the order of accesses, the writers and the readers of each buffer.

    Buffers of several layers share a row if these are the same.
    """
    order: dict[str, list[str]] = {name: [] for name in graph.layout}
    actors: dict[tuple[str, str], Counter[str]] = {}
    for node, reads, writes in accesses(graph):
        for kind, names in (("r", reads), ("w", writes)):
            for name in names:
                order[name].append(kind)
                actors.setdefault((name, kind), Counter())[actor(node)] += 1
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in graph.layout:
        runs = [(kind, len(list(run))) for kind, run in groupby(order[name])]
        in_order = " ".join(kind if n == 1 else f"{kind}{n}" for kind, n in runs)
        written, read = (_listing(actors.get((name, kind), Counter())) for kind in "wr")
        alike.setdefault((in_order or "-", written, read), []).append(name)
    for cells, members in alike.items():
        for group in buffer_groups(graph.layout, members):
            yield group.label, *cells


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{what} x {n}" if n > 1 else what for what, n in counts.items()) or "-"
