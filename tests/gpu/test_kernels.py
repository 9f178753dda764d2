"""The Triton kernels, run by Triton's interpreter, against the reference ops.

Needs Triton, which only torch's builds for GPUs bring along: `tests/run_triton.sh` runs this file
in an environment that has it. bfloat16 is compared, too, but with products in float32: the
interpreter's own product of bfloat16 is wrong, so how rounding goes on a device is not seen here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.batches import EACH_WIDTH, WILD, Batch, close, make_batch, make_mixture
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from hypothesis import given, settings
from hypothesis import strategies as st

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import itertools

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels
from mtpc.backends.triton_kernels.combine import splits_for
from mtpc.backends.triton_kernels.launch import run
from mtpc.backends.triton_kernels.ops.experts import sort_choices
from mtpc.backends.triton_kernels.plans import plan
from mtpc.backends.triton_kernels.tiles import num_tiles
from mtpc.errors import BackendError

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc
DTYPES = list(ELEMENTS)
SLOW = pytest.mark.slow


# ---- paged_attention -------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "dtype"), EACH_WIDTH)
def test_paged_attention_at_each_number_of_drafts(rows: int, dtype: torch.dtype) -> None:
    """K = 0 to 4, each with its tiles; NaN in queries that nobody asked."""
    lengths = [(18, rows), (0, rows), (9, rows)]
    batch = make_batch(lengths, dtype=dtype, heads=(6, 2), page_size=4, spare_rows=2).poisoned()
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (20, 1)])
def test_paged_attention_equals_the_reference(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    batch = make_batch([(37, 4), (1, 1), (0, 3), (16, 2), (130, 3)], dtype=dtype, heads=heads)
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("dims", [(24, 40), (5, 3), (48, 20), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims_that_differ_and_are_no_powers_of_two(
    dims: tuple[int, int], dtype: torch.dtype
) -> None:
    batch = make_batch([(33, 4), (70, 1)], dims=dims, dtype=dtype)
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("page_size", [1, 7, 100])
@pytest.mark.parametrize("seq", [1, 16, 17, 32, 63, 64, 65, 129])
def test_edges_of_pages_and_blocks(seq: int, page_size: int) -> None:
    batch = make_batch([(seq, min(seq, 4)), (seq, 1)], page_size=page_size)
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("beyond", [0, 3, 40])
def test_tables_without_an_entry_to_spare(beyond: int, window: int) -> None:
    """Every entry is in use; a length beyond them all has no more keys than they have."""
    batch = make_batch([(16, 4), (3, 2), (16, 1)], page_size=4, spare_pages=0)
    batch.seq_lens[[0, 2]] += beyond
    batch.window = window
    close(batch.paged(OURS), batch.paged(REFERENCE))


def test_a_wide_table() -> None:
    """2,048 entries, of which one request uses all."""
    batch = make_batch([(2048, 2), (5, 1)], heads=(2, 1), page_size=1, spare_pages=0)
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("window", [0, 1, 16, 10_000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_options(window: int, softcap: float, sinks: bool, dtype: torch.dtype) -> None:
    batch = make_batch([(230, 5), (9, 4), (0, 1)], dtype=dtype)
    batch.window, batch.softcap = window, softcap
    batch.sinks = torch.linspace(-3, 3, 4, dtype=dtype) if sinks else None
    close(batch.paged(OURS), batch.paged(REFERENCE))


def test_softcap_of_extreme_scores() -> None:
    batch = make_batch([(9, 2)])
    batch.softcap, batch.scale = 5.0, 1e6
    close(batch.paged(OURS), batch.paged(REFERENCE))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 6)), min_size=1, max_size=4),
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


@given(
    queries=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    spare=st.integers(0, 50),
    tile=st.integers(1, 17),
)
def test_the_grid_has_a_tile_for_every_row(queries: list[int], spare: int, tile: int) -> None:
    """What `locate` relies on: tiles of different requests do not overlap, and all of them fit."""
    starts = [sum(queries[:r]) for r in range(len(queries) + 1)]
    spans = [(starts[r] // tile + r, -(-q // tile)) for r, q in enumerate(queries)]
    for (begin, count), (following, _) in itertools.pairwise(spans):
        assert begin + count <= following
    last = spans[-1]
    assert last[0] + last[1] <= num_tiles(starts[-1] + spare, len(queries), tile)


def test_more_rows_than_cached_positions_see_nothing() -> None:
    batch = make_batch([(2, 5)])
    batch.sinks = torch.zeros(4)
    out = batch.paged(OURS)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    close(out, batch.paged(REFERENCE))


def test_rows_of_no_request_and_of_off_requests_are_zeros() -> None:
    batch = make_batch([(0, 2), (20, 2)], spare_rows=3)
    batch.table[0] = -WILD
    batch.q[:2] = batch.q[4:] = float("nan")
    out = batch.paged(OURS)
    assert not out[:2].any()
    assert not out[4:].any()


def test_nan_in_a_query_reaches_the_result_of_its_row_only() -> None:
    """A broken model must be seen: non-finite logits stop a request."""
    batch = make_batch([(20, 3), (50, 2)])
    expected = batch.paged(REFERENCE)
    batch.q[1] = float("nan")
    out = batch.paged(OURS)
    assert out[1].isnan().all()
    others = [0, 2, 3, 4]
    close(out[others], expected[others])


def test_a_prompt_longer_than_a_tile() -> None:
    batch = make_batch([(80, 80), (40, 40)], heads=(6, 2))
    close(batch.paged(OURS), batch.paged(REFERENCE))


def test_strided_queries() -> None:
    batch = make_batch([(37, 4), (20, 2)])
    expected = batch.paged(REFERENCE)
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([batch.k, batch.v], 1)
    batch.k, batch.v = both[:, 0], both[:, 1]
    close(batch.paged(OURS), expected)
    batch.q = batch.q.transpose(1, 2).contiguous().transpose(1, 2)
    close(batch.paged(OURS), expected)
    batch.k = batch.k.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(BackendError, match="k_cache has strides"):
        batch.paged(OURS)


def numpy_adds_rows_alike() -> bool:
    """Whether numpy's products, which the interpreter uses, give a row the same bits in any block.

    On some processors its library adds up in another order for other numbers of rows.
    """
    random = np.random.default_rng(0)
    rows, columns = random.random((64, 64), np.float32), random.random((64, 64), np.float32)
    sizes = (1, 2, 4, 8, 16, 32)
    return all(
        np.array_equal(
            rows[:count, :depth] @ columns[:depth], (rows[:, :depth] @ columns[:depth])[:count]
        )
        for count in sizes
        for depth in (8, 16, 32, 64)
    )


@pytest.mark.parametrize("length", [130, 1000, 5000])
def test_splits_follow_the_length_that_there_is(length: int) -> None:
    """Of a table for 32,768 positions. What no split has seen is not read: it is NaN here."""
    batch = make_batch([(length, 1)], heads=(2, 1), spare_pages=2048 - -(-length // 16))
    given = (batch.q, batch.k, batch.v, batch.table, batch.seq_lens, batch.starts, batch.scale)
    (attend, join), out = plan("paged_attention", *given, 0, 0.0, None)
    assert attend.grid[2] == 64
    attend.arguments["acc_ptr"].fill_(float("nan"))
    run([attend])
    totals = attend.arguments["stats_ptr"][:, 0, :, 1]
    live = min(64, -(-length // attend.constants["BLOCK_N"]))
    assert (totals != 0).sum(0).tolist() == [live, live]
    run([join])
    assert isinstance(out, torch.Tensor)
    close(out, batch.paged(REFERENCE))


@pytest.mark.parametrize(
    ("programs", "blocks", "splits"),
    [
        (8, 6, 6),
        (8, 16, 16),
        (8, 128, 32),
        (8, 512, 64),
        (512, 16, 2),
        (512, 512, 4),
        (4096, 64, 1),
    ],
)
def test_how_many_splits_a_context_has(programs: int, blocks: int, splits: int) -> None:
    """As many as `combine` joins at once; more for long contexts; several waves of programs."""
    assert splits_for(programs, blocks, waves=4).count == splits


@pytest.mark.parametrize(("window", "splits"), [(0, 64), (128, 1), (186, 1), (187, 5)])
def test_a_window_has_few_splits(window: int, splits: int) -> None:
    """Whatever max_len is: as many blocks of 64 positions as two rows may attend to."""
    batch = make_batch([(1000, 2), (130, 2)], heads=(2, 1), dtype=torch.float16, spare_pages=1900)
    given = (batch.q, batch.k, batch.v, batch.table, batch.seq_lens, batch.starts, batch.scale)
    (attend, *rest), _ = plan("paged_attention", *given, window, 0.0, None)
    assert attend.constants["BLOCK_N"] == 64
    assert attend.constants["TILE_ROWS"] == 8
    assert attend.grid[2] == splits
    assert len(rest) == (splits > 1)
    batch.window = window
    close(batch.paged(OURS), batch.paged(REFERENCE))


@pytest.mark.parametrize("name", ["paged_attention", "latent_attention"])
@pytest.mark.parametrize("requests", [[(20, 3), (0, 2), (31, 1)], [(0, 1)], [(9, 1)] * 16])
def test_programs_without_splits_write_every_row(
    name: str, requests: list[tuple[int, int]]
) -> None:
    """Rows of requests that are off, and behind the last request, are zeros; nothing fills them
    before."""
    batch = make_batch(requests, dtype=torch.float16, spare_pages=0)
    batch.q = torch.cat([batch.q, batch.q.new_full((70, *batch.q.shape[1:]), float("nan"))])
    indices = (batch.table, batch.seq_lens, batch.starts, batch.scale)
    call = {
        "paged_attention": (batch.q, batch.k, batch.v, *indices, 0, 0.0, None),
        "latent_attention": (batch.q, batch.k[:, :, 0], *indices, 8),
    }[name]
    launches, out = plan(name, *call)
    assert len(launches) == 1
    assert isinstance(out, torch.Tensor)
    out.fill_(float("nan"))
    run(launches)
    close(out, getattr(REFERENCE, name)(*call))
    assert not out[-70:].any()


def test_a_row_does_not_depend_on_how_many_rows_its_request_has() -> None:
    """Speculation and plain decoding add up the same numbers in the same order."""
    compare = torch.equal if numpy_adds_rows_alike() else torch.allclose
    batch = make_batch([(150, 4), (40, 2)])
    assert splits_for(4, 6).programs > 1
    out = batch.paged(OURS)
    for rows in (1, 2, 3):
        alone = make_batch([(150, 4), (40, 2)])
        starts = torch.tensor([0, rows, rows + 2], dtype=torch.int32)
        kept = torch.cat([alone.q[4 - rows : 4], alone.q[4:]])
        one = Batch(kept, alone.k, alone.v, alone.table, alone.seq_lens, starts)
        assert compare(one.paged(OURS), out[4 - rows :])


def test_a_row_does_not_depend_on_what_follows_it() -> None:
    batch = make_batch([(150, 4)])
    expected = batch.paged(OURS)[:1]
    earlier = Batch(
        batch.q[:1], batch.k, batch.v, batch.table, batch.seq_lens - 3, torch.tensor([0, 1])
    )
    assert torch.equal(earlier.paged(OURS), expected)


# ---- experts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        *((tokens, (37, 19)) for tokens in range(6)),
        *((tokens, sizes) for tokens in (4, 19) for sizes in ((64, 48), (130, 33))),
    ],
)
def test_experts_equals_the_reference(
    dtype: torch.dtype, tokens: int, sizes: tuple[int, int]
) -> None:
    mix = make_mixture(tokens, dtype=dtype, hidden=sizes[0], intermediate=sizes[1])
    close(mix.run(OURS), mix.run(REFERENCE), scale=2)


@pytest.mark.parametrize(
    ("tokens", "chosen", "tile"), [(40, 2, 16), (90, 2, 32), (150, 2, 64), (150, 3, 128)]
)
def test_experts_of_more_rows_than_a_tile(tokens: int, chosen: int, tile: int) -> None:
    """Most rows choose expert 4, so that it has several tiles, the last of them not full."""
    mix = make_mixture(tokens, chosen=chosen)
    mix.ids[: tokens * 3 // 4, 0] = 4
    mix.ids[: tokens * 3 // 4, 1:] = torch.arange(chosen - 1)
    sort = plan("experts", mix.x, mix.gate_up, mix.down, mix.ids, mix.weights)[0][0]
    assert sort.constants["TILE"] == tile
    close(mix.run(OURS), mix.run(REFERENCE))


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"), [(1, 6, 2), (5, 64, 8), (48, 1, 1), (700, 5, 2), (40, 90, 8)]
)
def test_choices_are_sorted_by_expert(tokens: int, experts: int, chosen: int) -> None:
    """Ids of no expert are in no tile; tiles without rows are marked, the others in order."""
    gen = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, experts + 2, (tokens, chosen), generator=gen)
    sort = sort_choices(ids, experts, 128)
    for made in (sort.experts, sort.picks):
        made.fill_(WILD)
    run([sort.launch])
    picks, tile = ids.flatten(), sort.tile
    wanted = [
        (expert, part.tolist() + [-1] * (tile - len(part)))
        for expert in range(experts)
        for part in (picks == expert).nonzero()[:, 0].split(tile)
        if len(part)
    ]
    count = len(wanted)
    found = list(zip(sort.experts.tolist(), sort.picks.tolist(), strict=True))
    assert found[:count] == wanted
    assert {expert for expert, _ in found[count:]} <= {-1}


@pytest.mark.parametrize("spread", [False, True])
def test_the_tiles_suffice_for_any_choice(spread: bool) -> None:
    """Every expert chosen, and as many tiles as can be; or all rows choose one expert."""
    experts, tile = 7, 16
    counts = [17, 17, 1, 1, 33, 1, 1] if spread else [0, 0, 71, 0, 0, 0, 0]
    ids = torch.arange(experts).repeat_interleave(torch.tensor(counts))[:, None]
    sort = sort_choices(ids, experts, tile)
    assert sort.tile == tile
    run([sort.launch])
    used = sum(-(-count // tile) for count in counts)
    assert sort.experts.tolist().count(-1) == sort.num_tiles - used
    assert not spread or sort.num_tiles == used


def test_experts_beyond_the_table_and_unused_ones_count_for_nothing() -> None:
    mix = make_mixture(5)
    mix.ids[:, 0] = 2
    mix.ids[:, 1] = torch.tensor([99, -1, WILD, 6, -WILD])
    expected = mix.run(REFERENCE)
    unused = [e for e in range(6) if e != 2]
    mix.gate_up[unused] = float("nan")
    mix.down[unused] = float("nan")
    close(mix.run(OURS), expected)


def test_experts_rows_are_independent() -> None:
    mix = make_mixture(9)
    expected = mix.run(REFERENCE)
    mix.x[4] = float("nan")
    out = mix.run(OURS)
    assert out[4].isnan().all()
    others = [r for r in range(9) if r != 4]
    close(out[others], expected[others])


def test_experts_takes_strided_rows_and_int32_ids() -> None:
    mix = make_mixture(4)
    expected = mix.run(REFERENCE)
    mix.x, mix.ids = mix.x.t().contiguous().t(), mix.ids.int()
    close(mix.run(OURS), expected)


@pytest.mark.parametrize("limit_input", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", range(1, 6))
def test_experts_with_a_limit(dtype: torch.dtype, tokens: int, limit_input: bool) -> None:
    """Bounds that bind on both sides, of gate and of up."""
    mix = make_mixture(tokens, dtype=dtype)
    expected = mix.run(REFERENCE, 0.5, limit_input)
    assert not torch.allclose(expected, mix.run(REFERENCE), atol=0.05), "the limit binds"
    assert not torch.allclose(expected, mix.run(REFERENCE, 0.5, not limit_input), atol=0.01)
    close(mix.run(OURS, 0.5, limit_input), expected, scale=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_gelu(dtype: torch.dtype) -> None:
    mix = make_mixture(5, dtype=dtype)
    expected = mix.run(REFERENCE, 0.0, False, True)
    assert not torch.allclose(expected, mix.run(REFERENCE), atol=0.02)
    close(mix.run(OURS, 0.0, False, True), expected, scale=2)


def test_a_limit_keeps_nan() -> None:
    mix = make_mixture(3)
    mix.x[1] = float("nan")
    for limit_input in (False, True):
        out = mix.run(OURS, 0.5, limit_input)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(0, (37, 19)), (1, (37, 19)), (5, (130, 33)), (19, (64, 48))]
)
def test_experts_without_gates(dtype: torch.dtype, tokens: int, sizes: tuple[int, int]) -> None:
    mix = make_mixture(tokens, dtype=dtype, hidden=sizes[0], intermediate=sizes[1])
    close(mix.run_without_gates(OURS), mix.run_without_gates(REFERENCE), scale=2)


@pytest.mark.parametrize("tokens", [5, 90])
def test_experts_without_gates_of_any_choice(tokens: int) -> None:
    """Ids out of order and of no expert, unused experts that are NaN, a row that is, two tiles of
    one expert; int32."""
    mix = make_mixture(tokens, chosen=3)
    mix.ids[:, 0] = 4
    mix.ids[:, 1] = torch.arange(tokens) % 2
    mix.ids[:, 2] = torch.tensor([99, -1, WILD, 6, -WILD]).repeat(tokens // 5)
    expected = mix.run_without_gates(REFERENCE)
    for unused in (2, 3, 5):
        mix.gate_up[unused] = mix.down[unused] = float("nan")
    mix.x[3], mix.ids = float("nan"), mix.ids.int()
    found = mix.run_without_gates(OURS)
    assert found[3].isnan().all()
    others = [row for row in range(tokens) if row != 3]
    close(found[others], expected[others])


# ---- sinkhorn --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 80])
@pytest.mark.parametrize(("n", "rounds"), [(1, 1), (2, 20), (4, 1), (4, 20), (7, 3)])
def test_sinkhorn_equals_the_reference(n: int, rounds: int, tokens: int) -> None:
    logits = 4 * torch.randn(tokens, n, n, generator=torch.Generator().manual_seed(n))
    expected = REFERENCE.sinkhorn(logits, rounds, 1e-6)
    close(OURS.sinkhorn(logits, rounds, 1e-6), expected)
    turned = logits.mT.contiguous().mT
    close(OURS.sinkhorn(turned, rounds, 1e-6), expected)


def test_sinkhorn_of_extreme_and_poisoned_matrices() -> None:
    """Padding is NaN: it stays in its matrix. Large logits do not overflow."""
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0))
    logits[1], logits[3] = float("nan"), logits[3] * 1e4
    expected = REFERENCE.sinkhorn(logits, 20, 1e-6)
    found = OURS.sinkhorn(logits, 20, 1e-6)
    assert found[1].isnan().all()
    others = [0, 2, 3, 4]
    close(found[others], expected[others])
    assert OURS.sinkhorn(logits[:0], 20, 1e-6).shape == (0, 4, 4)


# ---- write_cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 8), (1500,), ()])
@pytest.mark.parametrize("tokens", range(1, 6))
def test_write_cache_equals_the_reference(
    tokens: int, shape: tuple[int, ...], cache_dtype: torch.dtype
) -> None:
    # Values that bfloat16 holds: the interpreter's cast to it truncates, a device's rounds.
    rows = torch.randn(tokens, *shape).bfloat16().float()
    slots = torch.tensor([17, -1, 4, -7, 31])[:tokens]
    rows[1::2] = float("nan")
    expected = torch.zeros(8, 4, *shape, dtype=cache_dtype)
    actual = expected.clone()
    REFERENCE.write_cache(expected, torch.nan_to_num(rows), slots, None)
    OURS.write_cache(actual, rows, slots, None)
    assert torch.equal(actual, expected)


def test_write_cache_of_strided_rows() -> None:
    rows = torch.randn(3, 8, 2).transpose(1, 2)
    cache, slots = torch.zeros(4, 4, 2, 8), torch.tensor([5, 9, 14])
    OURS.write_cache(cache, rows, slots, None)
    assert torch.equal(cache.view(16, 2, 8)[slots], rows)
    with pytest.raises(BackendError, match="expected contiguous"):
        OURS.write_cache(cache.transpose(2, 3), rows, slots, None)


def test_write_cache_writes_no_other_memory() -> None:
    memory = torch.zeros(20, 4, 2)
    OURS.write_cache(memory[:8], torch.ones(3, 2), torch.tensor([32, 2**40, 3]), None)
    assert memory.view(-1, 2)[3].eq(1).all()
    assert memory.sum() == 2
