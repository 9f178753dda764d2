"""Synthetic acceptance: the shares asked for, and caches that hold what was emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import give_kernels
from helpers.families import CPU_OPTIONS
from helpers.theorem import PROMPTS

import mtpc
from mtpc.acceptance import GOLDEN_LENGTHS, settle
from mtpc.config import CompileOptions
from mtpc.engine.estimates import Acceptance
from mtpc.engine.tiers import TierPolicy
from mtpc.errors import CacheError, OptionError
from mtpc.step.synthetic import Dictate, draws

RATES = (0.9, 0.6, 0.3)
Compiled = Callable[..., mtpc.SpecModel]


def test_draws_have_the_rates() -> None:
    """4,096 draws: each share within four standard deviations."""
    table = draws(RATES, 4096)
    for position, rate in enumerate(RATES):
        share = float((table > position).double().mean())
        assert abs(share - rate) < 4 * (rate * (1 - rate) / 4096) ** 0.5
    assert draws((1.0, 1.0), 64).unique().tolist() == [2]
    assert draws((0.0, 0.0), 64).unique().tolist() == [0]


def test_draws_of_fewer_drafts_are_the_same_draws() -> None:
    """So one table serves every K of a program."""
    assert torch.equal(draws(RATES, 512).clamp(max=2), draws(RATES[:2], 512))


@pytest.mark.parametrize("family", ["mimo", pytest.param("step3p7", marks=pytest.mark.slow)])
def test_every_step_is_the_models_own_after_its_drafts(
    family: str, compiled: Compiled, oracle: Callable[..., Any]
) -> None:
    """The last token of each step is the plain choice after all that was emitted before, also of
    requests that decode beside a prompt: the caches hold the drafts that were accepted."""
    spec = compiled(family, 3, batch_buckets=(2,), synthetic_acceptance_rates=RATES)
    texts = {spec.engine.add(prompt, 24): list(prompt) for prompt in PROMPTS[5:9]}
    sizes = []
    while spec.engine.has_work:
        for output in spec.engine.step():
            text = texts[output.request_id]
            text += output.token_ids
            sizes.append(len(output.token_ids))
            if output.finish_reason is None:  # Else the last token may be an accepted draft.
                features = oracle(family).hidden(text[:-1])
                assert text[-1] == oracle(family).next_token(features)
    assert set(sizes) == {1, 2, 3, 4}
    assert spec.stats.joined.steps > 0


DICTATED: Any = {"kind": "full", "batch_buckets": (4,), "synthetic_acceptance_rates": (0.7, 0.4)}
"""Every draft is right, whatever is dictated."""


@pytest.mark.parametrize("more", [{}, {"sampling": True, "row_budgets": (2,)}], ids=str)
def test_no_acceptance_is_plain_decoding(
    more: Any, compiled: Compiled, oracle: Callable[..., Any]
) -> None:
    """Also where drafts equal the model's choice, which rates of 0 must not accept."""
    spec = compiled("mimo", 2, **DICTATED, **more)
    spec.set_synthetic_acceptance((0.0, 0.0))
    accepted, drafted = sum(spec.stats.accepted), sum(spec.stats.drafted)
    found = spec.generate(PROMPTS[:3], 20, ignore_eos=True)
    plain = oracle("mimo", "full")
    assert found == [plain.generate(prompt, 20, stop=False) for prompt in PROMPTS[:3]]
    assert sum(spec.stats.accepted) == accepted
    assert sum(spec.stats.drafted) > drafted


def test_right_drafts_leave_the_text(compiled: Compiled, oracle: Callable[..., Any]) -> None:
    """Where every draft is the model's own choice, the text is the model's at any rates."""
    spec = compiled("mimo", 2, **DICTATED)
    spec.set_synthetic_acceptance((0.7, 0.4))
    # Not PROMPTS[0]: MiMo's layer sees no token at position 0, so its first draft is wrong.
    found = spec.generate(PROMPTS[1:4], 40, ignore_eos=True)
    plain = oracle("mimo", "full")
    assert found == [plain.generate(prompt, 40, stop=False) for prompt in PROMPTS[1:4]]
    assert 0 < spec.stats.acceptance_rate < 1


def test_draws_depend_on_the_position_only(compiled: Compiled) -> None:
    """A request has the same text alone and beside others, and rates change without compiling."""
    spec = compiled("mimo", 3, batch_buckets=(2,), synthetic_acceptance_rates=RATES)
    together = spec.generate(PROMPTS[5:9], 24, ignore_eos=True)
    assert [spec.generate(prompt, 24, ignore_eos=True) for prompt in PROMPTS[5:9]] == together
    before, drafted = list(spec.stats.accepted), list(spec.stats.drafted)
    spec.set_synthetic_acceptance((1.0, 1.0, 0.0))
    spec.generate(PROMPTS[5], 40, ignore_eos=True)
    accepted = [b - a for a, b in zip(before, spec.stats.accepted, strict=True)]
    tried = [b - a for a, b in zip(drafted, spec.stats.drafted, strict=True)]
    assert accepted == [tried[0], tried[1], 0]
    spec.set_synthetic_acceptance(RATES)


class Scripted(TierPolicy):
    """Changes K at every step."""

    def choose(
        self, num_reqs: int, context: int = 0, each: Sequence[Acceptance] = (), *_: bool
    ) -> int:
        self.switches += 1
        return (0, 3, 1, 3, 3)[self.switches % 5]


