"""lower-choices: its operators, what the pass takes and leaves, and whole steps on the CPU.

gpu/test_largest.py tests the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.small_graphs import check_pass, operations, small_graph
from helpers.tiny import make_checkpoint
from helpers.whole_steps import check_no_token_changes, rewritten
from torch import Tensor

from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes.lower_choices import LowerChoices
from mtpc.passes import Verifier, run_pipeline
from mtpc.passes.canonicalise import Canonicalise

OPS = torch.ops.mtpc
ENABLED = ("lower-choices",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_is_torchs_where_that_is_defined(dtype: torch.dtype) -> None:
    """Of numbers that differ; NaN is the largest."""
    x = torch.stack([torch.randperm(96) for _ in range(5)]).to(dtype)
    x[3, 7] = torch.nan
    for mine, theirs in zip(OPS.topk(x, 6), x.topk(6), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.is_contiguous()


def test_of_equal_numbers_the_first_comes_first() -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, 2.0, torch.nan, torch.nan]])
    values, places = OPS.topk(x, 7)
    assert places.tolist() == [[6, 7, 1, 2, 5, 0, 3]]
    torch.testing.assert_close(values, x.gather(1, places), rtol=0, atol=0, equal_nan=True)


def test_experts_are_chosen_within_the_best_groups() -> None:
    """As transformers' DeepSeek-V3 does; of numbers that differ, so that it is defined."""
    x = torch.randn(20, 32)
    values, places = OPS.group_topk(x, 4, 8, 2)
    _routed(x, 8, 2, 4, found := torch.zeros(20, 4, dtype=torch.int64))
    assert torch.equal(places, found)
    assert torch.equal(values, x.gather(1, places))
    assert not torch.equal(places, x.topk(4).indices)


def test_schemas_and_fakes() -> None:
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.topk.default, (bf16(3, 2, 8), 2), test_utils=tests)
    torch.library.opcheck(OPS.group_topk.default, (torch.randn(3, 8), 2, 4, 2), test_utils=tests)
    torch.library.opcheck(OPS.row_max.default, (bf16(3, 2, 8),), test_utils=tests)


# ---- The pass --------------------------------------------------------------------------------


def _graph(body: Callable[..., None], x: Tensor, out: tuple[int, ...]) -> Any:
    return small_graph(body, x=x, batch_out=torch.zeros(out, dtype=torch.int64))


