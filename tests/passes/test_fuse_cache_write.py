"""fuse-cache-write: its kernel, its reference, and what it does to whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.compiled import run_on
from helpers.families import EACH_FAMILY_OF_FEW
from helpers.whole_steps import by_cpu_passes, check_no_token_changes, named, rewritten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.passes.fuse_cache_write import FuseCacheWrite

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc


@dataclass
class Call:
    """Arguments of `rotate_and_write`: heads are slices of a joint projection, as in a step."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    shift: Tensor | None = None
    rows: Tensor | None = None

    def run(self, namespace: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and both caches afterwards; the call's own stay."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        rows = (self.q, self.k, self.v)
        given = (*rows, self.cos, self.sin, *caches, self.slots, None, None)
        q = namespace.rotate_and_write(*given, self.shift, self.rows)
        return (q, *caches)


def make_call(
    tokens: int, heads: tuple[int, int] = (4, 2), dims: tuple[int, int, int] = (16, 16, 16)
) -> Call:
    """heads: of queries and of keys; dims: of a key, of the angles, of a value."""
    (count, kv_count), (width, turned, v_width) = heads, dims
    sizes = [count * width, kv_count * width, kv_count * v_width]
    q, k, v = bf16(tokens, sum(sizes), seed=tokens).split(sizes, 1)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:tokens]
    return Call(
        q.unflatten(1, (count, width)), k.unflatten(1, (kv_count, width)),
        v.unflatten(1, (kv_count, v_width)), bf16(tokens, turned, seed=2),
        bf16(tokens, turned, seed=3), bf16(10, 4, kv_count, width, seed=4),
        bf16(10, 4, kv_count, v_width, seed=5), slots,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dims", [(16, 16, 16), (24, 8, 10), (128, 64, 128), (6, 2, 40)])
@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("namespace", [OURS, REFERENCE], ids=["kernel", "reference"])
def test_it_is_what_it_stands_for(
    namespace: Any, shifts: bool, dims: tuple[int, int, int], heads: tuple[int, int]
) -> None:
    """Bit for bit the operators, one after the other."""
    call = make_call(7, heads, dims)
    call.slots[2] = -1
    k_cache, v_cache = call.k_cache.clone(), call.v_cache.clone()
    keys = REFERENCE.rotate(call.k, call.cos, call.sin)
    if shifts:
        call = replace(call, shift=bf16(*keys.shape[1:], seed=6))
        keys = keys - call.shift
    REFERENCE.write_cache(k_cache, keys, call.slots, None)
    REFERENCE.write_cache(v_cache, call.v, call.slots, None)
    q = REFERENCE.rotate(call.q, call.cos, call.sin)
    for found, expected in zip(call.run(namespace), (q, k_cache, v_cache), strict=True):
        assert torch.equal(found, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 40), at=st.integers(0, 39), threads=st.integers(1, 4))
def test_a_row_does_not_depend_on_others(tokens: int, at: int, threads: int) -> None:
    at %= tokens
    call = make_call(tokens)
    one = slice(at, at + 1)
    alone = replace(
        call, q=call.q[one], k=call.k[one], v=call.v[one], cos=call.cos[one], sin=call.sin[one],
        slots=call.slots[one],
    )  # fmt: skip
    with run_on(threads):
        q, k_cache, v_cache = call.run(OURS)
    lone_q, lone_k, lone_v = alone.run(OURS)
    slot = int(call.slots[at])
    assert torch.equal(q[one], lone_q)
    assert torch.equal(k_cache.flatten(0, 1)[slot], lone_k.flatten(0, 1)[slot])
    assert torch.equal(v_cache.flatten(0, 1)[slot], lone_v.flatten(0, 1)[slot])


@pytest.mark.parametrize("namespace", [OURS, REFERENCE], ids=["kernel", "reference"])
def test_idle_rows_are_not_read_and_write_nothing(namespace: Any) -> None:
    call = make_call(9)
    expected = replace(call, slots=torch.where(torch.arange(9) < 5, call.slots, -1)).run(REFERENCE)
    for rows in (call.q, call.k, call.v, call.cos, call.sin):
        rows[5:] = torch.nan
    call.slots[5:] = -1
    call.rows = torch.tensor([5])
    q, k_cache, v_cache = call.run(namespace)
    assert torch.equal(q[:5], expected[0][:5])
    assert torch.equal(k_cache, expected[1])
    assert torch.equal(v_cache, expected[2])


