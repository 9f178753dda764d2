"""The theorem: greedy speculative output is token-identical to the model's own plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fitted
from helpers.families import (
    ASSISTED,
    CPU_FAMILY_NAMES,
    DRAFTED,
    FAMILY_NAMES,
    NEAR_FAMILIES,
    TINY,
)
from helpers.oracles import Oracle
from helpers.reuse import NEW, Ask, Conversations, check_reuse
from helpers.theorem import (
    PROMPTS,
    check_after_rejection,
    check_theorem,
    poison,
    requests,
)

import mtpc
from mtpc.config import CompileOptions

BY_DEFAULT: dict[str, Iterable[int]] = {
    **dict.fromkeys((*NEAR_FAMILIES, *DRAFTED[1:], *ASSISTED[1:]), ()),
    "longcat_flash": (3,),
    "mimo": (0, 3),
}
"""Family -> the K of the default run; 3 for the others. The slow run has every K.

Of near families, models/test_drafts.py compares text and drafts of these programs.
"""
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
    check_theorem(spec, oracle(family), max_examples=12).check_all_happened()


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
    spec = compiled(family, spec_tokens, backend=backend, batch_buckets=(1, 4))
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


PARTS = (
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.experts",
    "model.layers.2.self_attn.o_proj",
    "model.layers.2.mlp.experts",
)
"""Of the checkpoint below: the target's second layer, and the MTP layer."""


@pytest.mark.slow
def test_full_acceptance_where_every_part_counts(tmp_path: Path) -> None:
    """The same where attention and experts decide the text: without one of them, it is another."""
    directory = fitted.make_fitted_checkpoint("glm4_moe", tmp_path / "whole")
    rows = fitted.interleaved_text(4, 11, torch.Generator().manual_seed(5)).tolist()
    prompts = [row[:length] for row, length in zip(rows, (2, 4, 8, 11), strict=True)]
    options: dict[str, Any] = {**TINY, "batch_buckets": (4,), "dtype": "float64"}

    def decode(directory: Path) -> tuple[list[list[int]], float]:
        spec = mtpc.compile(directory, spec_tokens=3, backend="eager", **options)
        return spec.generate(prompts, 17, ignore_eos=True), spec.stats.acceptance_length

    plain = Oracle("glm4_moe", directory)
    wanted = [plain.generate(prompt, 17, stop=False) for prompt in prompts]
    assert decode(directory) == (wanted, 4.0)
    for part in PARTS:
        lessened = fitted.without(directory, part, tmp_path / part)
        assert decode(lessened) != (wanted, 4.0), part


CHUNKED = [("qwen3_next", 1)]
"""Of the default run: the smallest chunks. sampling/test_sampling.py has some across page ends."""


@pytest.mark.parametrize(
    ("family", "chunk"),
    [
        pytest.param(family, chunk, marks=[pytest.mark.slow] * ((family, chunk) not in CHUNKED))
        for family in ("glm4_moe", "qwen3_next")
        for chunk in (1, 3, 8, 32)
    ],
)
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


REUSING = ("qwen3_next", "step3p7", "deepseek_v4")
"""Recurrent state, rings of chained layers, and compressed entries; all have pages, too."""
REUSING_WHEN_SLOW = ("mimo", "mimo_v2", "llama", "nemotron_h", "gemma4")
"""Pages alone, rings of chained layers by another wiring, a drafter in a checkpoint of its own,
another recurrence, and a drafter that reads the target's rings and pages."""


@pytest.mark.parametrize(
    "family",
    [
        *REUSING,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (*REUSING_WHEN_SLOW, "qwen4_exp")),
    ],
)
def test_reuse_changes_no_text_and_no_draft(family: str, compiled: Callable[..., Any]) -> None:
    """Turns, forks, copies, evictions, preemption and aborts against runs that reuse nothing.

    These are the programs of the tests above, so that nothing is compiled for it.
    """
    check_reuse(Conversations(compiled(family, 3)), 4)


@pytest.mark.parametrize("family", ["qwen3_next", "step3p7"])
def test_a_turn_after_decoded_text_when_steps_are_read_late(
    family: str, compiled: Callable[..., Any]
) -> None:
    """Steps end at page ends, where the state has moved on before the host knows of it."""
    conversations = Conversations(compiled(family, 3))
    engine = {"num_pages": 60, "snapshots": 99, "snapshot_distance": 1024, "async_scheduling": True}
    for length in (3, 16, 21, 26):
        first = Ask(0, length, 0, None, 0, NEW, None, 1)
        turn = replace(first, turn_of=0)
        conversations.run([(first, 99, None), (turn, 99, None)], engine)
    assert conversations.seen["reused"] > 0


@pytest.mark.parametrize(
    "family",
    [
        *("mimo", "qwen3_next"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("step3p7", "mimo_v2", "deepseek_v4")),
    ],
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
@pytest.mark.parametrize("family", [*REUSING, *REUSING_WHEN_SLOW[:3]])
def test_restarts_at_length(
    family: str, spec_tokens: int, compiled: Callable[..., Any], tmp_path: Path
) -> None:
    """100 schedules with the kernels of the cpu backend."""
    spec = compiled(family, spec_tokens, backend="cpu", batch_buckets=(1, 4))
    check_reuse(Conversations(spec, tmp_path), 100)


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 1, 3, 4])
@pytest.mark.parametrize("family", [*REUSING, "step3p7@3", "qwen3_5", *REUSING_WHEN_SLOW])
def test_reuse_at_length(family: str, spec_tokens: int, compiled: Callable[..., Any]) -> None:
    """14,400 schedules with the kernels of the cpu backend."""
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
