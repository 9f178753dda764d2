"""fuse-cache-write: rotary embedding and the writes of keys and values as one operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import Pass, aten, emit, is_call, is_narrow, operands, tidy
from mtpc.passes.rotary import Rotary, match_rotary, rows_of

_WRITE = torch.ops.mtpc.write_cache.default
_ATTEND = torch.ops.mtpc.paged_attention.default


@dataclass(frozen=True)
class FuseCacheWrite(Pass, policy="backend"):
    """Replace what stands between projections and attention by `mtpc::rotate_and_write`.

    These are four operators: the rotary embeddings of queries and keys, and the cache writes of
    keys and values. Each reads and writes little and costs a launch. The pass needs the same angles
    for queries and keys, and the same slots for keys and values. bfloat16 only, though caches may
    hold codes; the operator rounds at the same places. On by default on backends with such a kernel
    (cpu, cuda).
    """

    def apply(self, graph: StepGraph) -> int:
        seen = _Seen()
        rewrites = 0
        for node in list(graph.graph.nodes):
            if is_call(node, _ATTEND):
                rewrites += _fuse(graph.graph, node, seen)
            seen.add(node)
        return tidy(graph, rewrites)


@dataclass
class _Seen:
    """What the walk over the graph has seen so far: rotary embeddings by the node of their result,
    and the last write to each cache."""

    rotaries: dict[Any, Rotary] = field(default_factory=dict)
    writes: dict[Any, fx.Node] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        rotary = match_rotary(node)
        if rotary is not None:
            self.rotaries[rotary.last] = rotary
        if is_call(node, _WRITE):
            self.writes[arguments(node)["cache"]] = node


def _fuse(graph: fx.Graph, attention: fx.Node, seen: _Seen) -> bool:
    """Fuse what stands before one attention node, if possible; returns whether it did."""
    q_rows, k_cache, v_cache = list(arguments(attention).values())[:3]
    q = seen.rotaries.get(rows_of(q_rows))
    k_write, v_write = (seen.writes.get(cache) for cache in (k_cache, v_cache))
    if q is None or k_write is None or v_write is None:
        return False
    _, k_rows, _, k_scale = operands(k_write, _WRITE, 4)
    turned_rows, shift = _taken_off(k_rows)
    k = seen.rotaries.get(rows_of(turned_rows))
    if k is None or not _belong_together(q, k, k_write, v_write):
        return False
    _, v_rows, slots, v_scale = operands(v_write, _WRITE, 4)
    with graph.inserting_before(max(k_write, v_write)):
        rows = [rotary.emit_rows(graph) for rotary in (q, k)]
        caches = (k_cache, v_cache, slots, k_scale, v_scale)
        args = (*rows, v_rows, *q.emit_angles(graph), *caches, *shift)
        turned = emit(graph, torch.ops.mtpc.rotate_and_write.default, args, attention)
    attention.replace_input_with(q_rows, turned)
    for write in (k_write, v_write):
        graph.erase_node(write)
    return True


def _taken_off(rows: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """Rotated keys, and what is taken off them before they are written; () if nothing is."""
    whole, shift = operands(rows, aten.sub.Tensor, 2)
    return (whole, (shift,)) if isinstance(shift, fx.Node) else (rows, ())


def _belong_together(q: Rotary, k: Rotary, k_write: fx.Node, v_write: fx.Node) -> bool:
    """Whether one operator may do both rotations and both writes.

    It may if queries and keys have the same angles, if keys and values have the same slots, if only
    the write reads the rotated keys, and if no node between the two writes reads a cache.
    """
    k_cache, k_rows, k_slots, k_scale = operands(k_write, _WRITE, 4)
    v_cache, v_rows, v_slots, v_scale = operands(v_write, _WRITE, 4)
    first, last = sorted((k_write, v_write))
    between = first.next
    while between is not last:
        if not {k_cache, v_cache}.isdisjoint(between.all_input_nodes):
            return False
        between = between.next
    return (
        (q.cos, q.sin) == (k.cos, k.sin)
        and k_slots is v_slots
        and k_cache is not v_cache
        and all(is_narrow(n) for n in (k.heads, v_rows))
        and all(s is not None for s in (k_scale, v_scale)) | all(map(is_narrow, (k_cache, v_cache)))
        and list(k_rows.users) == [k_write]
        and len(_taken_off(k_rows)[0].users) == 1
        and len(k.last.users) == 1
    )
