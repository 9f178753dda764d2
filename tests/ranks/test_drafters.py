"""Drafters in checkpoints of their own on several ranks: text and drafts are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import assistant, block_drafters, eagle
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.ranks import Group
from helpers.released.dflash import DFlash
from helpers.theorem import PROMPTS, check_drafts, check_theorem
from helpers.tiny import apart
from helpers.trained import make_trained_checkpoint

import mtpc
from mtpc.errors import OptionError

OPTIONS: dict[str, Any] = {**TINY, "dtype": "float64", "batch_buckets": (4,)}
TWO_GLOBAL = {"num_global_key_value_heads": 2}
HEAD = {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Of an EAGLE-3 head that two ranks can share."""
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, HEAD),
    "qwen3": ({}, HEAD),
    "gemma4": ({}, {}),
    **{
        name: (TWO_GLOBAL, assistant.with_text(name, **TWO_GLOBAL))
        for name in ("gemma4_unified", "gemma4@experts")
    },
}
"""Changes of the target's config and of its drafter's: heads that two ranks can share."""
EACH = [
    "gemma4",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "qwen3", "gemma4_unified")),
]


@pytest.fixture(scope="module")
def drafted(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """drafted(name): a trained target of `TARGETS`, with its drafter in the directory "draft"."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            changes, drafter = TARGETS[name]
            directory = tmp_path_factory.mktemp("drafted")
            made[name] = (
                make_trained_checkpoint(name, directory, drafter=drafter, **changes)
                if changes or drafter
                else checkpoint(name)
            )
        return made[name]

    return get


def check_both(
    two: Group, plain: Oracle, directory: Path, max_examples: int, **options: Any
) -> None:
    """Text is plain decoding's, and every draft and every accepted one is that of one rank."""
    options = {**OPTIONS, "backend": "eager", "draft": directory / "draft", **options}
    alone, spec = mtpc.compile(directory, **options), two.compile(directory, **options)
    assert not spec.stats.fallbacks
    wanted = [plain.generate(prompt, 16, stop=False) for prompt in PROMPTS[3:9]]
    for model in (alone, spec):
        assert model.generate(PROMPTS[3:9], 16, ignore_eos=True) == wanted
    assert spec.stats.accepted == alone.stats.accepted
    if options["spec_tokens"]:
        assert 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)
        assert check_drafts(spec, DraftOracle(plain), [PROMPTS[4], PROMPTS[9]], 8) > 3
    check_theorem(spec, plain, max_examples)


@pytest.mark.parametrize("name", EACH)
def test_text_and_drafts_are_those_of_one_rank(
    name: str, two: Group, drafted: Callable[[str], Path]
) -> None:
    """The slow run takes every K."""
    check_both(two, Oracle(name, drafted(name)), drafted(name), 1, spec_tokens=1)


def test_a_block_drafter_is_shared(
    two: Group, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Each rank has some heads of each layer's cache, and rows of a block see each other."""
    directory = block_drafters.beside(checkpoint("llama"), tmp_path)
    plain = Oracle("llama", directory)
    spec = two.compile(
        directory, **OPTIONS, backend="eager", draft=directory / "draft", spec_tokens=2
    )
    assert not spec.stats.fallbacks
    oracle = DraftOracle(plain, DFlash(plain.model, directory))
    assert check_drafts(spec, oracle, [PROMPTS[4], PROMPTS[9]], 8) > 3
    wanted = [plain.generate(prompt, 16, stop=False) for prompt in PROMPTS[3:9]]
    assert spec.generate(PROMPTS[3:9], 16, ignore_eos=True) == wanted
    assert 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("spec_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_the_same_of_every_k_and_of_tapes(
    name: str,
    spec_tokens: int,
    backend: str,
    two: Group,
    drafted: Callable[[str], Path],
    cpu_cache: Path,
) -> None:
    cached = {"cache_dir": cpu_cache} if backend == "cpu" else {}
    given = {"backend": backend, "spec_tokens": spec_tokens, **cached}
    check_both(two, Oracle(name, drafted(name)), drafted(name), 3, **given)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("spec_tokens", [1, 2, 3])
@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_mtp_layers_of_their_own_checkpoint(
    family: str,
    spec_tokens: int,
    backend: str,
    two: Group,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    cpu_cache: Path,
    tmp_path: Path,
) -> None:
    """Layers of the target's family are cut by the target's rules."""
    target, draft = apart(checkpoint(family), tmp_path)
    cached = {"cache_dir": cpu_cache} if backend == "cpu" else {}
    given = {"backend": backend, "spec_tokens": spec_tokens, "draft": draft, **cached}
    check_both(two, oracle(family), target, 1, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_sampled_texts_are_those_of_one_rank(
    name: str, two: Group, drafted: Callable[[str], Path]
) -> None:
    """Drafts are sampled, too, also from a head that has rows for some tokens only."""
    directory = drafted(name)
    options = {**OPTIONS, "draft": directory / "draft", "spec_tokens": 2, "sampling": True}
    alone = mtpc.compile(directory, backend="eager", **options)
    spec = two.compile(directory, **options)
    params = [mtpc.SamplingParams(temperature=0.6, top_p=0.9, seed=seed) for seed in range(6)]
    texts = [m.generate(PROMPTS[2:8], 16, sampling=params) for m in (alone, spec)]
    assert texts[0] == texts[1]
    assert sum(spec.stats.accepted) > 0
    assert spec.stats.accepted == alone.stats.accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma4"])
@pytest.mark.parametrize("quantize", [None, "int4-g32"])
def test_text_depends_on_neither_drafts_nor_batch(
    name: str,
    quantize: str | None,
    two: Group,
    drafted: Callable[[str], Path],
    cpu_cache: Path,
) -> None:
    """In bfloat16, with all passes of the cpu backend; the second start compiles nothing."""
    directory = drafted(name)
    options: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "backend": "cpu"}
    options |= {"quantize": quantize, "cache_dir": cpu_cache, "draft": directory / "draft"}
    texts = []
    for spec_tokens, frozen in ((0, False), (3, False), (3, True)):
        spec = two.compile(directory, **options, spec_tokens=spec_tokens, frozen=frozen)
        texts.append(spec.generate(PROMPTS[2:8], 16, ignore_eos=True))
        texts.append([spec.generate(prompt, 16, ignore_eos=True) for prompt in PROMPTS[2:8]])
    assert all(text == texts[0] for text in texts)
    assert sum(spec.stats.accepted) > 0


def test_a_head_with_fewer_heads_than_ranks(
    two: Group, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    draft = eagle.save_head(eagle.new_head(eagle.CONFIG, 64), eagle.CONFIG, tmp_path)
    with pytest.raises(OptionError, match=r"the drafter has 1 key/value heads for 2 ranks"):
        two.compile(checkpoint("llama", "random"), draft=draft, spec_tokens=1, **OPTIONS)