def test_a_strided_cache() -> None:
    """Pages of keys and values side by side, as hosts have them."""
    call = make_call(6)
    both = bf16(10, 2, 4, 2, 16, seed=8)
    caches = both[:, 0], both[:, 1]
    call.k_cache, call.v_cache = (cache.clone() for cache in caches)
    _, *expected = call.run(REFERENCE)
    rows = (call.q, call.k, call.v, call.cos, call.sin)
    OURS.rotate_and_write(*rows, *caches, call.slots, None, None)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


def test_schema_and_fakes() -> None:
    call = make_call(3)
    rows = (call.q, call.k, call.v, call.cos, call.sin)
    arguments = (*rows, call.k_cache, call.v_cache, call.slots, None, None)
    for namespace in (OURS, REFERENCE):
        torch.library.opcheck(
            namespace.rotate_and_write.default, arguments,
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("q", lambda x: x.float(), "expected bfloat16 q, k and v"),
        ("k", lambda x: x[:2], "expected bfloat16 q, k and v"),
        ("cos", lambda x: x[:, :15], "C even and <= D"),
        ("sin", lambda x: x[:, :14], "C even and <= D"),
        ("k_cache", lambda x: x[:, :, :1], "of k's and v's heads"),
        ("v_cache", lambda x: x.transpose(2, 3), "of k's and v's heads"),
        ("v_cache", lambda x: x[:9], "of k's and v's heads"),
        ("shift", lambda _: bf16(2, 15), r"bfloat16 k_shift \[heads, D\]"),
        ("slots", lambda x: x + 100, "beyond the 40 slots"),
        ("slots", lambda x: x[:2], r"slot_mapping \[T\]"),
    ],
)
def test_misfits_are_refused(field: str, change: Callable[..., Tensor], message: str) -> None:
    call = make_call(3)
    call = replace(call, **{field: change(getattr(call, field))})
    before = call.k_cache.clone(), call.v_cache.clone()
    with pytest.raises(RuntimeError, match=message):
        OURS.rotate_and_write(
            *(call.q, call.k, call.v, call.cos, call.sin, call.k_cache, call.v_cache, call.slots),
            *(None, None, call.shift),
        )
    assert torch.equal(call.k_cache, before[0])
    assert torch.equal(call.v_cache, before[1])


# ---- The pass --------------------------------------------------------------------------------

LAYERS = {"mimo": 3, "glm4_moe": 3, "qwen3_next": 2, "mimo_v2": 4, "step3p7": 4}
"""With keys and values of their own, of a step with one MTP layer (K = 1)."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("qwen3_next", "mimo_v2"))) for n in LAYERS],
)
def test_each_layer_writes_by_it(family: str, checkpoint: Callable[..., Path]) -> None:
    """Paged caches and rings, whole heads and parts of them, norms on heads, value dims of their
    own: none of the operators that it stands for is left."""
    graph = by_cpu_passes(checkpoint(family, "random"))
    found = named(graph)
    assert found["rotate_and_write"] == found["paged_attention"] == LAYERS[family]
    assert not found["rotate"]
    assert not found["write_cache"]
    assert FuseCacheWrite().apply(graph) == 0


def test_latents_and_other_dtypes_are_left_alone(checkpoint: Callable[..., Path]) -> None:
    latent = named(by_cpu_passes(checkpoint("deepseek_v3", "random")))
    wide = named(rewritten(checkpoint("mimo", "random"), "float32"))
    for found in (latent, wide):
        assert not found["rotate_and_write"]
        assert found["write_cache"]


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_no_token_changes(family: str, checkpoint: Callable[..., Path]) -> None:
    check_no_token_changes(checkpoint(family), (), ("fuse-cache-write",))
