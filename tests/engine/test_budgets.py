"""A budget of rows: the likeliest drafts are verified, and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS, check_theorem, poison
from hypothesis import given, settings
from hypothesis import strategies as st

import mtpc
from mtpc.engine.budgets import ENOUGH, REPEAT, BudgetPolicy
from mtpc.errors import OptionError
from mtpc.layout import DRAFT_COUNTS, NO_TOKEN, StepKey
from mtpc.step.budget import EXPECTED, FADE, AcceptPacked, CountDrafts, chances, choose_drafts

ASKED: dict[str, Any] = {"batch_buckets": (1, 4), "row_budgets": (2,)}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NEW = 24


@settings(max_examples=200, deadline=None)
@given(
    worth=st.lists(
        st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.25, 0.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
    useful=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    room=st.integers(0, 16),
)
def test_the_likeliest_drafts_are_chosen(
    worth: list[list[float]], useful: list[int], room: int
) -> None:
    """As many as fit, of each request a prefix, and none beside them has a greater chance."""
    rows = torch.tensor(worth).cumprod(1)
    is_useful = torch.arange(3) < torch.tensor(useful[: len(worth)])[:, None]
    count = choose_drafts(rows, is_useful, torch.tensor(room))
    assert (count <= is_useful.sum(1)).all()
    assert int(count.sum()) == min(room, int(is_useful.sum()))
    is_chosen = torch.arange(3) < count[:, None]
    left = rows[is_useful & ~is_chosen]
    if len(left) and is_chosen.any():
        assert rows[is_chosen].min() >= left.max()


def test_chances_are_counted() -> None:
    counts = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[18.0, 18.0], [8.0, 0.0]]])
    first, second = chances(counts).tolist()
    assert first == pytest.approx([EXPECTED, EXPECTED**2])
    assert second[0] > 0.95
    assert second[1] < 0.2


Change = Callable[[torch.Tensor], None]


def random_counts(counts: torch.Tensor) -> None:
    judged = torch.rand(counts.shape[:2]) * 20
    counts[..., 0] = judged
    counts[..., 1] = judged * torch.rand(counts.shape[:2])


def reversed_counts(counts: torch.Tensor) -> None:
    """What was accepted counts as refused."""
    counts[..., 1] = counts[..., 0] - counts[..., 1]


def one_takes_all(counts: torch.Tensor) -> None:
    counts[..., 0], counts[..., 1] = 50.0, 0.0
    counts[2, :, 1] = 50.0


@contextmanager
def adversary(spec: mtpc.SpecModel, change: Change) -> Iterator[None]:
    """Change the counts before each step."""
    program = spec.program
    inner = program.run

    def run(key: StepKey) -> None:
        change(program.shared[DRAFT_COUNTS])
        inner(key)

    program.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        program.run = inner  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "family",
    [
        "mimo",
        pytest.param("qwen3_next", marks=pytest.mark.slow),  # Recurrent state.
        pytest.param("step3p7", marks=pytest.mark.slow),  # Rings, and several layers.
        pytest.param("deepseek_v3", marks=pytest.mark.slow),  # Latents and experts.
        pytest.param("deepseek_v4", marks=pytest.mark.slow),  # Compressed entries.
    ],
)
def test_the_text_is_that_of_plain_decoding(
    family: str, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Random requests from poisoned memory; then counts that somebody spoils before each step."""
    spec = compiled(family, 3, **ASKED)
    check_theorem(spec, oracle(family), max_examples=8)
    plain = [oracle(family).generate(prompt, NEW, stop=False) for prompt in PROMPTS[:4]]
    for change in (random_counts, reversed_counts, one_takes_all):
        poison(spec)
        with adversary(spec, change):
            assert spec.generate(PROMPTS[:4], NEW, **GREEDY) == plain, change.__name__
    assert 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)


