"""fuse-draft-entry: the operator, what the pass takes and leaves, and whole steps on the CPU.

gpu/test_norms.py tests its kernel, gpu/test_steps.py steps that are bound to it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.families import EACH_FAMILY_OF_FEW
from helpers.small_graphs import check_pass, small_graph
from helpers.whole_steps import check_no_token_changes, rewritten
from torch import Tensor

from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes.fuse_draft_entry import FuseDraftEntry

OPS = torch.ops.mtpc
ENABLED = ("fuse-elementwise", "fuse-draft-entry")
ENTRY = OPS.draft_entry.default


def call(namespace: Any = OPS, **changes: Any) -> Tensor:
    """The entry of five rows of 24."""
    made: dict[str, Any] = dict(
        left=bf16(5, 24), left_weight=bf16(24, seed=1), right=bf16(5, 24, seed=2),
        right_weight=bf16(24, seed=3), epsilon=1e-6, plus_one=False,
    )  # fmt: skip
    return namespace.draft_entry(*{**made, **changes}.values())


@pytest.mark.parametrize("plus_one", [False, True])
def test_it_is_two_norms_side_by_side(plus_one: bool) -> None:
    found = call(plus_one=plus_one)
    assert found.dtype == torch.bfloat16
    left = OPS.rms_norm(bf16(5, 24), bf16(24, seed=1), 1e-6, plus_one)
    right = OPS.rms_norm(bf16(5, 24, seed=2), bf16(24, seed=3), 1e-6, plus_one)
    assert torch.equal(found, torch.cat([left, right], -1))


def test_schema_and_fake() -> None:
    arguments = (bf16(3, 2, 8), bf16(8), bf16(3, 2, 8), bf16(8), 1e-6, True)
    torch.library.opcheck(ENTRY, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- The pass --------------------------------------------------------------------------------


def _entry(
    x: Tensor, y: Tensor, w: Tensor, out: Tensor, epsilons: tuple[float, float] = (1e-6, 1e-6),
    dim: int = -1,
) -> Tensor:  # fmt: skip
    """Two norms side by side, into a buffer; the second of them."""
    first, second = (OPS.rms_norm(z, w, e) for z, e in zip((x, y), epsilons, strict=True))
    out.copy_(torch.cat([first, second], dim).view(out.shape))
    return second


def _same(x: Tensor, y: Tensor, w: Tensor, out: Tensor) -> None:
    _entry(x, y, w, out)


def _other_epsilons(x: Tensor, y: Tensor, w: Tensor, out: Tensor) -> None:
    _entry(x, y, w, out, (1e-6, 1e-5))


def _one_below_the_other(x: Tensor, y: Tensor, w: Tensor, out: Tensor) -> None:
    _entry(x, y, w, out, dim=0)


def _read_by_others(x: Tensor, y: Tensor, w: Tensor, out: Tensor) -> None:
    out.add_(_entry(x, y, w, out)[0, 0])


def _written_in_between(x: Tensor, y: Tensor, w: Tensor, out: Tensor) -> None:
    first = OPS.rms_norm(out[:, :8].contiguous().view(3, 8), w, 1e-6)
    kept = x.clone()
    second = OPS.rms_norm(kept, w, 1e-6)
    kept.zero_()
    out.copy_(torch.cat([first, second], -1) + kept[0, 0])


def _graph(body: Callable[..., None]) -> Any:
    inputs = {"x": bf16(3, 8), "y": bf16(3, 8, seed=1), "w": bf16(8, seed=2)}
    return small_graph(body, **inputs, batch_out=bf16(3, 16))


def test_two_norms_become_one_operator() -> None:
    before = "rms_norm[3,8] rms_norm[3,8] cat[3,16] view[3,16] copy_[3,16]"
    after = "draft_entry[3,16] view[3,16] copy_[3,16]"
    check_pass(_graph(_same), FuseDraftEntry(), before, after, rewrites=1)


@pytest.mark.parametrize(
    "body", [_other_epsilons, _one_below_the_other, _read_by_others, _written_in_between]
)
def test_what_is_no_entry_stays(body: Callable[..., None]) -> None:
    graph = _graph(body)
    text = graph.text()
    assert "rms_norm" in text
    assert FuseDraftEntry().apply(graph) == 0
    assert graph.text() == text


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_each_family_enters_by_it(family: str, checkpoint: Callable[..., Path]) -> None:
    """Whichever half is the embedding's; not DeepSeek-V4, which adds two projections instead."""
    backend, directory = EagerBackend(), checkpoint(family, "random")
    graph = rewritten(directory, backend=backend, enabled_passes=ENABLED)
    entries = [n for n in graph.graph.nodes if n.target is ENTRY]
    assert len(entries) == (family != "deepseek_v4")
    for entry in entries:
        weights = [str(entry.args[i].target).split(".")[-2:] for i in (1, 3)]
        names = [part for weight in weights for part in weight if part != "weight"]
        order = ["hidden_norm", "embedding_norm"]
        assert names == (order if family == "mimo" else order[::-1])
    assert FuseDraftEntry().apply(graph) == 0


def test_it_is_off_unless_named_and_needs_norms(checkpoint: Callable[..., Path]) -> None:
    for enabled in ((), ENABLED[:1], ENABLED[1:]):
        graph = rewritten(
            checkpoint("mimo", "random"), backend=EagerBackend(), enabled_passes=enabled
        )
        assert not [n for n in graph.graph.nodes if n.target is ENTRY]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_no_token_changes(family: str, checkpoint: Callable[..., Path]) -> None:
    """Norms of either form."""
    check_no_token_changes(checkpoint(family), (), ENABLED)
