"""The theorem: greedy speculative output is token-identical to the model's own plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import ASSISTED, CPU_FAMILY_NAMES, DRAFTED, FAMILY_NAMES, NEAR_FAMILIES
from helpers.oracles import Oracle
from helpers.reuse import Conversations, check_reuse
from helpers.theorem import (
    PROMPTS,
    check_after_rejection,
    check_theorem,
    poison,
    requests,
)

from mtpc.config import CompileOptions

BY_DEFAULT: dict[str, Iterable[int]] = {
    **dict.fromkeys(CPU_FAMILY_NAMES, (0, 1, 3)),
    **dict.fromkeys((*DRAFTED[1:], *ASSISTED[1:]), ()),
    "mimo": range(5),
}
"""Family -> the K of the default run; 3 for the others. The slow run has every K."""
MORE_WHEN_SLOW = [
    *FAMILY_NAMES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in (*NEAR_FAMILIES, *DRAFTED, *ASSISTED)),
]
"""All families; those whose parts are others' in the slow run only."""


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param(family, k, marks=[pytest.mark.slow] if is_slow else [])
        for family in (*FAMILY_NAMES, *NEAR_FAMILIES, *DRAFTED, *ASSISTED)
        for k in range(5)
        for is_slow in [k not in BY_DEFAULT.get(family, (3,))]
    ],
)
def test_speculative_output_equals_plain_decoding(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """K = 0..4, batches of every bucket, ragged, joins and leaves, poisoned.

    MiMo has all buckets that are captured by default; the others have a part of them.
    """
    few = {} if spec_tokens == 3 else {"batch_buckets": (4,)}
    if (family, spec_tokens) == ("mimo", 3):
        few = {"batch_buckets": CompileOptions.batch_buckets}
    spec = compiled(family, spec_tokens, **few)
    check_theorem(spec, oracle(family), max_examples=25).check_all_happened()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("spec_tokens", range(5))
@pytest.mark.parametrize("family", [*FAMILY_NAMES, *NEAR_FAMILIES, *DRAFTED, *ASSISTED])
def test_the_same_at_length(
    family: str,
    spec_tokens: int,
    backend: str,
    compiled: Callable[..., Any],
    oracle: Callable[..., Oracle],
) -> None:
    """Larger draws: a thousand by compiled steps, and all buckets at every K."""
    spec = compiled(family, spec_tokens, backend=backend)
    count = 1000 if backend == "cpu" else 60
    check_theorem(spec, oracle(family), count, requests(1, 9, 20)).check_all_happened()


@pytest.mark.parametrize("family", MORE_WHEN_SLOW)
def test_trained_drafts_are_accepted_in_part(family: str, compiled: Callable[..., Any]) -> None:
    """The models under the theorem reach every outcome: none, some and all drafts accepted."""
    spec = compiled(family, 3)
    spec.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    rates = spec.stats.acceptance_by_position
    assert 0.05 < rates[2] < rates[0] < 1.0


@pytest.mark.parametrize("num_accepted", range(4))
@pytest.mark.parametrize("family", MORE_WHEN_SLOW)
def test_the_step_after_a_partial_rejection(
    family: str, num_accepted: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Plant drafts of which exactly `num_accepted` are right; that step and the next are exact."""
    check_after_rejection(compiled(family, 3), oracle(family), num_accepted)


def test_full_acceptance(compiled: Callable[..., Any]) -> None:
    """Drafts that are always right are always accepted: K + 1 tokens a step."""
    spec = compiled("mimo", 3, kind="full")
    out = spec.generate(PROMPTS[3:6], max_new_tokens=17, ignore_eos=True)
    assert [len(ids) for ids in out] == [17, 17, 17]
    assert spec.stats.acceptance_rate == 1.0
    assert spec.stats.acceptance_length == 4.0


@pytest.mark.parametrize("chunk", [1, 3, 8, 32])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_prefill_chunking_changes_nothing(
    family: str, chunk: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """A prompt cut into chunks of any size continues alike."""
    spec = compiled(family, 2, prefill_chunk=chunk, batch_buckets=(1,))
    poison(spec)
    for prompt in (PROMPTS[0], PROMPTS[6], PROMPTS[12]):
        assert spec.generate(prompt, 8, ignore_eos=True) == oracle(family).generate(
            prompt, 8, stop=False
        )


REUSING = ("mimo", "qwen3_next", "mimo_v2", "step3p7", "deepseek_v4", "llama")
"""Pages alone, recurrent state, rings of chained layers of both wirings, compressed entries, and a
drafter in a checkpoint of its own."""


@pytest.mark.parametrize("family", [*REUSING, pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_reuse_changes_no_text_and_no_draft(family: str, compiled: Callable[..., Any]) -> None:
    """Turns, forks, copies, evictions, preemption and aborts against runs that reuse nothing.

    These are the programs of the tests above, so that nothing is compiled for it.
    """
    check_reuse(Conversations(compiled(family, 3)), 4)


RESTARTED = ("mimo", "qwen3_next", "step3p7")
"""Pages alone, recurrent state, rings of chained layers."""


@pytest.mark.parametrize(
    "family", [*RESTARTED, *(pytest.param(n, marks=pytest.mark.slow) for n in REUSING[2::2])]
)
def test_restarts_change_no_text_and_no_draft(
    family: str, compiled: Callable[..., Any], tmp_path: Path
) -> None:
    """The same schedules, each again on a new engine with the files of the first one."""
    conversations = Conversations(compiled(family, 3), tmp_path)
    check_reuse(conversations, 4)
    assert conversations.seen["loaded"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 3])
@pytest.mark.parametrize("family", REUSING)
def test_restarts_at_length(
    family: str, spec_tokens: int, compiled: Callable[..., Any], tmp_path: Path
) -> None:
    """1,000 schedules with the kernels of the cpu backend."""
    spec = compiled(family, spec_tokens, backend="cpu", batch_buckets=(1, 4))
    check_reuse(Conversations(spec, tmp_path), 100)


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 1, 3, 4])
@pytest.mark.parametrize("family", [*REUSING, "step3p7@3", "qwen3_5", "nemotron_h"])
def test_reuse_at_length(family: str, spec_tokens: int, compiled: Callable[..., Any]) -> None:
    """11,520 schedules with the kernels of the cpu backend."""
    spec = compiled(family, spec_tokens, backend="cpu", batch_buckets=(1, 4))
    check_reuse(Conversations(spec), 360)


@pytest.mark.slow
def test_float32_random_weights(
    compiled: Callable[..., Any], checkpoint: Callable[..., Any]
) -> None:
    """float32, where margins are wide enough: the deepest K against K = 0 of the same graph."""
    for family in CPU_FAMILY_NAMES:
        plain = compiled(family, 0, dtype="float32", batch_buckets=(1, 4))
        spec = compiled(family, 4, dtype="float32", batch_buckets=(1, 4))
        prompts = [PROMPTS[4], PROMPTS[9], PROMPTS[11]]
        assert spec.generate(prompts, 12) == plain.generate(prompts, 12)