def test_drafts_that_no_step_proposed_are_not_accepted(compiled: Compiled) -> None:
    """After a step of fewer drafts, old tokens stand in the row; at rates of 1, too."""
    tiers: Any = {"spec_tiers": (0, 1, 3), "synthetic_acceptance_rates": (1.0, 1.0, 1.0)}
    spec = compiled("mimo", "auto", batch_buckets=(2,), **tiers)
    spec.engine.runner.tiers = Scripted(spec.options.tiers)
    spec.generate(PROMPTS[5:7], 40, ignore_eos=True)
    stats = spec.stats
    assert stats.accepted == stats.drafted
    # Every token is a step's own or an accepted draft; the cut at a request's end has fewer.
    assert stats.request_steps + sum(stats.accepted) - stats.decoded_tokens in range(3)


def test_stats_say_synthetic(compiled: Compiled) -> None:
    spec = compiled("mimo", 3, batch_buckets=(2,), synthetic_acceptance_rates=RATES)
    assert str(spec.stats).startswith("SYNTHETIC acceptance")
    assert spec.stats.synthetic_acceptance_rates == RATES
    plain = compiled("mimo", 3, batch_buckets=(2,))
    assert "SYNTHETIC" not in str(plain.stats)
    assert "state.synthetic_draws" not in plain.program.shared
    with pytest.raises(OptionError, match="compiled with synthetic_acceptance_rates"):
        plain.set_synthetic_acceptance(RATES)


def test_a_prompt_is_left_alone() -> None:
    """Beside a request that decodes, the rows of a prompt, and of nobody, are as they were."""
    chosen, ids = torch.arange(50, 59), torch.arange(12)
    slots, table = torch.tensor([1, 2, 3]), torch.full((8,), 1)
    token_ids = torch.tensor([[0, 0, 0], [0, 1, 2], [4, 7, 8], [9, -1, -1]])
    starts, lens = torch.tensor([0, 4, 7, 10]).int(), torch.tensor([3, 9, 2]).int()
    active, decoding = torch.tensor([True, True, True]), torch.tensor([0, 1, 1]).int()
    found, rows = Dictate(3)(chosen, ids, starts, lens, active, slots, token_ids, table, decoding)
    assert found.tolist() == [50, 51, 52, 7, 54, 55, 56, 57, 58]
    assert rows.tolist() == [0, 1, 2, 3, 4, 7, 53, 7, 55, 56, 10, 11]


def test_lengths() -> None:
    assert settle(3, (), 2.52) == pytest.approx((1.0, 0.52, 0.0))
    assert settle(3, (), "qwen3.8-27b") == pytest.approx((1.0, 0.52, 0.0))
    assert settle(2, (), 1) == (0.0, 0.0)
    assert settle(2, (), 3) == (1.0, 1.0)
    assert settle(0, (), None) == ()
    for lengths in GOLDEN_LENGTHS.values():
        for k, length in lengths.items():
            assert 1 + sum(settle(k, (), length)) == pytest.approx(length)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic_acceptance_length": 4.1}, r"is 4\.1; expected 1\.\.4 tokens"),
        ({"synthetic_acceptance_length": 0.5}, "expected 1"),
        ({"synthetic_acceptance_length": True}, "is True; expected 1"),
        ({"synthetic_acceptance_length": "gpt"}, "is 'gpt'; expected a number, or one of"),
        ({"spec_tokens": 2, "synthetic_acceptance_length": "qwen3.8-27b"}, "for 2 drafts"),
        ({"synthetic_acceptance_rates": (0.5,)}, "has 1 entries; expected one for each of 3"),
        ({"synthetic_acceptance_rates": (0.5, 0.6, 0.1)}, "do not grow"),
        ({"synthetic_acceptance_rates": (1.5, 0.6, 0.1)}, r"numbers in 0\.\.1"),
        ({"synthetic_acceptance_rates": "high"}, "is 'high'; expected a number for each"),
        ({"synthetic_acceptance_rates": RATES, "synthetic_acceptance_length": 2}, "give one"),
        ({"spec_tokens": 0, "synthetic_acceptance_length": 1}, "spec_tokens is 0"),
        (
            {"synthetic_acceptance_length": 2, "sampling": True, "token_mask": True},
            "no synthetic acceptance",
        ),
    ],
)
def test_bad_rates(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompileOptions(**options)


def test_hosts_have_no_such_option(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match=r"belongs to mtpc\.compile"):
        mtpc.compile_host(checkpoint("mimo", "random"), synthetic_acceptance_length=2.0)


@pytest.mark.slow
def test_cpu_has_eagers_text(
    compiled: Compiled, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Through tape, cache and warm start: the key differs from that of real acceptance."""
    tmp_path.chmod(0o755)
    give_kernels(tmp_path)
    options: Any = {**CPU_OPTIONS, "cache_dir": tmp_path}
    rates: Any = {"synthetic_acceptance_rates": RATES}
    eager = compiled("mimo", 3, batch_buckets=(2,), **rates)
    before = list(eager.stats.accepted)
    cold = mtpc.compile(checkpoint("mimo"), **options, **rates)
    wanted = eager.generate(PROMPTS[5:8], 20, ignore_eos=True)
    assert cold.generate(PROMPTS[5:8], 20, ignore_eos=True) == wanted
    warm = mtpc.compile(checkpoint("mimo"), **options, **rates, frozen=True)
    assert warm.generate(PROMPTS[5:8], 20, ignore_eos=True) == wanted
    of_eager = [b - a for a, b in zip(before, eager.stats.accepted, strict=True)]
    assert warm.stats.accepted == cold.stats.accepted == of_eager
    with pytest.raises(CacheError):
        mtpc.compile(checkpoint("mimo"), **options, frozen=True)
