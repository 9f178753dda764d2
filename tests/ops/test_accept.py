"""Acceptance as an operator: what it means, and the C++ kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from helpers.accept_cases import make_call, make_reports, run
from hypothesis import given
from hypothesis import strategies as st

import mtpc.ops  # noqa: F401  (registers the reference)
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.layout import (
    RUNNING,
    STOPPED_BY_LENGTH,
    STOPPED_BY_NONFINITE,
    STOPPED_BY_TOKEN,
)

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc


def test_each_way_to_end() -> None:
    """All drafts, some, none; off; a stop token, a limit, a number that is none; by hand."""
    chosen = torch.tensor([[5, 6, 7]] * 7)
    chosen[4, 1] = 1
    drafts = torch.tensor([[5, 6], [5, 9], [9, 6], [5, 6], [5, 1], [5, 6], [5, 6]])
    finite = torch.ones(7, 3, dtype=torch.bool)
    finite[6, 1] = False
    ids = torch.cat([torch.full((7, 1), 3), drafts], 1)
    active = torch.tensor([1, 1, 1, 0, 1, 1, 1]).bool()
    call = [
        chosen.flatten(), finite.flatten(), ids.flatten(), torch.arange(0, 22, 3).int(),
        torch.tensor([10, 10, 10, 0, 10, 10, 10]).int(), active,
        torch.tensor([9, 9, 9, 9, 9, 2, 9]).int(), torch.tensor([[-1, 1]] * 7), torch.arange(7),
    ]  # fmt: skip
    anchors, remaining, lens, out_ids, accepted, emitted, reason = run(REFERENCE, call)
    assert out_ids == [[*row, 99] for row in chosen.tolist()]
    assert anchors == [2, 4, 6, 9, 14, 17, 20]
    assert accepted == [2, 1, 0, 0, 2, 2, 2]
    assert emitted == [3, 2, 1, 0, 2, 2, 1]
    ends = [STOPPED_BY_TOKEN, STOPPED_BY_LENGTH, STOPPED_BY_NONFINITE]
    assert reason == [RUNNING] * 4 + ends
    assert remaining == [6, 7, 8, 0, 0, 0, 0]
    assert lens == [13, 12, 11, 0, 13, 13, 13]


def test_a_prompt_s_rows_are_certain() -> None:
    """One prompt goes on, one ends, beside a request that decodes; and one is off."""
    chosen, ids = torch.tensor([8, 8, 4, 4, 7, 6, 0, 0]), torch.tensor([1, 2, 3, 1, 2, 9, 7, 0])
    finite, prompt = torch.ones(8).bool(), torch.tensor([1, 1, 0, 0]).bool()
    call = [
        chosen, finite, ids, torch.tensor([0, 3, 5, 7, 7]).int(), torch.tensor([4, 0, 20, 0]).int(),
        torch.tensor([1, 1, 1, 0]).bool(), torch.tensor([5, 5, 5, 5]).int(),
        torch.full((4, 1), -1), torch.arange(4), prompt, torch.tensor([1, 0, 0, 0]).bool(),
    ]  # fmt: skip
    anchors, remaining, lens, _, accepted, emitted, reason = run(REFERENCE, call)
    assert (anchors, accepted) == ([2, 4, 6, 7], [0, 0, 1, 0])
    assert (emitted, reason) == ([0, 1, 2, 0], [RUNNING] * 4)
    assert (remaining, lens) == ([5, 4, 3, 0], [7, 2, 22, 0])


@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 8),
    spec_tokens=st.integers(0, 5),
    num_stops=st.integers(1, 8),
    prompts=st.booleans(),
)
def test_the_kernel_equals_the_reference(
    seed: int, num_reqs: int, spec_tokens: int, num_stops: int, prompts: bool
) -> None:
    call = make_call(seed, num_reqs, spec_tokens, num_stops, prompts)
    assert run(OURS, call) == run(REFERENCE, call)


def test_any_strides_and_index_types() -> None:
    call = make_call(3, 8, 3, 4, True)
    wide = [t.long() if t.dtype == torch.int32 else t for t in call]
    apart = [torch.stack([t, t.flip(0)], -1)[..., 0] for t in wide]
    assert run(OURS, apart) == run(REFERENCE, call)


def test_schemas_hold() -> None:
    for prompts in (False, True):
        call = (*make_reports(6, 3), *make_call(1, 6, 2, 3, prompts))
        for ops in (OURS, REFERENCE):
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(ops.accept.default, call, test_utils=checks)


def test_misfits_are_refused() -> None:
    call = make_call(1, 6, 2, 3, False)
    for place, wrong, message in (
        (0, call[0][:-1], r"chosen and finite \[R \* W\], found 17 and 18 for 6 requests"),
        (1, call[1].int(), "finite must be a bool tensor"),
        (2, call[2][:0], "T >= 1"),
        (5, call[5].int(), "active must be a bool tensor"),
        (7, call[7][:, 0], "stop_ids must be an int32 or int64 tensor of 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OURS.accept(*make_reports(6, 3), *call[:place], wrong, *call[place + 1 :])
    for place, name in ((3, "query_start_loc"), (5, "active"), (8, "state_indices")):
        short = [*call[:place], call[place][:-1], *call[place + 1 :]]
        with pytest.raises(RuntimeError, match=f"elements of {name}, found"):
            OURS.accept(*make_reports(6, 3), *short)
    with pytest.raises(RuntimeError, match=r"has slot 99 of 9"):
        OURS.accept(*make_reports(6, 3), *call[:8], torch.full((6,), 99))
    for wide, narrow in ((6, 1), (5, 3), (7, 3)):
        with pytest.raises(RuntimeError, match="out_token_ids must be Long, for 6 requests"):
            OURS.accept(*make_reports(wide, narrow), *call)
    with pytest.raises(RuntimeError, match="num_emitted must be Int, for 6 requests"):
        OURS.accept(*make_reports(6, 3)[:2], torch.zeros(6), torch.zeros(6), *call)
