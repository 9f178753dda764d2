"""batch-invariant: what the pass spells out, the check behind it, and where the option is refused.

gpu/test_batch_invariance.py tests the kernels and whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.plans import of_backend
from helpers.small_graphs import operations, run, small_graph
from torch import Tensor
from torch.nn import functional as F

from mtpc.backends import make_backend
from mtpc.backends.gpu.passes.batch_invariant import BatchInvariant
from mtpc.backends.gpu.passes.check_invariance import CheckInvariance
from mtpc.errors import BackendError, OptionError
from mtpc.passes import Verifier, run_pipeline

WEIGHT, BIAS = bf16(12, 8, seed=1), bf16(12, seed=2)
PARTS = bf16(5, 8, 6, seed=3)
SUMS = {
    "linear": (lambda x, w, b, p: F.linear(x, w, b), (5, 7, 12), "batch_invariant_linear"),
    "addmm": (lambda x, w, b, p: torch.addmm(b, x[0], w.t()), (7, 12), "batch_invariant_linear"),
    "mm": (lambda x, w, b, p: x[0] @ w.t(), (7, 12), "batch_invariant_linear"),
    "bmm": (lambda x, w, b, p: torch.bmm(x, p), (5, 7, 6), "batch_invariant_linear"),
    "matmul": (lambda x, w, b, p: (x[None] @ p[None])[0], (5, 7, 6), "batch_invariant_linear"),
    "mean": (lambda x, w, b, p: x.float().pow(2).mean(-1, keepdim=True), (5, 7, 1), "row_sum"),
    "sum": (lambda x, w, b, p: x.sum(1), (5, 8), "row_sum"),
    "softmax": (lambda x, w, b, p: x.softmax(1), (5, 7, 8), "row_sum"),
    "layer norm": (lambda x, w, b, p: F.layer_norm(x, (8,), b[:8], w[0]), (5, 7, 8), "row_sum"),
}  # fmt: skip


def _graph(body: Callable[..., Tensor], shape: tuple[int, ...]) -> Any:
    def write(out: Tensor, x: Tensor, w: Tensor, b: Tensor, p: Tensor) -> None:
        out.copy_(body(x, w, b, p))

    out = torch.zeros(shape)
    return small_graph(write, batch_out=out, x=bf16(5, 7, 8), w=WEIGHT, b=BIAS, p=PARTS)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_spelled_out(name: str) -> None:
    """By operators whose kernels keep their order; nothing else that adds is left."""
    body, shape, operator = SUMS[name]
    graph = _graph(body, shape)
    expected = run(graph)
    with pytest.raises(BackendError, match="PyTorch's sums depend on the rows"):
        CheckInvariance().apply(graph)
    run_pipeline(graph, (BatchInvariant(),), Verifier(propagate=True))
    assert any(call.startswith(f"{operator}[") for call in operations(graph))
    torch.testing.assert_close(run(graph), expected, rtol=2**-7, atol=2**-7)
    for node in graph.graph.nodes:  # As the kernels are bound.
        if str(node.target).startswith("mtpc."):
            node.target = torch.ops.aten.relu.default
    assert CheckInvariance().apply(graph) == 0


def test_what_has_no_kernel_is_refused_by_name() -> None:
    graph = _graph(lambda x, w, b, p: x.cumsum(1), (5, 7, 8))
    assert BatchInvariant().apply(graph) == 0
    with pytest.raises(BackendError, match=r"calls aten::cumsum: PyTorch's sums"):
        CheckInvariance().apply(graph)
    graph = _graph(lambda x, w, b, p: torch.ops.mtpc.row_sum(x), (5, 7))
    with pytest.raises(BackendError, match=r"calls mtpc::row_sum: it has no GPU kernel"):
        CheckInvariance().apply(graph)


def test_schemas_and_fakes() -> None:
    tests, ops = ("test_schema", "test_faketensor"), torch.ops.mtpc
    for args in ((bf16(2, 3, 8), WEIGHT, BIAS), (bf16(5, 3, 8), PARTS.mT, None)):
        torch.library.opcheck(ops.batch_invariant_linear.default, args, test_utils=tests)
    torch.library.opcheck(ops.row_sum.default, (bf16(3, 2, 8),), test_utils=tests)


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_a_cpu_always_is(backend: str) -> None:
    """In bfloat16: the steps, and their keys, are those of every program."""
    settled = of_backend(backend, "bfloat16", batch_invariant=True)
    assert (settled.backend, settled.batch_invariant) == ("cpu", False)
    with pytest.raises(OptionError, match="dtype 'float32' on the cpu backend"):
        of_backend(backend, "float32", batch_invariant=True)


def test_others_cannot() -> None:
    assert of_backend("cuda", "float32", batch_invariant=True).batch_invariant
    for name in ("eager", "null"):
        with pytest.raises(OptionError, match=f"batch_invariant is True with backend '{name}'"):
            of_backend(name, "bfloat16", batch_invariant=True)
        with pytest.raises(OptionError, match="expected 'cuda' or 'cpu'"):
            make_backend(name, batch_invariant=True)
