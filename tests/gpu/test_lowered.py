"""What Inductor makes of a cuda step, scheduled on the CPU: no pool is copied, few kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import EVERY_FAMILY
from helpers.plans import changed, plan_of
from helpers.tiny import make_checkpoint
from helpers.whole_steps import beside

from benchmarks.gpu.count import Lowered, lowered
from benchmarks.gpu.machine import Machine
from mtpc.layout import Layout, StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

SLOW = pytest.mark.slow
OPTIONS = plan_of(
    spec_tokens=1,
    batch_buckets=(1, 64),  # Slots for so many that caches by slot are larger than other values.
    max_len=64,
    page_size=16,
    prefill_chunk=8,
    num_pages=4096,
    sampling=False,
)


@cache
def _compiler(checkpoint: Path, **more: Any) -> StepCompiler:
    loaded, options = load(checkpoint, "bfloat16", True), changed(OPTIONS, **more)
    return StepCompiler(loaded, options, Machine().backend(), new_buffer=Layout.reserve)


def _pool_bytes(compiler: StepCompiler) -> int:
    """Of the smallest paged pool; of the largest cache by request slot, where none has pages."""
    caches = [t for name, t in compiler.shared.items() if name.startswith("kv.")]
    paged = [t.nbytes for t in caches if len(t) == OPTIONS.num_pages]
    return min(paged) if paged else max(t.nbytes for t in caches)


GREEDY, SAMPLED = (StepKey.decode(1, 1), {}), (StepKey.decode(1, 1), {"sampling": True})
PROMPT = (StepKey.prefill(1, 8, 1), {"sampling": True})
STEPS = [
    pytest.param(family, *step, marks=() if family == "glm4_moe" and step is GREEDY else SLOW)
    for family in EVERY_FAMILY
    for step in (GREEDY, SAMPLED, PROMPT)
]


@pytest.mark.parametrize(("family", "key", "more"), STEPS)
def test_no_buffer_is_copied_before_it_is_written(
    family: str, key: StepKey, more: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    """A clone of the KV pool in each step would cost more than all else."""
    compiler = _compiler(checkpoint(family, "random"), **more)
    found = lowered(compiler.rewritten(key))
    assert found.missed == {
        "possibly_missed_reinplacing_bytes": 0,
        "possibly_missed_reinplacing_opportunities": 0,
    }
    assert found.largest < _pool_bytes(compiler)
    assert any(name.startswith("mtpc.") for name in found.called), "our operators are in it"


@SLOW
def test_a_copied_pool_is_seen(checkpoint: Callable[..., Path]) -> None:
    """Planted: an attention that reads what was computed from its pool."""
    compiler = _compiler(checkpoint("glm4_moe", "random"))
    graph = compiler.rewritten(StepKey.decode(1, 1))
    nodes = list(graph.graph.nodes)
    attention = next(n for n in nodes if "paged_attention" in str(n.target))
    write = next(n for n in nodes if "rotate_and_write" in str(n.target))
    pool = attention.args[1]
    with torch.no_grad(), graph.graph.inserting_before(write):
        other = graph.graph.call_function(torch.ops.aten.mul.Tensor, (pool, 2))
        other.meta["val"] = pool.meta["val"].clone()
    attention.update_arg(1, other)
    assert lowered(graph).largest >= _pool_bytes(compiler)


@pytest.mark.parametrize(
    ("rows", "linears"),
    [
        (2, {"mtpc.norm_linear.default": 2, "mtpc.skinny_linear.default": 2}),
        pytest.param(
            8,
            {"aten.mm.out": 4, "mtpc.add_rms_norm.default": 2, "mtpc.silu_and_mul.default": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dense_layer_adds_no_kernel_that_inductor_generates(
    rows: int, linears: dict[str, int], tmp_path: Path
) -> None:
    """Positions, lengths and block tables are computed once, not again for each layer."""

    def scheduled(layers: int) -> Lowered:
        sizes = dict(num_hidden_layers=layers, first_k_dense_replace=layers - 1)
        directory = make_checkpoint(
            "glm4_moe", tmp_path / str(layers), attention_bias=False, use_qk_norm=False, **sizes
        )
        return lowered(_compiler(directory).rewritten(StepKey.decode(rows // 2, 1)))

    two, five = scheduled(2), scheduled(5)
    # The copies of angles for all layers are one kernel, or two where there are many.
    assert five.generated <= two.generated + 2
    layer = {"mtpc.rotate_and_write.default": 1, "mtpc.paged_attention.default": 1, **linears}
    assert five.called - two.called == {name: 3 * count for name, count in layer.items()}


@SLOW
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_routers_and_heads_choose_by_operators(family: str, tmp_path: Path) -> None:
    """One for each mixture and each head, and fewer kernels that Inductor generates beside them."""
    directory = make_checkpoint(family, tmp_path, vocab_size=8192)
    first, backend = _compiler(directory), Machine().backend()
    found, before = (
        lowered(
            beside(first, changed(OPTIONS, disabled_passes=disabled), backend).rewritten(
                StepKey.decode(1, 1)
            )
        )
        for disabled in ((), ("lower-choices",))
    )
    router = "mtpc.topk.default" if family == "glm4_moe" else "mtpc.group_topk.default"
    assert found.called - before.called == {router: 2, "mtpc.row_max.default": 2}
    assert before.called - found.called == {"aten.topk.default": 2 * 3}
    assert found.generated < before.generated


@pytest.mark.parametrize(
    "family", ["deepseek_v32", pytest.param("deepseek_v4", marks=pytest.mark.slow)]
)
def test_an_indexer_scores_in_the_models_dtype(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    """By bfloat16's products; in float32 a GPU has no fast ones."""
    graph = _compiler(checkpoint(family, "random")).rewritten(StepKey.decode(1, 1))
    calls = [n for n in graph.graph.nodes if "choose_slots" in str(n.target)]
    assert calls
    assert {call.args[0].meta["val"].dtype for call in calls} == {torch.bfloat16}


def test_joint_weights_take_the_place_of_their_parts(checkpoint: Callable[..., Path]) -> None:
    """No weight is held twice where mtpc read the checkpoint."""
    loaded = load(checkpoint("glm4_moe", "random"), "bfloat16", True)
    attention = loaded.target.get_decoder().layers[0].self_attn
    before = attention.k_proj.weight.clone()
    compiler = StepCompiler(loaded, OPTIONS, Machine().backend())
    with torch.no_grad():
        compiler.rewritten(StepKey.decode(1, 1))
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert torch.equal(attention.k_proj.weight, before)
