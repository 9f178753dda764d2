"""Rewrites graphs so that calls give each argument by name."""

from __future__ import annotations

from mtpc.capture.graph import StepGraph, operators


def spell_out(graph: StepGraph) -> None:
    """Give every call of an operator each argument by name, defaults included."""
    for node, op in operators(graph.graph):
        names = [argument.name for argument in op._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
        node.args, node.kwargs = (), {**defaults, **given}
