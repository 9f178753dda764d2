"""The C++ kernels against the reference ops, and the guarantees that go beyond them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.batches import DTYPES, WILD, Batch, close, make_batch, make_mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtpc.backends.cpu_kernels import build_kernels, kernel_table, load_kernels
from mtpc.backends.cpu_kernels.build import LIBRARY, RUNNER
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.store.entries import Entry
from mtpc.store.machine import cpu_flags

load_kernels()
OURS = torch.ops.mtpc_cpu
REFERENCE = torch.ops.mtpc


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- paged_attention -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (16, 2)])
def test_paged_attention_equals_the_reference(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    batch = make_batch([(37, 4), (1, 1), (0, 3), (16, 2), (300, 3)], dtype=dtype, heads=heads)
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (5, 3), (128, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_that_do_not_fill_registers(dims: tuple[int, int], dtype: torch.dtype) -> None:
    batch = make_batch([(33, 4), (70, 1)], dims=dims, dtype=dtype)
    close(batch.paged(OURS), batch.paged(REFERENCE))


def error_with_rounded_weights(batch: Batch) -> Tensor:
    """The mean error of float64 attention of one request whose weights, and result, are rounded to
    bfloat16, as transformers' eager attention rounds them."""
    q, k, v = (t.double() for t in (batch.q, batch.k[batch.table[0]], batch.v[batch.table[0]]))
    seen = int(batch.seq_lens[0]) - len(q) + torch.arange(len(q))
    keys, values = (
        t.flatten(0, 1)[: len(q) + int(seen[0])].repeat_interleave(q.shape[1] // t.shape[2], 1)
        for t in (k, v)
    )
    scores = torch.einsum("tnd,snd->nts", q, keys) * batch.scale
    scores.masked_fill_(torch.arange(len(keys)) > seen[:, None], -torch.inf)
    weights = scores.softmax(-1)
    exact, found = (
        torch.einsum("nts,snd->tnd", w, values) for w in (weights, weights.bfloat16().double())
    )
    return (found.bfloat16().double() - exact).abs().mean()


@pytest.mark.parametrize("lengths", [[(300, 70)], [(1500, 4)]])
def test_bfloat16_loses_no_more_than_rounded_weights_do(lengths: list[tuple[int, int]]) -> None:
    """Against float64 of the same inputs. Weights are rounded, too, where values are multiplied by
    pairs (attention_pairs.h); elsewhere nothing but the result is."""
    batch = make_batch(lengths, dims=(64, 48), dtype=torch.bfloat16, spare_pages=0)
    wide = replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double())
    exact = wide.paged(REFERENCE)
    rounds_weights = chosen_level(cpu_flags()).name == "avx512"
    rounded = (exact.bfloat16().double() - exact).abs().mean()
    most = error_with_rounded_weights(batch) if rounds_weights else rounded
    assert rounded < most or not rounds_weights
    found = (batch.paged(OURS).double() - exact).abs().mean()
    assert 0 < found <= 1.01 * most


@pytest.mark.parametrize("seq", [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 512, 513])
def test_edges_of_pages_and_splits(seq: int) -> None:
    batch = make_batch([(seq, min(seq, 4)), (seq, 1)])
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("window", [1, 2, 16, 250, 10_000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_options(window: int, softcap: float, sinks: bool, dtype: torch.dtype) -> None:
    batch = make_batch([(530, 5), (9, 4), (0, 1)], dtype=dtype)
    batch.window, batch.softcap = window, softcap
    batch.sinks = torch.linspace(-3, 3, 4, dtype=dtype) if sinks else None
    close(batch.paged(OURS), batch.paged(REFERENCE))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 6)), min_size=1, max_size=5),
    groups=st.sampled_from([1, 2, 3]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.integers(0, 20),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]], groups: int, page_size: int, window: int, index: torch.dtype
) -> None:
    batch = make_batch(
        lengths, heads=(2 * groups, 2), page_size=page_size, index=index, spare_rows=2
    )
    batch.window = window
    close(batch.paged(OURS), batch.paged(REFERENCE))


def test_more_rows_than_cached_positions_see_nothing() -> None:
    batch = make_batch([(2, 5)])
    batch.sinks = torch.zeros(4)
    out = batch.paged(OURS)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    close(out, batch.paged(REFERENCE))


