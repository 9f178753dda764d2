"""Steps serve all sizes that they leave open: built for some, they run for others, text unchanged.

The sizes are max_len, the number of pages, and the largest bucket. Whoever asks for others finds
the steps of CPU_OPTIONS, under `frozen`, where anything that is not in the cache is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.compiled import CpuBuilt
from helpers.families import CPU_FAMILY_NAMES, CPU_OPTIONS, EACH_FAMILY_OF_FEW
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.warm_starts import BATCH, DECODE, PREFILL

import mtpc
from mtpc.backends.package import TAPE, TapeArtifact
from mtpc.errors import BackendError, CacheError, OptionError
from mtpc.layout import StepKey
from mtpc.layout.progress import Progress
from mtpc.program.step_cache import CachedStep

MAX_LEN: int = CPU_OPTIONS["max_len"]
PAGE: int = CPU_OPTIONS["page_size"]
LONGER, SHORTER = 107, 29
"""Neither is a multiple of a page: the last page of both is ragged."""
FIXED = {"deepseek_v4": {"M"}}
"""Families whose steps are for one max_len: compressed entries are computed with their number."""


def prompt_of(length: int) -> list[int]:
    """A prompt of that many tokens."""
    tokens = [token for prompt in PROMPTS for token in prompt]
    return (tokens * (length // len(tokens) + 1))[:length]


def steps_of(spec: mtpc.SpecModel) -> set[StepKey]:
    return set(spec.program.steps)


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_which_sizes_are_open(family: str, cpu_built: Callable[..., CpuBuilt]) -> None:
    """All of them, in both phases, but for a family that computes with one."""
    for key in (DECODE, PREFILL):
        package = cpu_built(family).compiler.obtain(key).record.package
        assert set(package.fixed) == FIXED.get(family, set())
        assert package.least.keys() | package.fixed.keys() == {"M", "N", "S"}


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_a_longer_program(
    family: str, warm: Callable[..., mtpc.SpecModel], oracle: Callable[..., Oracle]
) -> None:
    """Past the length and the pages of the one that was built: across its end, a page's edge after
    it, and up to the new end. A second run takes pages and snapshots of the first."""
    if family in FIXED:
        pytest.skip("its steps are for one max_len")
    spec = warm(family, max_len=LONGER, num_pages=None)
    plain = oracle(family)
    assert spec.options.max_len == LONGER
    for length in (MAX_LEN - 3, MAX_LEN + PAGE - 1):
        prompt, count = prompt_of(length), LONGER - length
        wanted = plain.generate(prompt, count, stop=False)
        for _ in range(2):
            assert spec.generate(prompt, count, ignore_eos=True) == wanted


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_a_shorter_program(
    family: str, warm: Callable[..., mtpc.SpecModel], oracle: Callable[..., Oracle]
) -> None:
    """Two requests up to its end; one more token is refused, as by a program built for it."""
    if family in FIXED:
        pytest.skip("its steps are for one max_len")
    spec = warm(family, max_len=SHORTER, num_pages=None)
    prompts = [prompt_of(PAGE + 1), prompt_of(SHORTER - 5)]
    wanted = [oracle(family).generate(p, 5, stop=False) for p in prompts]
    assert spec.generate(prompts, 5, ignore_eos=True) == wanted
    with pytest.raises(mtpc.errors.RequestError, match=f"max_len is {SHORTER}"):
        spec.generate(prompts[1], 6)


@pytest.mark.parametrize(
    "family", ["mimo", *(pytest.param(f, marks=pytest.mark.slow) for f in CPU_FAMILY_NAMES[1:])]
)
def test_a_larger_bucket_builds_its_own_step_alone(
    family: str,
    checkpoint: Callable[..., Path],
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    oracle: Callable[..., Oracle],
) -> None:
    """And the steps that were there run on the state of more requests, with other pages."""
    cpu_built(family)
    built = set[str]()

    def listen(progress: Progress) -> None:
        if progress.stage == "lower":
            built.add(str(progress.key))

    options = {**CPU_OPTIONS, "batch_buckets": (2, 3), "prefill_rows": 2, "num_pages": 71}
    spec = mtpc.compile(checkpoint(family), listen, cache_dir=cpu_cache, **options)
    assert built == {str(StepKey.decode(3, 3))}
    assert {DECODE, PREFILL, StepKey.decode(3, 3)} == steps_of(spec)
    # Six requests, so that the last ones run in request slots that others left.
    assert spec.generate(BATCH, 16) == [oracle(family).generate(p, 16) for p in BATCH]
    assert spec.stats.replays[DECODE]
    assert spec.stats.replays[StepKey.decode(3, 3)]


def test_a_program_of_one_block_has_steps_of_its_own(warm: Callable[..., mtpc.SpecModel]) -> None:
    """Open sizes are 2 or more: torch decides what holds for no size of 1."""
    with pytest.raises(CacheError, match=r"page_size: 4 -> 64"):
        warm("mimo", max_len=8, page_size=64, num_pages=None)


def test_a_longer_program_than_the_model_is_refused(warm: Callable[..., mtpc.SpecModel]) -> None:
    with pytest.raises(OptionError, match="made for at most 512 positions"):
        warm("mimo", max_len=513, num_pages=None)


@pytest.fixture
def decode_step(cpu_built: Callable[..., CpuBuilt]) -> CachedStep:
    return cpu_built("mimo").compiler.obtain(DECODE)


def opened_for(step: CachedStep, built: CpuBuilt, **changes: Any) -> None:
    """Open a step over the tensors of its program, with other claims."""
    buffers, weights = built.spec.program.steps[DECODE].buffers, built.compiler.weights
    package = replace(step.record.package, **changes.pop("package", {}))
    TapeArtifact(package, step.read(TAPE)).open(
        lambda name: buffers[name] if name in buffers else weights[name],
        {**step.sizes, **changes},
    )


def test_what_is_bound_is_compared(
    decode_step: CachedStep, cpu_built: Callable[..., CpuBuilt]
) -> None:
    """A tensor of other sizes than those said, or sizes that the package is not right for."""
    built = cpu_built("mimo")
    opened_for(decode_step, built)
    with pytest.raises(BackendError, match=r"state.block_table is int32\[3,18\].*int32\[3,19\]"):
        opened_for(decode_step, built, M=19)
    with pytest.raises(BackendError, match=r"M is 18, and it was compiled for 17 alone"):
        opened_for(decode_step, built, package={"fixed": {"M": 17}})
    with pytest.raises(BackendError, match=r"M is 18, and it was compiled for 19 or more"):
        opened_for(decode_step, built, package={"least": {"M": 19}})