@pytest.mark.slow
def test_what_users_run(compiled: Callable[..., Any]) -> None:
    """The cpu backend in bfloat16, greedy and sampled, beside a step that verifies all drafts."""
    asked = {"backend": "cpu", "dtype": "bfloat16", "sampling": True, "batch_buckets": (4,)}
    whole = compiled("mimo", 3, **asked)
    spec = compiled("mimo", 3, **asked, row_budgets=(2,))
    for parameters in (GREEDY, {"temperature": 0.8, "top_p": 0.9, "seed": 7, "ignore_eos": True}):
        expected = whole.generate(PROMPTS[:5], NEW, **parameters)
        assert spec.generate(PROMPTS[:5], NEW, **parameters) == expected
    rows = {key.bucket.num_tokens for key in spec.stats.replays if key.phase == "decode"}
    assert rows == {8}


def test_no_step_verifies_more_than_its_budget(compiled: Callable[..., Any]) -> None:
    """Four requests share 8 rows: one each, and four drafts; fewer requests leave room for more."""
    spec = compiled("mimo", 3, **ASKED)
    poison(spec)
    for prompt in PROMPTS[:4]:
        spec.engine.add(prompt, NEW, stop_ids=())
    seen = []
    while spec.engine.has_work:
        before = spec.stats
        steps, rows = before.decode_steps, sum(before.drafted) + before.request_steps
        spec.engine.step()
        if spec.stats.decode_steps > steps:
            seen.append(sum(spec.stats.drafted) + spec.stats.request_steps - rows)
    assert max(seen) == 8


