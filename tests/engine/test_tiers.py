"""Choosing K: from costs and acceptance that are known exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import pytest
from helpers.oracles import DraftOracle
from helpers.plans import changed, plan_of
from helpers.theorem import PROMPTS, poison

from mtpc.config import CompileOptions
from mtpc.engine.estimates import Acceptance, Experience, StepCosts
from mtpc.engine.tiers import BUDGET, TierPolicy, from_json, to_json
from mtpc.errors import OptionError

TIERS = (0, 1, 2, 3)
Cost = Callable[[int, int], float]


def bandwidth_bound(num_reqs: int, tier: int) -> float:
    """Weights are read once; a draft reads a little more."""
    return 1.0 + 0.1 * tier


def compute_bound(num_reqs: int, tier: int) -> float:
    """Every row costs."""
    return 0.25 * num_reqs * (tier + 1)


def run(
    policy: TierPolicy,
    cost: Cost,
    chance: float,
    steps: int,
    num_reqs: int = 2,
    seed: int = 0,
    noise: float = 0.0,
) -> list[int]:
    """Steps whose drafts are accepted by chance; returns the K of each."""
    draw, chosen, before = random.Random(seed), [], 3
    for _ in range(steps):
        tier = policy.choose(num_reqs)
        verified = min(tier, before)
        drafts = []
        for _ in range(num_reqs):
            accepted = 0
            while accepted < verified and draw.random() < chance:
                accepted += 1
            drafts.append((verified, accepted))
        policy.observe_drafts(drafts)
        policy.observe(num_reqs, tier, cost(num_reqs, tier) * draw.gauss(1, noise))
        chosen.append(tier)
        before = tier
    return chosen


@pytest.mark.parametrize(
    ("cost", "chance", "expected"),
    [
        (bandwidth_bound, 0.95, {3}),
        (bandwidth_bound, 0.0, {0}),
        (bandwidth_bound, 0.3, {1, 2}),
        (compute_bound, 0.9, {0}),
    ],
)
def test_it_settles_on_the_best(cost: Cost, chance: float, expected: set[int]) -> None:
    """1.3 tokens for 1.1, or 1.39 for 1.2, beat 1; and where rows cost, drafts never pay."""
    last = run(TierPolicy(TIERS), cost, chance, 600)[-200:]
    assert sum(tier in expected for tier in last) > 170


def test_a_hopeless_k_is_not_tried() -> None:
    """Where rows cost, three drafts of which none is accepted take four times as long: no step is
    spent on them, because less is known to be better."""
    chosen = run(TierPolicy(TIERS), compute_bound, 0.0, 400)
    assert chosen.count(3) == 0
    assert chosen.count(0) > 385


def test_trials_have_a_budget() -> None:
    """Time lost to trials stays a small share, whatever is accepted."""
    for chance in (0.0, 0.3, 0.6, 0.9):
        policy = TierPolicy(TIERS)
        run(policy, compute_bound, chance, 2000)
        # In advance, each of three K may lose a step of up to two seconds.
        assert policy.lost < BUDGET * policy.spent + 6


def test_lengths_have_costs_of_their_own() -> None:
    """A long context makes drafts pay that did not pay before: they cost it once."""

    def cost(context: int) -> Cost:
        return lambda num_reqs, tier: 1.0 + 0.5 * tier + context / 1000

    policy, draw = TierPolicy((0, 1)), random.Random(2)
    for context, expected in ((100, 0), (8000, 1), (100, 0)):
        chosen = []
        for _ in range(300):
            tier = policy.choose(1, context)
            policy.observe_drafts([(tier, int(tier and draw.random() < 0.3))])
            policy.observe(1, tier, cost(context)(1, tier), context)
            chosen.append(tier)
        assert chosen[-100:].count(expected) > 85


def test_it_notices_that_the_text_changed() -> None:
    """At K = 0 nothing is learnt but by trials."""
    policy = TierPolicy(TIERS)
    hard = run(policy, bandwidth_bound, 0.0, 300)
    assert policy.current == 0
    assert hard[100:].count(0) / len(hard[100:]) > 0.9
    easy = run(policy, bandwidth_bound, 1.0, 400, seed=1)
    assert policy.current == 3
    assert easy.index(3) <= 150


Changes = list[tuple[float, float, float]]


def after_changes(policy_type: type[TierPolicy], chance: float) -> Changes:
    """The speed of 400 steps after each change of all costs, as a share of the best K's: of all, of
    the last hundred, and of an oracle that knows the past alone.

    The oracle sees two steps at the K that it had, measures every other K once, and knows all.
    """
    tokens = [sum(chance**i for i in range(tier + 1)) for tier in TIERS]
    found = []
    for seed in range(4):
        policy, before = policy_type(TIERS), 0
        for cost in (bandwidth_bound, compute_bound, bandwidth_bound, compute_bound):
            rates = [length / cost(2, tier) for tier, length in enumerate(tokens)]
            best = rates.index(max(rates))

            def share(chosen: list[int], cost: Cost = cost, most: float = max(rates)) -> float:
                """A step verifies no more drafts than the one before it proposed."""
                pairs = zip(chosen[1:], chosen, strict=False)
                gained = sum(tokens[min(pair)] for pair in pairs)
                return gained / sum(cost(2, tier) for tier in chosen[1:]) / most

            chosen = [before, *run(policy, cost, chance, 400, seed=seed, noise=0.03)]
            others = [tier for tier in reversed(TIERS) if tier != before]
            oracle = [before] * 3 + others + [best] * (400 - 2 - len(others))
            found.append((share(chosen), share(chosen[-101:]), share(oracle)))
            before = chosen[-1]
    return found


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
def test_costs_that_change(chance: float) -> None:
    """The machine gets busy, and is free again: what was measured before does not bind.

    No policy knows a change before it has measured it. So 400 steps from a change on are held
    against an oracle that knows the past alone, and their end against the best K.
    """
    found = after_changes(TierPolicy, chance)
    assert min(share / oracle for share, _, oracle in found) >= 0.94
    assert mean(share / oracle for share, _, oracle in found) >= 0.98
    assert min(last for _, last, _ in found) >= 0.94
    assert mean(last for _, last, _ in found) >= 0.98


class Untried(TierPolicy):
    """A fault: it tries no K but the one that it prefers."""

    def _next_trial(self, cell: StepCosts) -> int | None:
        return None


def test_changes_are_found_by_trials() -> None:
    assert min(last for _, last, _ in after_changes(Untried, 0.5)) < 0.8


def lured(policy: TierPolicy, cost: Cost, grace: int) -> list[float]:
    """Texts that know the policy: drafts are accepted until it has preferred some for a few steps.

    Returns at each step the seconds that K = 0 takes for all tokens so far, over those taken.
    """
    draw, before, after, plain, taken, shares = random.Random(3), 3, 0, 0.0, 0.0, list[float]()
    for _ in range(3000):
        tier = policy.choose(2)
        accepted = min(tier, before) if after < grace else 0
        after = after + 1 if policy.current else 0
        seconds = cost(2, tier) * draw.gauss(1, 0.03)
        policy.observe_drafts([(min(tier, before), accepted)] * 2)
        policy.observe(2, tier, seconds)
        plain, taken, before = plain + (1 + accepted) * cost(2, 0), taken + seconds, tier
        shares.append(plain / taken)
    return shares


class Restless(TierPolicy):
    """A fault: it never rests at K = 0."""

    def _compare(self, cell: StepCosts, tier: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize("grace", [1, 2, 3, 4])
def test_the_floor_holds_against_texts_that_know_the_policy(grace: int) -> None:
    for cost in (bandwidth_bound, compute_bound):
        assert min(lured(TierPolicy(TIERS), cost, grace)[200:]) >= 0.95


def test_the_floor_needs_rests() -> None:
    assert min(lured(Restless(TIERS), compute_bound, 1)[200:]) < 0.95


def test_a_pause_of_the_machine_is_no_loss_to_plain_decoding() -> None:
    policy = TierPolicy(TIERS)
    run(policy, bandwidth_bound, 0.8, 60)
    tier = policy.choose(2)
    policy.observe_drafts([(tier, tier)] * 2)
    policy.observe(2, tier, 40.0)
    assert not policy.rests


def test_costs_of_earlier_runs_make_the_first_step_a_good_one() -> None:
    """What one policy measured is written and read; another begins with it, and measures on."""
    first = TierPolicy(TIERS)
    run(first, bandwidth_bound, 0.8, 300, noise=0.03)
    known = from_json(to_json(first.costs()))
    assert known == first.costs()
    assert run(TierPolicy(TIERS), bandwidth_bound, 0.8, 1) == [0]
    later = TierPolicy(TIERS, known)
    assert run(later, bandwidth_bound, 0.8, 1) == [3]
    run(later, lambda n, k: 2 * bandwidth_bound(n, k), 0.8, 300, noise=0.03)
    (found,) = later.costs().values()
    assert found[3][0] == pytest.approx(2.6, rel=0.1)
    assert run(TierPolicy(TIERS, known), bandwidth_bound, 0.0, 400)[100:].count(0) > 280


def test_known_costs_serve_where_their_k_have_steps() -> None:
    """A program begins with K = 0, and gets the others while it runs."""
    first = TierPolicy(TIERS)
    run(first, bandwidth_bound, 0.8, 300)
    growing = TierPolicy((0,), first.costs())
    assert growing.choose(2) == 0
    growing.use(TIERS)
    assert growing.choose(2) == 3


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"1", b"[[1]]", b'[[1, 0, [[0, "a", true]]]]', b"[[1e999, 0, []]]",
     b"[[1, 0, [[0, NaN, true]]]]", b"[[1, 0, [[0, -1.0, true]]]]", b"[" * 100_000,
     b"[[1, 0, [[0, 1e999, true]]]]",
     b"[[1, 0, [[0, 1.0]], [0]]]"],
)  # fmt: skip
def test_other_text_is_no_costs(data: bytes) -> None:
    with pytest.raises(ValueError, match="no costs of steps"):
        from_json(data)


def test_it_does_not_flutter() -> None:
    """Two tiers as good as each other, measured with noise."""
    policy, draw = TierPolicy((1, 2)), random.Random(1)
    run(policy, lambda _, tier: (1 + 0.5 * tier) * draw.uniform(0.97, 1.03), 0.5, 1000)
    assert policy.switches <= 40


def test_what_was_not_drafted_does_not_count() -> None:
    """After a step of K = 1, a step of K = 3 verifies one real draft."""
    experience = Experience(3)
    experience.add([(1, 1)])
    # One sample, and a prior that counts for one: 0.7, or the position before.
    assert experience.shares() == pytest.approx([0.85] * 3)
    experience.add([(3, 1)])
    first, second, _ = experience.shares()
    assert first > 0.8
    assert second == pytest.approx(first / 2)


def test_requests_count_for_themselves_where_they_differ() -> None:
    """One accepts all, another nothing: alone, each has the tokens that it gets."""
    experience, good, bad = Experience(1), Acceptance(), Acceptance()
    for _ in range(20):
        experience.add([(1, 1), (1, 0)], [good, bad])
    assert experience.lengths([good])[0][1] > 1.8
    assert experience.lengths([bad])[0][1] < 1.2
    assert experience.lengths([bad, good]) == [
        *experience.lengths([bad]),
        *experience.lengths([good]),
    ]
    assert experience.lengths([Acceptance()])[0][1] == pytest.approx(1.5, abs=0.1)


def test_requests_share_what_they_know_where_they_are_alike() -> None:
    experience, each, draw = Experience(1), [Acceptance() for _ in range(4)], random.Random(3)
    for _ in range(100):
        experience.add([(1, int(draw.random() < 0.6)) for _ in each], each)
    found = [experience.lengths([own])[0][1] for own in each]
    assert max(found) - min(found) == 0
    assert found[0] == pytest.approx(1.6, abs=0.1)


class Scripted(TierPolicy):
    """Changes K in an order of its own."""

    def __init__(self, tiers: Sequence[int], order: Sequence[int]):
        super().__init__(tiers)
        self._order = itertools.cycle(order)

    def choose(
        self, num_reqs: int, context: int = 0, each: Sequence[Acceptance] = (), *_: bool
    ) -> int:
        self.switches += 1
        return next(self._order)


FEW: dict[str, Any] = {"batch_buckets": (2,), "spec_tiers": (0, 1, 3)}


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("mimo", "step3p7", "glm_moe_dsa@shared")
        ),
    ],
)
def test_k_may_change_at_every_step(
    family: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Text equals plain decoding's, and drafts those of the uncached oracle, also after steps
    that drafted nothing, and beside a prompt: MTP layers keep the KV of every row."""
    spec = compiled(family, "auto", **FEW)
    drafts = DraftOracle(oracle(family))
    spec.engine.runner.tiers = Scripted(spec.options.tiers, (3, 1, 3, 0, 0, 3, 1, 1, 0, 3, 3, 0))
    poison(spec)
    asked = [(PROMPTS[7], 24), (PROMPTS[10], 12), (PROMPTS[9], 8)]
    texts = {spec.engine.add(prompt, new): list(prompt) for prompt, new in asked}
    compared = 0
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in [r for r in spec.engine.running if r.is_prefilled]:
            found = spec.program.shared["state.token_ids"][request.slot].tolist()
            text = texts[request.request_id]
            assert found[0] == text[-1]
            assert found[1 : 1 + request.num_drafts] == drafts.drafts(text, request.num_drafts)
            compared += request.num_drafts > 0
    assert compared >= 10
    for text, (prompt, new) in zip(texts.values(), asked, strict=True):
        assert text == prompt + oracle(family).generate(prompt, new, stop=False)
    assert spec.stats.joined.steps > 0
    used = {key.spec_tokens for key in spec.stats.replays if key.phase == "decode"}
    assert used == {0, 1, 3}
    assert sum(spec.stats.drafted) < 3 * spec.stats.request_steps