def test_a_routers_choice_becomes_an_operator() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(x.topk(2, dim=1, sorted=False).indices)

    graph = _graph(body, bf16(3, 16).float(), (3, 2))
    check_pass(
        graph, LowerChoices(), "topk[] getitem[3,2] getitem[3,2] copy_[3,2]",
        "topk[] getitem[3,2] copy_[3,2]", rewrites=1,
    )  # fmt: skip
    assert "mtpc.topk" in graph.text()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 16), dict(k=2, dim=0)),
        ((3, 16), dict(k=2, largest=False)),
        ((3, 1025), dict(k=2)),
        ((3, 64), dict(k=17)),
        ((3, 64), dict(k=0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_other_choices_stay(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(x.topk(**options).indices)

    x = (8 * torch.randn(shape)).to(dtype)
    graph = _graph(body, x, tuple(x.topk(**options).indices.shape))
    text = graph.text()
    assert LowerChoices().apply(graph) == 0
    assert graph.text() == text


def _routed(
    x: Tensor, groups: int, kept: int, count: int, out: Tensor, of: int = 2,
    fill: float = -torch.inf, written: bool = False,
) -> None:  # fmt: skip
    """A router's choice as transformers writes it."""
    totals = x.view(-1, groups, x.shape[1] // groups).topk(of, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(totals, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(totals)
    mask.scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, x.shape[1] // groups).reshape(-1, x.shape[1])
    if written:
        x.neg_()
    left = x.masked_fill(~mask.bool(), fill)
    out.copy_(torch.topk(left, k=count, dim=-1, sorted=True)[1])


@pytest.mark.parametrize(
    ("groups", "kept", "after"), [(4, 2, "group_topk[]"), (4, 4, "topk[]"), (1, 1, "topk[]")]
)
def test_a_choice_within_groups_becomes_one_operator(groups: int, kept: int, after: str) -> None:
    def body(x: Tensor, out: Tensor) -> None:
        _routed(x, groups, kept, 3, out)

    x = torch.randn(5, 16)
    graph = _graph(body, x, (5, 3))
    run_pipeline(graph, (Canonicalise(),), Verifier(propagate=True))
    before = " ".join(operations(graph))
    rest = " getitem[5,3] copy_[5,3]"
    rewrites = 1 + (kept == groups)
    check_pass(graph, LowerChoices(), before, after + rest, rewrites)


@pytest.mark.parametrize("options", [dict(of=3), dict(fill=0.0)])
def test_other_choices_within_groups_stay(options: dict[str, Any]) -> None:
    """Each topk is an operator of its own then."""

    def body(x: Tensor, out: Tensor) -> None:
        _routed(x, 4, 2, 3, out, **options)

    graph = _graph(body, torch.randn(5, 16), (5, 3))
    run_pipeline(graph, (Canonicalise(),), Verifier(propagate=True))
    assert LowerChoices().apply(graph) == 3
    assert "group_topk" not in graph.text()


def test_numbers_that_are_written_in_between_keep_their_mask() -> None:
    def body(x: Tensor, out: Tensor) -> None:
        _routed(x.clone(), 4, 2, 3, out, written=True)

    graph = _graph(body, torch.randn(5, 16), (5, 3))
    run_pipeline(graph, (Canonicalise(),), Verifier(propagate=True))
    assert LowerChoices().apply(graph) == 3
    assert "group_topk" not in graph.text()


def _max(x: Tensor, out: Tensor) -> None:
    best, places = x.max(-1)
    out.copy_(torch.where(torch.isfinite(best), places, -1))


def _argmax(x: Tensor, out: Tensor) -> None:
    out.copy_(x.argmax(1))


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        (_max, "max[] getitem[3] getitem[3]", "row_max[] getitem[3] getitem[3]"),
        (_argmax, "argmax[3]", "row_max[] getitem[3]"),
    ],
)
def test_a_heads_choice_becomes_an_operator(
    body: Callable[..., None], before: str, after: str
) -> None:
    x = bf16(3, 8192)
    x[1, 7000] = torch.nan
    rest = " isfinite[3] where[3] copy_[3]" if body is _max else " copy_[3]"
    check_pass(_graph(body, x, (3,)), LowerChoices(), before + rest, after + rest, rewrites=1)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((3, 8191), dict(dim=-1)), ((8192, 3), dict(dim=0)), ((3, 8192), dict(dim=-1, keepdim=True)),
     ((1, 8192), dict())],
)  # fmt: skip
def test_other_maxima_stay(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(x.argmax(**options))

    x = bf16(*shape)
    assert LowerChoices().apply(_graph(body, x, tuple(x.argmax(**options).shape))) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_numbers_without_a_kernel_stay(dtype: torch.dtype) -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(x.topk(2).indices)

    assert LowerChoices().apply(_graph(body, torch.arange(8).to(dtype), (2,))) == 0


@pytest.mark.parametrize(
    "family", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_no_choice_of_a_router_is_left(family: str, checkpoint: Callable[..., Path]) -> None:
    backend, directory = EagerBackend(), checkpoint(family, "random")
    before, after = (
        rewritten(directory, backend=backend, enabled_passes=enabled) for enabled in ((), ENABLED)
    )
    names = [[str(node.target) for node in graph.graph.nodes] for graph in (before, after)]
    chosen = "mtpc.group_topk.default" if family == "deepseek_v3" else "mtpc.topk.default"
    routers = names[0].count("mtpc.experts.default")
    assert names[0].count("aten.topk.default") == 3 * routers > 0
    assert names[1].count(chosen) == routers
    assert not {"aten.topk.default", "aten.scatter_.value"} & {*names[1]}


def test_no_choice_of_a_head_is_left(tmp_path: Path) -> None:
    """The target's and the draft's; of as many tokens as make it worth it."""
    directory = make_checkpoint("mimo", tmp_path, vocab_size=8192)
    graph = rewritten(directory, backend=EagerBackend(), enabled_passes=ENABLED)
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("mtpc.row_max.default") == 2
    assert not {"aten.max.dim", "aten.argmax.default"} & {*names}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_no_token_changes(family: str, checkpoint: Callable[..., Path]) -> None:
    check_no_token_changes(checkpoint(family), (), ENABLED)
