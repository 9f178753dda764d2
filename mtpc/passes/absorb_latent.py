"""absorb-latent: multi-head latent attention on the latent itself, without expanded K and V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtpc.capture.graph import StepGraph, arguments
from mtpc.passes.base import Pass, aten, emit, is_call, tidy

mtpc = torch.ops.mtpc


@dataclass(frozen=True)
class AbsorbLatent(Pass, policy="on"):
    """Rewrite `expanded_latent_attention` to `latent_attention` (DeepSeek-V2, section 2.1.2).

    q . (W_k c) = (W_k^T q) . c, and sum_j a_j (W_v c_j) = W_v (sum_j a_j c_j). So the pass
    multiplies the query by the key up-projection and the result by the value up-projection. No key
    or value is expanded, and attention reads rank + rope values per cached token. The result is
    equal up to rounding.
    """

    def apply(self, graph: StepGraph) -> int:
        found = [n for n in graph.graph.nodes if is_call(n, mtpc.expanded_latent_attention.default)]
        for node in found:
            _absorb(node)
        return tidy(graph, len(found))


def _absorb(node: fx.Node) -> None:
    q, cache, kv_up, block_table, seq_lens, query_start_loc, scale, nope = arguments(node).values()
    graph = node.graph
    heads, width = q.meta["val"].shape[1:]
    rank = kv_up.meta["val"].shape[1]
    with graph.inserting_before(node):

        def call(target: Any, *args: Any) -> fx.Node:
            return emit(graph, target, args, node)

        up = call(aten.view.default, kv_up, [heads, -1, rank])
        key_up = call(aten.slice.Tensor, up, 1, 0, nope)
        value_up = call(aten.slice.Tensor, up, 1, nope, up.meta["val"].shape[1])
        plain = call(aten.transpose.int, call(aten.slice.Tensor, q, 2, 0, nope), 0, 1)
        rotated = call(aten.slice.Tensor, q, 2, nope, width)
        absorbed = call(aten.transpose.int, call(aten.matmul.default, plain, key_up), 0, 1)
        query = call(aten.cat.default, [absorbed, rotated], -1)
        out = call(
            mtpc.latent_attention.default,
            *(query, cache, block_table, seq_lens, query_start_loc, scale, rank),
        )
        expand = call(aten.transpose.int, value_up, 1, 2)
        out = call(aten.matmul.default, call(aten.transpose.int, out, 0, 1), expand)
        out = call(aten.transpose.int, out, 0, 1)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