def test_one_request_that_verifies_nothing(
    compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Its step has one row of logits, for the four tokens that a request may emit."""
    spec = compiled("mimo", 3, batch_buckets=(1,), row_budgets=(1,))
    assert spec.generate(PROMPTS[1], NEW, **GREEDY) == oracle("mimo").generate(
        PROMPTS[1], NEW, stop=False
    )
    assert sum(spec.stats.drafted) == 0


SHAPES = ((0, 1), (1, 2), (3, 2), (3, 3), (3, 4))


def test_the_policy_takes_the_best_rate() -> None:
    """Of every K and budget; a change of K waits until it pays."""
    policy = BudgetPolicy(SHAPES)
    costs = dict(zip(SHAPES, (1.0, 1.3, 1.5, 2.2, 3.3), strict=True))

    def step(chances: list[list[float]]) -> tuple[int, int]:
        shape = policy.choose(4, chances)
        policy.observe(4, shape, costs[shape], 100)
        return shape

    first = [step([]) for _ in range(ENOUGH * len(SHAPES))]
    assert sorted(set(first)) == list(SHAPES)
    some, all_, none = [0.9, 0.8, 0.7], [0.99, 0.98, 0.97], [0.01, 0.0, 0.0]
    mixed = [step([some, some, none, none]) for _ in range(9)]
    assert mixed[0] == mixed[-1] == (3, 2)
    hopeless = [step([none] * 4) for _ in range(9)]
    assert hopeless == [(0, 1)] * 9
    few = [step([[0.6, 0.1, 0.0]] * 4) for _ in range(9)]
    assert few == [(0, 1)] + [(1, 2)] * 8
    costs |= {(3, 3): 1.55, (3, 4): 1.6}
    later = [step([all_] * 4) for _ in range(20 * REPEAT)]
    assert later[-1] == (3, 4)
    assert later.count((3, 4)) > 0.6 * len(later)


def test_steps_that_arrive_are_chosen() -> None:
    policy = BudgetPolicy(SHAPES)
    policy.use((0,))
    assert policy.choose(4, []) == (0, 1)
    policy.use((0, 3))
    assert policy.choose(4, []) == (3, 4)


@pytest.mark.parametrize("tiers", [(0, 1, 3), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def test_every_k_with_its_budgets(
    tiers: tuple[int, ...], compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """The policy tries each step; drafts that were not proposed are neither verified nor counted,
    and plain steps let counts fade."""
    spec = compiled("mimo", "auto", spec_tiers=tiers, batch_buckets=(4,), row_budgets=(2, 3))
    plain = [oracle("mimo").generate(prompt, 2 * NEW, stop=False) for prompt in PROMPTS[:4]]
    poison(spec)
    assert spec.generate(PROMPTS[:4], 2 * NEW, **GREEDY) == plain
    ran = {(k.spec_tokens, k.bucket.query_len) for k in spec.stats.replays if k.phase == "decode"}
    assert ran == set(spec.options.shapes)
    for change in (random_counts, reversed_counts):
        poison(spec)
        with adversary(spec, change):
            assert spec.generate(PROMPTS[:4], 2 * NEW, **GREEDY) == plain, change.__name__


def test_what_is_judged() -> None:
    """Drafts that exist and have a row, up to the first that is refused; old counts fade."""
    counts = torch.zeros(3, 3, 2)

    def step(drafts: list[int], num_rows: int, accepted: int, slot: int = 1) -> list[float]:
        tokens = torch.full((3, 4), -1)
        tokens[slot, : 1 + len(drafts)] = torch.tensor([5, *drafts])
        rows = (torch.tensor([slot]), torch.tensor([True]))
        starts = torch.tensor([0, num_rows], dtype=torch.int32)
        verified, found = CountDrafts()(counts, tokens, *rows, starts, torch.tensor([accepted]))
        assert (verified.tolist(), found.shape) == ([min(len(drafts), num_rows - 1)], (1, 3))
        return counts[slot].flatten().tolist()

    assert step([6, 7], 4, 1) == [1, 1, 1, 0, 0, 0]
    assert step([], 1, 0) == pytest.approx([FADE, FADE, FADE, 0, 0, 0])
    assert step([6, 7, 8], 4, 0, slot=2) == [1, 0, 0, 0, 0, 0]
    assert step([6, 7, 8], 3, 2, slot=2) == pytest.approx([FADE + 1, 1, 1, 1, 0, 0])
    assert step([], 1, 0)[0] == pytest.approx(FADE**2)


def test_the_next_request_has_no_draft_of_this_one() -> None:
    """Two requests share three rows; the second begins with the token that the first chose."""
    reports = [torch.zeros(2, 3, dtype=torch.int64), *torch.zeros(3, 2, dtype=torch.int32)]
    chosen = torch.tensor([7, 7, 7, 8, 9, 9])
    ids, starts = torch.tensor([5, 7, 8]), torch.tensor([0, 1, 3], dtype=torch.int32)
    lens, active = torch.tensor([4, 4], dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    limits = (torch.full((3,), 9, dtype=torch.int32), torch.full((3, 1), -1), torch.tensor([1, 2]))
    given = (*reports, chosen, torch.ones(6, dtype=torch.bool), ids, starts, lens, active, *limits)
    AcceptPacked()(*given)
    num_accepted, num_emitted = reports[1].tolist(), reports[2].tolist()
    assert (num_accepted, num_emitted) == ([0, 1], [1, 2])


def test_what_was_not_proposed_is_no_draft(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with one draft clears the further ones of the step before, and a request that joins
    has no counts of one before it."""
    spec = compiled("mimo", "auto", spec_tiers=(1, 3), batch_buckets=(1,), row_budgets=(2,))
    shapes = iter([(3, 2), (1, 2), (3, 2)])
    monkeypatch.setattr(spec.engine.runner.budgets, "choose", lambda *_: next(shapes))
    shared, steps = spec.program.shared, spec.stats.decode_steps
    shared[DRAFT_COUNTS].fill_(7.0)
    request = spec.engine.add(PROMPTS[0], NEW, stop_ids=())
    seen = []
    while spec.stats.decode_steps < steps + 3:
        spec.engine.step()
        seen.append((shared["state.token_ids"][1] == NO_TOKEN).tolist())
        assert shared[DRAFT_COUNTS][1].max() <= 3
    assert seen[-3:] == [[False] * 4, [False, False, True, True], [False] * 4]
    spec.engine.abort(request)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spec_tokens": 2, "row_budgets": (4,)}, "expected at most 3"),
        ({"spec_tokens": 2, "row_budgets": (0,)}, "row_budgets is 0"),
        ({"spec_tokens": 3, "row_budgets": (2,), "draft": "copy"}, "one of them alone"),
        ({"row_budgets": "ab"}, "expected numbers of rows"),
    ],
)
def test_bad_budgets(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        mtpc.CompileOptions(**options)