def test_rows_of_no_request_and_of_off_requests_are_zeros() -> None:
    batch = make_batch([(0, 2), (20, 2)], spare_rows=3)
    batch.table[0] = -WILD
    out = batch.paged(OURS)
    assert not out[:2].any()
    assert not out[4:].any()


def test_a_long_prompt_is_processed_in_blocks_of_rows() -> None:
    batch = make_batch([(150, 150), (40, 40)], heads=(6, 2))
    close(batch.paged(OURS), batch.paged(REFERENCE))


def test_any_strides() -> None:
    batch = make_batch([(37, 4), (20, 2)])
    expected = batch.paged(REFERENCE)
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([batch.k, batch.v], 1)
    batch.k, batch.v = both[:, 0], both[:, 1]
    close(batch.paged(OURS), expected)
    batch.k = batch.k.transpose(2, 3).contiguous().transpose(2, 3)
    batch.q = batch.q.transpose(1, 2).contiguous().transpose(1, 2)
    batch.table = batch.table.t().contiguous().t()
    close(batch.paged(OURS), expected)


@pytest.mark.parametrize("q_dtype", DTYPES)
def test_queries_may_be_of_another_dtype_than_the_caches(q_dtype: torch.dtype) -> None:
    for cache_dtype in DTYPES:
        batch = make_batch([(37, 4), (20, 2)], dtype=cache_dtype)
        batch.q = batch.q.to(q_dtype)
        close(batch.paged(OURS), batch.paged(REFERENCE))


def test_a_visible_nan_is_not_hidden() -> None:
    batch = make_batch([(20, 2)])
    batch.q[0, 0, 0] = float("nan")
    out = batch.paged(OURS)
    assert out[0, 0].isnan().all()
    assert out[1].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([(300, 3)])
    batch.scale = 1e4
    close(batch.paged(OURS), batch.paged(REFERENCE), scale=50)