def test_every_layer_keeps_its_kv_at_any_k(
    compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Two layers, and K = 1 up to a step of K = 2: the second layer reads rows that it wrote for no
    draft."""
    spec = compiled("mimo@2", "auto", "random", spec_tiers=(1, 2), batch_buckets=(1,))
    spec.engine.runner.tiers, text = Scripted(spec.options.tiers, (1, 1, 1, 2)), list(PROMPTS[7])
    poison(spec)
    spec.engine.add(PROMPTS[7], 16)
    compared, drafts = 0, DraftOracle(oracle("mimo@2", "random"))
    while spec.engine.has_work:
        text += [token for output in spec.engine.step() for token in output.token_ids]
        for request in [r for r in spec.engine.running if r.num_drafts == 2]:
            found = spec.program.shared["state.token_ids"][request.slot].tolist()
            assert found == [text[-1], *drafts.drafts(text, 2)]
            compared += 1
    assert compared >= 3


def test_the_engine_chooses(compiled: Callable[..., Any], oracle: Callable[..., Any]) -> None:
    """With the policy as it is: the same text, whatever it chooses."""
    spec = compiled("qwen3_next", "auto", **FEW)
    spec.engine.runner.tiers = TierPolicy(spec.options.tiers)
    poison(spec)
    found = spec.generate(PROMPTS[:5], 20, ignore_eos=True)
    assert found == [
        oracle("qwen3_next").generate(prompt, 20, stop=False) for prompt in PROMPTS[:5]
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_tokens": "many"}, "spec_tokens is 'many'"),
        ({"spec_tokens": "auto", "spec_tiers": (2,)}, "spec_tiers is"),
        ({"spec_tokens": "auto", "spec_tiers": (0, -1)}, "spec_tiers is -1"),
        ({"spec_tokens": 2, "spec_tiers": (0, 1, 3)}, "spec_tiers is"),
    ],
)
def test_bad_tiers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompileOptions(**options)


def test_tiers_are_settled() -> None:
    plan = plan_of(spec_tokens="auto", spec_tiers=(4, 1))
    assert (plan.spec_tokens, plan.tiers) == (4, (1, 4))
    assert changed(plan, max_len=64).tiers == (1, 4)
    assert plan_of(spec_tokens=2).tiers == (2,)
