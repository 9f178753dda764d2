"""The pieces of the step on their own: metadata in closed form, stops, and rows that are off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compiled import captured
from helpers.families import TINY
from helpers.plans import plan_of
from helpers.theorem import PROMPTS, poison

from mtpc.api import SpecModel
from mtpc.backends import make_backend
from mtpc.layout import (
    NO_SLOT,
    RUNNING,
    STOPPED_BY_LENGTH,
    STOPPED_BY_NONFINITE,
    STOPPED_BY_TOKEN,
    StepKey,
)
from mtpc.models.load import load
from mtpc.ops.accept import stop
from mtpc.program.compiler import StepCompiler
from mtpc.step.chaining import Widen
from mtpc.step.metadata import flat_metadata
from mtpc.step.records import Widened


def test_metadata_in_closed_form() -> None:
    """Ragged rows; an inactive request; an empty one; a null page; positions past the table."""
    positions, slots, seq_lens = flat_metadata(
        context_lens=torch.tensor([3, 5, 0, 4, 7], dtype=torch.int32),
        active=torch.tensor([True, False, True, True, True]),
        block_table=torch.tensor(
            [[9, 8], [7, 6], [5, 4], [3, 0], [2, 1]], dtype=torch.int32
        ),  # request 3 has no second page
        query_start_loc=torch.tensor([0, 2, 3, 3, 5, 7], dtype=torch.int32),
        num_tokens=9,
        page_size=4,
    )
    off = NO_SLOT
    #                    request 0       1    3: page 0      4: 7, then past 2 pages of 4; padding
    assert slots.tolist() == [9 * 4 + 3, 8 * 4 + 0, off, off, off, 1 * 4 + 3, off, off, off]
    assert positions.tolist() == [3, 4, 0, 4, 5, 7, 0, 0, 0]
    assert seq_lens.tolist() == [5, 0, 0, 6, 9]


def test_padding_behind_a_request_with_room_has_no_slot() -> None:
    """The last request's next places are free, and padded rows leave them so."""
    positions, slots, _ = flat_metadata(
        context_lens=torch.tensor([3], dtype=torch.int32),
        active=torch.tensor([True]),
        block_table=torch.tensor([[9, 8]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        num_tokens=4,
        page_size=4,
    )
    assert slots.tolist() == [9 * 4 + 3, 8 * 4 + 0, NO_SLOT, NO_SLOT]
    assert positions.tolist() == [3, 4, 0, 0]


def test_earlier_rows_of_a_short_text() -> None:
    """A text of two tokens has two earlier rows, the newest that its slot keeps, and not three."""
    widen = Widen(StepKey.decode(2, 1), 3, 4)
    kept = torch.tensor([[0, 0, 0], [90, 11, 12], [21, 22, 23]])
    found = Widened(
        *widen(
            next_ids=torch.tensor([13, 14, 24, 25]),
            features=torch.tensor([[13.0], [14], [24], [25]]),
            anchors=torch.tensor([1, 3]),
            context_lens=torch.tensor([2, 5], dtype=torch.int32),
            active=torch.tensor([True, True]),
            block_table=torch.tensor([[9, 8], [7, 6]], dtype=torch.int32),
            state_slots=torch.tensor([1, 2]),
            query_start_loc=torch.tensor([0, 2, 4], dtype=torch.int32),
            last_ids=kept,
            last_features=kept[..., None].float(),
        )
    )
    rows = [11, 12, 13, 14, 21, 22, 23, 24, 25]
    assert found.ids[:9].tolist() == found.features[:9, 0].tolist() == rows
    assert found.positions[:9].tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert found.anchors.tolist() == [3, 8]


@pytest.mark.parametrize(
    ("candidates", "count", "remaining", "finite", "expected"),
    [
        ([5, 6, 7], 3, 9, [1, 1, 1], (3, 6, RUNNING)),
        ([5, 6, 7], 2, 9, [1, 1, 0], (2, 7, RUNNING)),
        ([5, 6, 7], 3, 2, [1, 1, 1], (2, 0, STOPPED_BY_LENGTH)),
        ([5, 6, 7], 3, 3, [1, 1, 1], (3, 0, STOPPED_BY_LENGTH)),
        ([5, 1, 7], 3, 9, [1, 1, 1], (2, 0, STOPPED_BY_TOKEN)),
        ([5, 6, 1], 2, 9, [1, 1, 1], (2, 7, RUNNING)),  # the stop token was not accepted
        ([5, 6, 1], 3, 2, [1, 1, 1], (2, 0, STOPPED_BY_LENGTH)),  # and not reached
        ([5, 1, 7], 3, 2, [1, 1, 1], (2, 0, STOPPED_BY_TOKEN)),  # both at once: the token
        ([5, 6, 7], 3, 9, [1, 0, 1], (1, 0, STOPPED_BY_NONFINITE)),
        ([1, 6, 7], 3, 9, [1, 0, 1], (1, 0, STOPPED_BY_TOKEN)),
        ([5, 6, 7], 1, 1, [1, 0, 1], (1, 0, STOPPED_BY_LENGTH)),
    ],
)
def test_stops(
    candidates: list[int], count: int, remaining: int, finite: list[int], expected: Any
) -> None:
    found = stop(
        torch.tensor([candidates]),
        torch.tensor([count]),
        torch.tensor([True]),
        torch.tensor([finite]).bool(),
        torch.tensor([remaining], dtype=torch.int32),
        torch.tensor([[1, -1]]),
    )
    assert tuple(int(value) for value in found) == expected


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[..., Any]) -> StepCompiler:
    options = plan_of(spec_tokens=2, batch_buckets=(4,), **TINY)
    return StepCompiler(
        load(checkpoint("glm4_moe"), "float64", True), options, make_backend("eager")
    )


def test_a_finished_request_keeps_its_row(compiler: StepCompiler) -> None:
    """A host reads one step late: a row that has nothing left must come out as it went in."""
    step = captured(compiler, StepKey.decode(4, 2))
    state = {n: t for n, t in compiler.shared.items() if n.startswith("state.")}
    state["state.block_table"][1:4] = torch.arange(1, 4)[:, None]
    state["state.committed_lens"][1:4] = torch.tensor([2, 3, 1], dtype=torch.int32)
    state["state.token_ids"][1:4] = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    state["state.remaining_tokens"][1:4] = torch.tensor([9, 0, 9], dtype=torch.int32)
    step.buffers["batch.state_indices"].copy_(torch.tensor([1, 2, 3, 0]))
    before = {name: tensor.clone() for name, tensor in state.items()}
    step.replay()
    for name, tensor in state.items():
        assert torch.equal(tensor[2], before[name][2]), name
        if name not in ("state.block_table", "state.stop_ids"):
            assert not torch.equal(tensor[1], before[name][1]), name
    assert step.buffers["batch.num_emitted"].tolist()[1] == 0


def test_several_prompts_in_one_prefill(compiler: StepCompiler, oracle: Callable[..., Any]) -> None:
    """Packed ragged prompts with a wild padded row between: first tokens and drafts are right."""
    from helpers.oracles import DraftOracle

    key = StepKey.prefill(4, 8, 2)
    step = captured(compiler, key)
    plain = oracle("glm4_moe")
    poison(SpecModel(compiler.loaded.served(), compiler.plan, _program(compiler, step)))
    prompts = [PROMPTS[4], PROMPTS[2], PROMPTS[7]]
    slots = [3, 0, 1, 4]
    shared, buffers = compiler.shared, step.buffers
    for index, (slot, prompt) in enumerate(zip((3, 1, 4), prompts, strict=True)):
        shared["state.block_table"][slot] = 0
        shared["state.block_table"][slot, :4] = torch.arange(1, 5) + 4 * index
        shared["state.stop_ids"][slot] = -1
        shared["state.committed_lens"][slot] = 0
        shared["state.remaining_tokens"][slot] = 9
        assert len(prompt) <= 9
    packed = [token for prompt in prompts for token in prompt]
    buffers["batch.prompt_ids"][: len(packed)] = torch.tensor(packed)
    buffers["batch.num_input"].copy_(torch.tensor([len(prompts[0]), 7, *map(len, prompts[1:])]))
    buffers["batch.is_decoding"].zero_()
    buffers["batch.next_prompt_id"].fill_(-1)
    buffers["batch.state_indices"].copy_(torch.tensor(slots))
    step.replay()
    for row, slot, prompt in zip((0, 2, 3), (3, 1, 4), prompts, strict=True):
        first = plain.generate(prompt, 1, stop=False)
        assert buffers["batch.out_token_ids"][row, :1].tolist() == first
        drafts = DraftOracle(plain).drafts([*prompt, *first], 2)
        assert shared["state.token_ids"][slot].tolist() == [*first, *drafts]
        assert int(shared["state.committed_lens"][slot]) == len(prompt)


def _program(compiler: StepCompiler, step: Any) -> Any:
    from mtpc.program.program import Program

    steps = {step.key: step, StepKey.decode(4, 2): captured(compiler, StepKey.decode(4, 2))}
    return Program(steps, compiler.shared)
