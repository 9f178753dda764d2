"""Several ranks of one model: the text and the drafts are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.ranks import Group, codes_of
from helpers.theorem import PROMPTS, check_drafts, check_theorem
from helpers.trained import make_trained_checkpoint
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.errors import OptionError, RankError, UnsupportedModelError
from mtpc.passes import held
from mtpc.program.follow import LeadingProgram
from mtpc.program.open_cache import open_cache
from mtpc.ranks.group import Ranks
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.write_quantised import quantise_checkpoint

SLOW: dict[str, Any] = {**TINY, "dtype": "float64", "batch_buckets": (1, 4)}
OPTIONS: dict[str, Any] = {**SLOW, "batch_buckets": (4,)}
FAMILIES = (
    *("mimo", "glm4_moe", "deepseek_v3", "qwen3_next", "step3p5", "glm4_moe_lite"),
    *("deepseek_v32", "glm_moe_dsa@shared", "longcat_flash", "nemotron_h", "ernie4_5_moe"),
    *("exaone_moe", "qwen4_exp", "mimo_v2@heads"),
)


def check_text_and_drafts(spec: mtpc.SpecModel, plain: Oracle, max_examples: int) -> None:
    """Batches that join and leave, over page edges, some stopped, on poisoned memory."""
    check_theorem(spec, plain, max_examples)
    if spec.options.spec_tokens:
        assert check_drafts(spec, DraftOracle(plain), [PROMPTS[4], PROMPTS[9]], 8) > 3


def passes_of(spec: mtpc.SpecModel, directory: Path) -> set[str]:
    """The passes that changed something in rank 0's steps, which the cache has."""
    place = Ranks(0, 2)
    cache = open_cache(Checkpoint(directory), spec.options, print, place)
    assert cache is not None
    steps = [cache.find(key) for key in spec.program.steps]
    return {done.name for step in steps if step for done in step.record.history if done.rewrites}


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param("mimo", 1, marks=pytest.mark.slow),
        *(pytest.param(n, 3, marks=pytest.mark.slow) for n in ("longcat_flash", "glm4_moe")),
    ],
)
def test_text_is_that_of_plain_decoding(
    family: str,
    spec_tokens: int,
    two: Group,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
) -> None:
    spec = two.compile(checkpoint(family), spec_tokens=spec_tokens, **OPTIONS)
    check_text_and_drafts(spec, oracle(family), 1)


