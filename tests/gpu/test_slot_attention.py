"""Attention to keys by request slot, in Triton's interpreter: `tests/run_triton.sh`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.batches import close
from helpers.slot_batches import make_call
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from mtpc.backends.triton_kernels import ELEMENTS, load_kernels

pytestmark = pytest.mark.triton

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_triton, torch.ops.mtpc


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Ragged rows, padding, NaN in what nobody sees; a ring that has come round, one that is empty,
    entries of none to more than a block."""
    call = make_call(kind, dtype)
    found, wanted = call.run(OURS), call.run(REFERENCE)
    assert wanted.isfinite().all()
    assert not wanted[-2:].any()
    assert not found[-2:].any()
    close(found, wanted)


@pytest.mark.parametrize(("heads", "dim", "window"), [(1, 5, 1), (17, 64, 40), (16, 130, 3)])
def test_sizes_that_no_tile_divides(heads: int, dim: int, window: int) -> None:
    """More heads than a program has; keys wider than a power of two; a window of one position."""
    call = make_call("all", heads=heads, dim=dim, window=window)
    close(call.run(OURS), call.run(REFERENCE))


def test_one_row_alone() -> None:
    """As in plain decoding; and state with gaps between its rows, int32 counts."""
    call = make_call("all", padding=0)
    one = replace(
        call, query=call.query[:1], fresh=call.fresh[:1], slots=call.slots[:1],
        sees_ring=call.sees_ring[:1], sees_fresh=call.sees_fresh[:1, :1],
        counts=call.counts[:1].int(),  # type: ignore[index]
        ring=torch.stack([call.ring, call.ring], 2)[:, :, 0],
        entries=torch.stack([call.entries, call.entries], 2)[:, :, 1],  # type: ignore[list-item]
    )  # fmt: skip
    close(one.run(OURS), call.run(REFERENCE)[:1])


def test_nan_reaches_rows_that_see_it() -> None:
    call = make_call("window")
    call.fresh[1] = torch.nan
    found = call.run(OURS)
    sees = call.sees_fresh[:, 1]
    assert found[sees].isnan().all()
    assert found[~sees].isfinite().all()
    assert 1 < int(sees.sum()) < len(sees)
