"""hold-shared: a computed value that several operators read is in memory once."""

from __future__ import annotations

import torch
from helpers.small_graphs import check_pass, small_graph
from torch import Tensor

from mtpc import ops
from mtpc.backends.gpu.passes.hold_shared import HoldShared


def test_two_readers_share_a_view() -> None:
    def step(out: Tensor, x: Tensor, one: Tensor, other: Tensor) -> None:
        wide = x + 1
        out.copy_(ops.rms_norm(wide, one, 1e-6) + ops.rms_norm(wide, other, 1e-6))

    graph = small_graph(
        step,
        batch_out=torch.zeros(2, 8),
        x=torch.randn(2, 8),
        one=torch.ones(8),
        other=torch.full((8,), 2.0),
    )
    check_pass(
        graph,
        HoldShared(),
        "add[2,8] rms_norm[2,8] rms_norm[2,8] add[2,8] copy_[2,8]",
        "add[2,8] as_strided[2,8] rms_norm[2,8] rms_norm[2,8] add[2,8] copy_[2,8]",
        1,
    )


def test_what_is_in_memory_stays() -> None:
    """A weight that two calls read, and a value that one call reads."""

    def step(out: Tensor, x: Tensor, weight: Tensor) -> None:
        out.copy_(ops.rms_norm(ops.rms_norm(x, weight, 1e-6), weight, 1e-6))

    graph = small_graph(
        step, batch_out=torch.zeros(2, 8), x=torch.randn(2, 8), weight=torch.ones(8)
    )
    same = "rms_norm[2,8] rms_norm[2,8] copy_[2,8]"
    check_pass(graph, HoldShared(), same, same, 0)


def test_a_write_in_between_makes_another_value() -> None:
    def step(out: Tensor, x: Tensor, weight: Tensor) -> None:
        wide = x + 1
        first = ops.rms_norm(wide, weight, 1e-6)
        wide.mul_(2)
        out.copy_(first + ops.rms_norm(wide, weight, 1e-6))

    graph = small_graph(
        step, batch_out=torch.zeros(2, 8), x=torch.randn(2, 8), weight=torch.ones(8)
    )
    same = "add[2,8] rms_norm[2,8] mul_[2,8] rms_norm[2,8] add[2,8] copy_[2,8]"
    check_pass(graph, HoldShared(), same, same, 0)