def test_a_step_costs_one_short_message(two: Group, checkpoint: Callable[..., Path]) -> None:
    """Joins and pages are told; a step in which nothing changes is one message of one number."""
    spec = two.compile(checkpoint("mimo"), spec_tokens=1, **OPTIONS)
    program = spec.program
    assert isinstance(program, LeadingProgram)
    spec.engine.add(PROMPTS[4], 16)
    steps = []
    while spec.engine.has_work:
        before = program.sent_bytes, program.host_writes
        spec.engine.step()
        steps.append((program.sent_bytes - before[0], program.host_writes - before[1]))
    idle = [size for size, writes in steps if not writes]
    assert len(idle) > 2
    assert {*idle} == {min(size for size, _ in steps)} == {256}
    assert max(size for size, _ in steps) < 2048


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_of_all_families(
    family: str,
    spec_tokens: int,
    two: Group,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
) -> None:
    spec = two.compile(checkpoint(family), spec_tokens=spec_tokens, **SLOW)
    check_text_and_drafts(spec, oracle(family), 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_passes_that_are_off_by_default(
    family: str, two: Group, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """Drafts from int8 weights; the text is that of plain decoding all the same."""
    spec = two.compile(
        checkpoint(family), spec_tokens=3, enabled_passes=("quantise-draft",), **OPTIONS
    )
    check_theorem(spec, oracle(family), 1)
    (step, *_) = spec.program.steps.values()
    assert step.graph is not None
    assert {r.name: r.rewrites for r in step.graph.history}["quantise-draft"] > 0
    assert sum(spec.stats.accepted) > 0


@pytest.mark.slow
def test_each_head_has_its_own_sink(two: Group, tmp_path: Path) -> None:
    """With sinks far apart, so that text depends on them."""
    directory = make_trained_checkpoint("mimo_v2@heads", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sinks = [name for name in tensors if name.endswith("attention_sink_bias")]
    assert sinks
    tensors |= {name: torch.tensor([6.0, 4.0, -6.0, -4.0]) for name in sinks}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec = two.compile(directory, spec_tokens=1, **OPTIONS)
    check_theorem(spec, Oracle("mimo_v2@heads", directory), 1)


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_of_tapes(
    family: str,
    spec_tokens: int,
    two: Group,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    cpu_cache: Path,
) -> None:
    cpu: dict[str, Any] = {**OPTIONS, "backend": "cpu", "cache_dir": cpu_cache}
    spec = two.compile(checkpoint(family), spec_tokens=spec_tokens, **cpu)
    assert not spec.stats.fallbacks
    check_text_and_drafts(spec, oracle(family), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "is_stored"),
    [
        ("mimo", "int4-g32", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("mimo", "int4-g32", True), ("mimo", "int8", False), ("mimo", "fp8", True)),
                *(("glm4_moe", "int8", False), ("glm4_moe", "int4-g32", True)),
            )
        ),
    ],
)
def test_text_on_codes_depends_on_neither_drafts_nor_batch(
    family: str,
    scheme: str,
    is_stored: bool,
    two: Group,
    checkpoint: Callable[..., Path],
    cpu_cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor on chunks. With codes in weights and in pages, and a trimmed head; the second start
    compiles nothing."""
    directory = checkpoint("mimo")
    if family == "glm4_moe":  # Wide experts, of which each rank has enough for kernels.
        directory = make_trained_checkpoint(family, tmp_path / "wide", moe_intermediate_size=64)
    cpu: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "backend": "cpu", "cache_dir": cpu_cache}
    cpu |= {"kv_cache_dtype": "int8", "draft_vocab": 60}
    if is_stored:
        quantise_checkpoint(directory, tmp_path / "codes", scheme)
        directory = tmp_path / "codes"
    else:
        cpu["quantize"] = scheme
    texts = []
    for spec_tokens, chunk in ((0, 5), (3, 8)):
        options = {**cpu, "spec_tokens": spec_tokens, "prefill_chunk": chunk}
        spec = two.compile(directory, **options)
        assert {"shard", "pack-groups", "skip-idle-rows"} <= passes_of(spec, directory)
        texts.append(spec.generate(PROMPTS[2:8], 16, ignore_eos=True))
        texts.append([spec.generate(prompt, 16, ignore_eos=True) for prompt in PROMPTS[2:8]])
    assert sum(spec.stats.accepted) > 0
    assert not spec.stats.fallbacks
    spec = two.compile(directory, **options, frozen=True)
    texts.append(spec.generate(PROMPTS[2:8], 16, ignore_eos=True))
    assert all(text == texts[0] for text in texts)
    warned = sum("raised the perplexity" in message for message in caplog.messages)
    assert warned == (3 if cpu.get("quantize") == "int4-g32" else 0)  # Once a start.


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "exaone_moe"])
def test_bfloat16_text_depends_on_neither_drafts_nor_batch(
    family: str, two: Group, checkpoint: Callable[..., Path], cpu_cache: Path
) -> None:
    """With all passes of the cpu backend, which pack, fuse and leave out rows."""
    cpu: dict[str, Any] = {**SLOW, "dtype": "bfloat16", "backend": "cpu", "cache_dir": cpu_cache}
    texts = []
    for spec_tokens in (0, 1, 3):
        spec = two.compile(checkpoint(family), spec_tokens=spec_tokens, **cpu)
        ran = passes_of(spec, checkpoint(family))
        assert {"shard", "pack-weights", "fuse-linear-chains", "skip-idle-rows"} <= ran
        texts.append(spec.generate(PROMPTS, 24, ignore_eos=True))
        texts.append([spec.generate(prompt, 24, ignore_eos=True) for prompt in PROMPTS])
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize(
    "family",
    [
        "mimo",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_next", "glm_moe_dsa@shared")),
    ],
)
def test_sampling_preemption_and_reuse(
    family: str, two: Group, checkpoint: Callable[..., Path]
) -> None:
    """Sampled texts are those of one rank, where requests wait for pages and share beginnings."""
    options = {**OPTIONS, "spec_tokens": 1, "sampling": True, "num_pages": 20}
    alone = mtpc.compile(checkpoint(family), backend="eager", **options)
    spec = two.compile(checkpoint(family), **options)
    prompts = [PROMPTS[9] + [7, 8, 9, token] for token in range(3, 9)]
    params = [
        mtpc.SamplingParams(temperature=0.9, top_p=0.9, seed=seed, repetition_penalty=1.2)
        if seed % 2
        else mtpc.SamplingParams()
        for seed in range(6)
    ]
    for _ in range(2):
        texts = [m.generate(prompts, 16, sampling=params, ignore_eos=True) for m in (alone, spec)]
        assert texts[0] == texts[1]
    assert spec.stats.preemptions > 0 < spec.stats.reused_tokens
    first, second = two.close()
    assert first == second


@pytest.mark.parametrize(
    ("family", "kind", "spec_tokens"),
    [
        ("mimo", "int8", 1),
        *(
            pytest.param(family, kind, k, marks=pytest.mark.slow)
            for family in ("mimo", "glm4_moe", "mimo_v2@heads")
            for kind, k in (("int8", 3), ("fp8", 1))
        ),
    ],
)
def test_each_rank_has_the_codes_of_its_heads(
    family: str, kind: str, spec_tokens: int, two: Group, checkpoint: Callable[..., Path]
) -> None:
    """Pages of codes and scales are those that one rank has; so are text and accepted drafts."""
    options = {**OPTIONS, "spec_tokens": spec_tokens, "kv_cache_dtype": kind, "num_pages": 40}
    alone = mtpc.compile(checkpoint(family), backend="eager", **options)
    spec = two.compile(checkpoint(family), **options)
    texts = [model.generate(PROMPTS[3:9], 16, ignore_eos=True) for model in (alone, spec)]
    assert texts[0] == texts[1]
    assert spec.stats.accepted == alone.stats.accepted
    assert sum(spec.stats.accepted) > 0
    every = codes_of(alone)
    assert len(every) >= 4
    for rank, kept in enumerate(two.close()):
        for whole, own in zip(every, kept[-len(every) :], strict=True):
            assert own == whole.chunk(2, 2)[rank].tolist()


LISTED = (1, 2, 3, 7, 40, 41, 42, 60, 61, 77, 90)
"""Seven in the first half of the vocabulary: the first rank has six, the other five."""


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        ("mimo", 1),
        *(pytest.param(n, 3, marks=pytest.mark.slow) for n in ("mimo", "glm4_moe", "step3p5")),
    ],
)
@pytest.mark.parametrize("sampling", [False, True])
def test_drafts_from_a_part_of_the_vocabulary(
    sampling: bool, family: str, spec_tokens: int, two: Group, checkpoint: Callable[..., Path]
) -> None:
    """Every text and every draft is that of one rank, from both ranks' rows of the head."""
    options = {**OPTIONS, "spec_tokens": spec_tokens, "draft_vocab": LISTED, "sampling": sampling}

    def run(spec: mtpc.SpecModel) -> tuple[list[list[int]], list[list[int]]]:
        texts: dict[int, list[int]] = {spec.engine.add(p, 16): [] for p in PROMPTS[:8]}
        drafts: list[list[int]] = []
        while spec.engine.has_work:
            for output in spec.engine.step():
                texts[output.request_id] += output.token_ids
            slots = [r.slot for r in spec.engine.running if r.output_ids]
            drafts += spec.program.shared["state.token_ids"][slots, 1:].tolist()
        return list(texts.values()), drafts

    alone = run(mtpc.compile(checkpoint(family), backend="eager", **options))
    assert run(two.compile(checkpoint(family), **options)) == alone
    found = {token for row in alone[1] for token in row}
    assert found <= set(LISTED)
    assert len(found & {*LISTED[:6]}) > 0 < len(found & {*LISTED[6:]})


@pytest.mark.parametrize("family", ["mimo", pytest.param("step3p5", marks=pytest.mark.slow)])
def test_ranks_cannot_part(
    family: str, two: Group, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle]
) -> None:
    """Where the other rank computes otherwise, both choose the same tokens all the same."""
    spec = two.compile(checkpoint(family), noise=0.9, spec_tokens=1, **OPTIONS)
    texts = spec.generate(PROMPTS[4:8], 12, ignore_eos=True)
    first, second = two.close()
    assert first == second
    plain = [oracle(family).generate(prompt, 12, stop=False) for prompt in PROMPTS[4:8]]
    assert texts != plain or family == "step3p5", "the head of step3p5 is not cut"


