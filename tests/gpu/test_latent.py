"""The Triton kernel of latent attention, in Triton's interpreter: `tests/run_triton.sh`."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import EACH_WIDTH, close, make_batch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from hypothesis import given, settings
from hypothesis import strategies as st

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels

pytestmark = pytest.mark.triton

load_kernels()
OURS = torch.ops.mtpc_triton
REFERENCE = torch.ops.mtpc
SMALL = dict(heads=(20, 1), dims=(24, 1), page_size=4)
"""More heads than a program has; beside a rank of 12."""


@pytest.mark.parametrize(("rows", "dtype"), EACH_WIDTH)
def test_each_number_of_drafts(rows: int, dtype: torch.dtype) -> None:
    """K = 0 to 4, each with its tiles; NaN in queries that nobody asked."""
    lengths = [(18, rows), (0, rows), (9, rows)]
    batch = make_batch(lengths, dtype=dtype, spare_rows=2, **SMALL).poisoned()
    close(batch.latent(OURS, 12), batch.latent(REFERENCE, 12))


@pytest.mark.parametrize("beyond", [0, 3, 40])
def test_tables_without_an_entry_to_spare(beyond: int) -> None:
    """Every entry is in use; a length beyond them all has no more keys than they have."""
    batch = make_batch([(16, 4), (3, 2), (16, 1)], spare_pages=0, **SMALL)
    batch.seq_lens[[0, 2]] += beyond
    close(batch.latent(OURS, 12), batch.latent(REFERENCE, 12))


def test_a_wide_table() -> None:
    """2,048 entries, of which one request uses all."""
    batch = make_batch([(2048, 2), (5, 1)], heads=(4, 1), dims=(24, 1), page_size=1, spare_pages=0)
    close(batch.latent(OURS, 12), batch.latent(REFERENCE, 12))


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("sizes", [(4, 40, 32), pytest.param((36, 72, 64), marks=pytest.mark.slow)])
def test_latent_attention_equals_the_reference(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """Sizes: heads, rank + rope, rank."""
    heads, width, rank = sizes
    lengths = [(37, 4), (0, 2), (70, 3)]
    batch = make_batch(
        lengths, heads=(heads, 1), dims=(width, 1), dtype=dtype, spare_rows=2, page_size=4
    )
    close(batch.latent(OURS, rank), batch.latent(REFERENCE, rank))


def test_latent_attention_at_the_released_sizes() -> None:
    """DeepSeek-V3: rank 512 and 64 rotary dims; 16 of its heads."""
    batch = make_batch([(35, 2)], heads=(16, 1), dims=(576, 1), dtype=torch.float16)
    close(batch.latent(OURS, 512), batch.latent(REFERENCE, 512))


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_latent_attention_of_ragged_batches(lengths: list[tuple[int, int]], page_size: int) -> None:
    batch = make_batch(lengths, heads=(4, 1), dims=(20, 1), page_size=page_size, spare_rows=1)
    close(batch.latent(OURS, 12), batch.latent(REFERENCE, 12))