@pytest.mark.parametrize("lengths", [[(5, 3), (700, 4), (0, 2), (1100, 2)], [(1500, 4)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_threads_batch_or_rows(
    lengths: list[tuple[int, int]], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    batch = make_batch(lengths, dtype=dtype, heads=(6, 2), dims=(64, 64))
    batch.window = 600
    threads(1)
    alone = batch.paged(OURS)
    threads(2)
    assert torch.equal(batch.paged(OURS), alone)
    for request, (_, rows) in enumerate(lengths):
        end = int(batch.starts[request + 1])
        for last in range(1, rows + 1):
            assert torch.equal(batch.only(request, last).paged(OURS), alone[end - last : end])


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_long_request_are_as_each_alone(dtype: torch.dtype, rows: int) -> None:
    """Where many positions are visible, one task takes several heads."""
    batch = make_batch([(2500, rows)], dtype=dtype, heads=(8, 4), dims=(64, 64))
    both = batch.paged(OURS)
    close(both, batch.paged(REFERENCE))
    for head in range(4):
        own = slice(2 * head, 2 * head + 2)
        k, v = batch.k[:, :, head : head + 1], batch.v[:, :, head : head + 1]
        assert torch.equal(replace(batch, q=batch.q[:, own], k=k, v=v).paged(OURS), both[:, own])


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("chunk", [1, 4, 5, 16])
def test_chunks_of_a_long_prompt_are_as_the_whole(chunk: int, page_size: int) -> None:
    """Whatever tiles a row shares: those of few rows and of many, of one head and of several.

    A page holds all keys of a tile, or half of them.
    """
    batch = make_batch(
        [(1300, 37)], dtype=torch.bfloat16, heads=(16, 4), dims=(64, 96), page_size=page_size
    )
    whole = batch.paged(OURS)
    close(whole, batch.paged(REFERENCE))
    for begin in range(0, 37, chunk):
        end = min(begin + chunk, 37)
        seq_lens, starts = torch.tensor([1300 - 37 + end]), torch.tensor([0, end - begin])
        part = replace(batch, q=batch.q[begin:end], seq_lens=seq_lens, starts=starts)
        assert torch.equal(part.paged(OURS), whole[begin:end])


# ---- latent_attention ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rank"), [(48, 32), (40, 37), (16, 16)])
def test_latent_attention_equals_the_reference(dtype: torch.dtype, width: int, rank: int) -> None:
    batch = make_batch(
        [(37, 4), (0, 2), (300, 3), (1, 1)], dtype=dtype, heads=(20, 1), dims=(width, 1)
    )
    close(batch.latent(OURS, rank), batch.latent(REFERENCE, rank))


def test_latent_attention_does_not_depend_on_threads_or_batch(
    threads: Callable[[int], None],
) -> None:
    batch = make_batch([(600, 4), (40, 2)], heads=(8, 1), dims=(144, 1), dtype=torch.bfloat16)
    threads(1)
    expected = batch.latent(OURS, 128)
    threads(2)
    assert torch.equal(batch.latent(OURS, 128), expected)
    assert torch.equal(batch.only(0, 1).latent(OURS, 128), expected[3:4])


# ---- experts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 4, 19])
@pytest.mark.parametrize("sizes", [(64, 48), (37, 19), (130, 33)])
def test_experts_equals_the_reference(
    dtype: torch.dtype, tokens: int, sizes: tuple[int, int]
) -> None:
    mix = make_mixture(tokens, dtype=dtype, hidden=sizes[0], intermediate=sizes[1])
    # The reference rounds after every linear and after every expert; we round less.
    close(mix.run(OURS), mix.run(REFERENCE), scale=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_experts_without_gates(dtype: torch.dtype, tokens: int) -> None:
    """Against the reference, and that against the formula."""
    mix = make_mixture(tokens, dtype=dtype, hidden=37, intermediate=19)
    args = (mix.x, mix.gate_up[:, 19:], mix.down, mix.ids, mix.weights)
    expected = REFERENCE.relu2_experts(*args)
    close(OURS.relu2_experts(*args), expected, scale=2)
    for row in range(tokens):
        each = [
            w * (mix.down[e] @ (mix.gate_up[e, 19:] @ mix.x[row]).relu() ** 2)
            for e, w in zip(mix.ids[row], mix.weights[row].to(dtype), strict=True)
        ]
        close(expected[row], torch.stack(each).sum(0), scale=2)


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_cut_off_at_a_limit(dtype: torch.dtype, of_input: bool) -> None:
    """Gate above, up on both sides; and the limit is felt."""
    mix = make_mixture(5, dtype=dtype)
    args = (mix.x, mix.gate_up, mix.down, mix.ids, mix.weights)
    expected = REFERENCE.experts(*args, 0.4, of_input)
    close(OURS.experts(*args, 0.4, of_input), expected, scale=2)
    assert (expected - mix.run(REFERENCE)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_gelu(dtype: torch.dtype) -> None:
    """Against the reference, and that against the formula; silu gives something else."""
    mix = make_mixture(5, dtype=dtype, hidden=37, intermediate=19)
    expected = mix.run(REFERENCE, 0.0, False, True)
    close(mix.run(OURS, 0.0, False, True), expected, scale=2)
    for row in range(5):
        each = []
        for e, w in zip(mix.ids[row], mix.weights[row].to(dtype), strict=True):
            gate, up = (mix.gate_up[e] @ mix.x[row]).chunk(2)
            gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
            each.append(w * (mix.down[e] @ gated))
        close(expected[row], torch.stack(each).sum(0), scale=2)
    assert (expected - mix.run(REFERENCE)).abs().max() > 0.01


def test_experts_beyond_the_table_and_unused_ones_count_for_nothing() -> None:
    mix = make_mixture(5)
    mix.ids[:, 0] = 2
    mix.ids[:, 1] = 99
    expected = mix.run(REFERENCE)
    unused = [e for e in range(6) if e != 2]
    mix.gate_up[unused] = float("nan")
    mix.down[unused] = float("nan")
    close(mix.run(OURS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_rows_are_independent(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    mix = make_mixture(23, dtype=dtype, hidden=160, intermediate=96)
    threads(1)
    expected = mix.run(OURS)
    threads(2)
    assert torch.equal(mix.run(OURS), expected)
    for row in (0, 7, 22):
        one = slice(row, row + 1)
        single = replace(mix, x=mix.x[one], ids=mix.ids[one], weights=mix.weights[one])
        assert torch.equal(single.run(OURS), expected[one])


def test_experts_takes_any_strides_and_int32_ids() -> None:
    mix = make_mixture(4)
    expected = mix.run(REFERENCE)
    mix.x = mix.x.t().contiguous().t()
    mix.gate_up = mix.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    mix.down = torch.cat([mix.down, mix.down], 1)[:, :64]
    mix.ids = mix.ids.int()
    close(mix.run(OURS), expected)


# ---- write_cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("shape", [(2, 8), (8,), ()])
def test_write_cache_equals_the_reference(cache_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = torch.randn(5, *shape)
    slots = torch.tensor([17, -1, 4, -7, 31])
    expected = torch.zeros(8, 4, *shape, dtype=cache_dtype)
    actual = expected.clone()
    REFERENCE.write_cache(expected, rows, slots, None)
    OURS.write_cache(actual, rows, slots, None)
    assert torch.equal(actual, expected)


def test_write_cache_into_a_strided_cache() -> None:
    rows = torch.randn(3, 8, 2).transpose(1, 2)
    slots = torch.tensor([0, 9, 14], dtype=torch.int32)
    both = torch.zeros(4, 2, 4, 8, 2)
    OURS.write_cache(both[:, 1].transpose(2, 3), rows, slots, None)
    expected = torch.zeros(4, 4, 2, 8)
    expected.view(16, 2, 8)[slots.long()] = rows
    assert torch.equal(both[:, 1].transpose(2, 3), expected)
    assert not both[:, 0].any()


def test_write_cache_from_a_slice_of_a_joint_projection() -> None:
    """Rows that are dense, though they do not lie side by side."""
    joint, slots = torch.randn(3, 48), torch.tensor([0, 9, 14])
    rows = joint[:, 16:32].unflatten(-1, (2, 8))
    actual = torch.zeros(4, 4, 2, 8)
    OURS.write_cache(actual, rows, slots, None)
    expected = torch.zeros(4, 4, 2, 8)
    expected.view(16, 2, 8)[slots] = rows
    assert torch.equal(actual, expected)


def test_write_cache_refuses_slots_beyond_the_cache() -> None:
    with pytest.raises(RuntimeError, match=r"slot 32 of row 1 is beyond the 32 slots"):
        OURS.write_cache(torch.zeros(8, 4, 2), torch.ones(2, 2), torch.tensor([3, 32]), None)


# ---- As torch ops ----------------------------------------------------------------------------


def test_schemas_and_fakes_hold() -> None:
    batch = make_batch([(37, 4), (20, 2)])
    mix = make_mixture(4)
    checks = ("test_schema", "test_faketensor")
    indices = (batch.table, batch.seq_lens, batch.starts)
    samples = {
        "paged_attention": (batch.q, batch.k, batch.v, *indices, 0.3),
        "latent_attention": (batch.q, batch.k[:, :, 0], *indices, 0.3, 8),
        "experts": (mix.x, mix.gate_up, mix.down, mix.ids, mix.weights),
        "write_cache": (torch.zeros(8, 4, 2), torch.ones(2, 2), torch.tensor([3, -1]), None),
    }
    for name, arguments in samples.items():
        # The caches hold NaN on purpose, which the checker cannot compare with itself.
        arguments = tuple(a.nan_to_num() if _is_float(a) else a for a in arguments)
        torch.library.opcheck(getattr(OURS, name).default, arguments, test_utils=checks)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def test_the_table_pairs_ops_of_equal_arguments() -> None:
    for reference, kernel in kernel_table().items():
        ours, theirs = kernel._schema.arguments, reference._schema.arguments
        assert [a.name for a in ours] == [a.name for a in theirs]
        assert [a.default_value for a in ours] == [a.default_value for a in theirs]
        assert [a.is_write for a in ours] == [a.is_write for a in theirs]


def test_misfits_are_refused() -> None:
    batch = make_batch([(5, 1)])
    with pytest.raises(RuntimeError, match="no multiple of"):
        replace(batch, q=batch.q[:, :3]).paged(OURS)
    with pytest.raises(RuntimeError, match="q has width 8, the keys have 16"):
        replace(batch, q=batch.q[..., :8]).paged(OURS)
    with pytest.raises(RuntimeError, match="expected float32, bfloat16"):
        replace(batch, k=batch.k.to(torch.int32), v=batch.v.to(torch.int32)).paged(OURS)


def test_one_openmp_runtime_in_the_process() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    entry = build_kernels()
    assert isinstance(entry, Entry)
    for library in (entry.directory / LIBRARY, entry.directory / RUNNER):
        assert str(library) in maps.read_text()
        needed = library.read_bytes()
        assert b"libgomp" not in needed
        assert b"libiomp" not in needed