def test_what_is_wrong_is_said_on_every_rank(
    two: Group, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, other weights, a rank that fails, heads that do not divide, an operator
    without a rule."""
    options = {**OPTIONS, "spec_tokens": 1}
    with pytest.raises(RankError, match=r"rank 1 of 2 has model.* and rank 0 has .*on every rank"):
        two.compile(checkpoint("mimo"), checkpoint("glm4_moe"), **options)
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: CheckpointError: "):
        two.compile(checkpoint("mimo"), tmp_path / "none", **options)
    with pytest.raises(RankError, match=r"rank 1 of 2 has model.values .*on every rank"):
        two.compile(checkpoint("mimo"), checkpoint("mimo", "random"), **options)
    with pytest.raises(OptionError, match=r"1 key/value heads for 2 ranks: more ranks than heads"):
        two.compile(checkpoint("mimo_v2", "random"), **options)
    monkeypatch.delitem(held._BY_DIMS, "add")  # Of stack.
    with pytest.raises(UnsupportedModelError, match=r"aten.stack.default .* reads dimension 1"):
        two.compile(checkpoint("ernie4_5_moe", "random"), **options)


def test_what_several_ranks_cannot_have(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match=r"tensor_parallel_size is 3 with .*expected one of 3"):
        mtpc.compile(checkpoint("mimo"), tensor_parallel_size=3)
    refused: dict[str, Any] = {"backend": "null", "kv_offload_dir": "pages"}
    for name, value in refused.items():
        with pytest.raises(
            OptionError, match=rf"{name} is .* with tensor_parallel_size 2; .*leave"
        ):
            mtpc.CompileOptions(tensor_parallel_size=2, **{name: value})
    with pytest.raises(OptionError, match=r"belongs to mtpc\.compile"):
        mtpc.compile_host(checkpoint("mimo"), tensor_parallel_size=2)
