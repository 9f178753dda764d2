"""Hyper-connections against transformers' own; Sinkhorn-Knopp's kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.models.families.deepseek_v4 import HyperConnection

load_kernels()
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def connection(rounds: int) -> Any:
    """transformers' module of four streams, with weights that tell the streams apart."""
    config = DeepseekV4Config(hidden_size=16, hc_mult=4, hc_sinkhorn_iters=rounds)
    module = DeepseekV4HyperConnection(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.requires_grad_(False)


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_transformers(rounds: int, dtype: torch.dtype) -> None:
    theirs = connection(rounds)
    streams = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(4)).to(dtype)
    for expected, found in zip(theirs(streams), HyperConnection(theirs)(streams), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_nodes_do_not_grow_with_rounds() -> None:
    streams = torch.randn(1, 3, 4, 16)
    counts = [
        len(make_fx(HyperConnection(connection(rounds)))(streams).graph.nodes) for rounds in (2, 20)
    ]
    assert counts[0] == counts[1] < 60
    assert len(make_fx(connection(20))(streams).graph.nodes) > 150


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "rounds"), [(1, 1), (2, 20), (4, 1), (4, 20), (7, 3)])
def test_kernel_equals_reference(n: int, rounds: int, dtype: torch.dtype) -> None:
    logits = 4 * torch.randn(33, n, n, generator=torch.Generator().manual_seed(n), dtype=dtype)
    before = logits.clone()
    found = torch.ops.mtpc_cpu.sinkhorn(logits, rounds, 1e-6)
    expected = torch.ops.mtpc.sinkhorn(logits, rounds, 1e-6)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(logits, before)
    turned = torch.ops.mtpc_cpu.sinkhorn(logits.mT, rounds, 1e-6)
    torch.testing.assert_close(
        turned, torch.ops.mtpc.sinkhorn(logits.mT, rounds, 1e-6), atol=TOLERANCE[dtype], rtol=0
    )
    alone = torch.ops.mtpc_cpu.sinkhorn(logits[7:8], rounds, 1e-6)
    assert torch.equal(alone, found[7:8])


def test_columns_sum_to_one_and_rows_nearly() -> None:
    logits = torch.randn(9, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ops in (torch.ops.mtpc, torch.ops.mtpc_cpu):
        mixed = ops.sinkhorn(logits, 20, 1e-9)
        assert (mixed.sum(-2) - 1).abs().max() < 1e-8
        assert (mixed.sum(-1) - 1).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("shape", "rounds", "dtype", "message"),
    [
        ((3, 2, 4), 2, torch.float32, r"expected logits \[T, n, n\]"),
        ((3, 2, 2), 0, torch.float32, "rounds >= 1"),
        ((3, 2, 2), 2, torch.bfloat16, "float32 or float64"),
    ],
)
def test_kernel_refuses(
    shape: tuple[int, ...], rounds: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.mtpc_cpu.sinkhorn(torch.zeros(shape, dtype=dtype), rounds, 1e-6)
