"""Copies: drafts are the rule's after every step, and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.copies import BesideOracle, CopyOracle, copied, repeating
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.records import NEW, STOP, Records, wanted
from helpers.reuse import Conversations, check_reuse
from helpers.sampling_oracle import FILTERS
from helpers.theorem import PROMPTS, check_drafts, check_theorem, poison

import mtpc
from mtpc.engine.tiers import TierPolicy
from mtpc.errors import CheckpointError, GraphError, OptionError

ASKED: dict[str, Any] = {
    "draft": "copy", "backend": "cpu", "sampling": True, "batch_buckets": (1, 4),
}  # fmt: skip
"""What users run, with small pages and few buckets."""
ONE_BUCKET: dict[str, Any] = {**TINY, "batch_buckets": (1,)}
EARLIER = [2, 10, 3, 25, 31, 2, 11, 3, 30, 4, 2, 12, 3, 40]
"""How the grammar's records begin."""
REPEATING = [repeating(length, seed) for seed, length in enumerate((1, 4, 9, 17, 23, 31))]


LEAST = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.parametrize("spec_tokens", [LEAST, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_drafts_equal_the_rule(spec_tokens: int, compiled: Callable[..., Any]) -> None:
    """Row by row after each step: six requests in batches of one and four, prompts in chunks."""
    spec, rule = compiled("mimo", spec_tokens, **ASKED), CopyOracle()
    assert check_drafts(spec, rule, REPEATING, 24) > 60
    assert rule.found > 15


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        ("mimo", 3),
        *(pytest.param("mimo", k, marks=pytest.mark.slow) for k in (1, 7)),
        pytest.param("qwen3_next", 3, marks=pytest.mark.slow),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Random requests from poisoned memory, of pages alone and of recurrent state."""
    spec = compiled(family, spec_tokens, **ASKED)
    check_theorem(spec, oracle(family), max_examples=10)
    plain = [oracle(family).generate(prompt, 24, stop=False) for prompt in REPEATING]
    assert spec.generate(REPEATING, 24, ignore_eos=True) == plain
    assert 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)


@pytest.mark.parametrize("family", ["mimo", "qwen3_next"])
def test_reuse_changes_no_text_and_no_draft(family: str, compiled: Callable[..., Any]) -> None:
    """Turns, forks, evictions, preemption and aborts: the whole text of a request is there."""
    check_reuse(Conversations(compiled(family, 3, **ASKED)), 4)


def test_a_resumed_request_has_its_whole_text(compiled: Callable[..., Any]) -> None:
    """Preempted as it decodes: pages with its output are reused, and its row is overwritten."""
    spec, drafts, prompt = compiled("mimo", 3, **ASKED), CopyOracle(), REPEATING[3]
    poison(spec)
    reused, text, rows = spec.stats.reused_tokens, list(prompt), spec.program.shared
    spec.engine.add(prompt, 30)
    while len(text) < len(prompt) + 14:
        text += [token for output in spec.engine.step() for token in output.token_ids]
    (request,) = spec.engine.running
    spec.engine.scheduler._preempt(request)
    rows["state.text_ids"].fill_(2**30)
    while spec.engine.has_work:
        text += [token for output in spec.engine.step() for token in output.token_ids]
        for request in spec.engine.running:
            if request.is_prefilled:
                found = rows["state.token_ids"][request.slot].tolist()
                assert rows["state.text_ids"][request.slot, : len(text)].tolist() == text
                assert found == [text[-1], *drafts.drafts(text, 3)]
    assert spec.stats.reused_tokens - reused > len(prompt)


def test_sampled_text_is_the_same(
    compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """Every parameter, penalties over accepted copies among them."""
    spec, plain = compiled("mimo", 3, **ASKED), sampling_oracle("mimo")
    poison(spec)
    prompts = [REPEATING[2 + i % 4] for i in range(len(FILTERS))]
    found = spec.generate(prompts, 14, sampling=list(FILTERS.values()))
    pairs = zip(prompts, FILTERS.values(), strict=True)
    assert found == [plain.generate(prompt, 14, params) for prompt, params in pairs]


def test_text_under_a_grammar(
    compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    """The host replaces copies where the grammar leaves one token; such a text is copied, too."""
    spec, plain = compiled("mimo", 3, **ASKED), sampling_oracle("mimo")
    poison(spec)
    forced, drafts = spec.stats.forced_drafts, CopyOracle()
    params, rows = FILTERS["temperature"], spec.program.shared["state.token_ids"]
    prompts = [[*PROMPTS[i], *EARLIER] for i in range(3, 8)]
    ids = [spec.engine.add(prompt, NEW, (STOP,), params, grammar=Records()) for prompt in prompts]
    texts = dict(zip(ids, map(list, prompts), strict=True))
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in spec.engine.running:
            if request.is_prefilled:
                text = texts[request.request_id]
                assert rows[request.slot].tolist() == [text[-1], *drafts.drafts(text, 3)]
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert texts[request_id] == prompt + wanted(plain, prompt, params)
    assert spec.stats.forced_drafts > forced
    assert drafts.found > 0


class Priced(TierPolicy):
    """The policy, on a machine whose steps take 1 s, and a tenth more for each draft."""

    def observe(self, num_reqs: int, tier: int, seconds: float, context: int = 0) -> None:
        super().observe(num_reqs, tier, 1 + tier / 10, context)


def test_a_step_without_copies_verifies_none(
    compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """With several K: plain steps until a text repeats, and copies from them on at once."""
    spec = compiled("mimo", "auto", spec_tiers=(0, 3), **ASKED)
    spec.engine.runner.tiers = Priced(spec.options.tiers)
    poison(spec)
    prompt = PROMPTS[9]
    text, kinds = list(prompt), []
    spec.engine.add(prompt, 40)
    while spec.engine.has_work:
        before = spec.program.replays.copy()
        drafts = copied(text, 3)
        for output in spec.engine.step():
            text += output.token_ids
        (key,) = (spec.program.replays - before).keys()
        if key.phase == "decode":
            kinds.append((drafts is not None, key.spec_tokens))
    assert text == prompt + oracle("mimo").generate(prompt, 40, stop=False)
    assert {k for has_copies, k in kinds if not has_copies} == {0}
    assert {k for has_copies, k in kinds if has_copies} >= {3}


def test_a_draft_that_does_not_exist_has_no_row(compiled: Callable[..., Any]) -> None:
    """Each of four requests has a row for its last token, and one for each copied draft."""
    spec, prompts = compiled("mimo", 3, **ASKED), [*REPEATING[2:4], *PROMPTS[8:10]]
    poison(spec)
    texts = {spec.engine.add(prompt, 24, stop_ids=()): list(prompt) for prompt in prompts}
    seen = set()
    while spec.engine.has_work:
        expected = [
            1 + min(3 * (copied(texts[r.request_id], 3) is not None), r.remaining_tokens - 1)
            for r in spec.engine.running
            if r.is_prefilled
        ]
        before = spec.program.replays.copy()
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        (key,) = (spec.program.replays - before).keys()
        if key.phase == "decode":
            starts = spec.program.steps[key].buffers["batch.query_start_loc"]
            assert starts.diff().tolist()[: len(expected)] == expected
            seen |= set(expected)
    assert seen >= {1, 4}


def test_one_draft_in_bfloat16(checkpoint: Callable[..., Path], cpu_cache: Path) -> None:
    """K = 1, where several results of a step are one, has a certificate."""
    options = dict(dtype="bfloat16", cache_dir=cpu_cache, **{**ASKED, "batch_buckets": (2,)})
    directory, prompts = checkpoint("mimo", "plain"), REPEATING[3:5]
    spec = mtpc.compile(directory, spec_tokens=1, max_len=64, **options)
    plain = mtpc.compile(directory, spec_tokens=0, max_len=64, **{**options, "draft": None})
    texts = [model.generate(prompts, 16, ignore_eos=True) for model in (spec, plain)]
    assert texts[0] == texts[1]
    assert not spec.stats.fallbacks


BESIDE: dict[str, Any] = {**ASKED, "draft": "copy+own"}


@pytest.mark.parametrize("spec_tokens", [LEAST, 3])
def test_copies_beside_mtp_layers(
    spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Each request takes what its own counts say: copies of some lengths, else the layer's."""
    spec, plain = compiled("mimo", spec_tokens, **BESIDE), oracle("mimo")
    rule, rows = BesideOracle(DraftOracle(plain)), spec.program.shared["state.token_ids"]
    poison(spec)
    prompts = [p * 2 for p in PROMPTS[5:9]] + REPEATING[3:]
    texts = {spec.engine.add(prompt, 24): list(prompt) for prompt in prompts}
    new = dict.fromkeys(texts, 0)
    while spec.engine.has_work:
        ready = {r.request_id for r in spec.engine.running if r.is_prefilled}
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
            new[output.request_id] = len(output.token_ids)
        for request in spec.engine.running:
            if request.is_prefilled:
                name = request.request_id
                accepted = new[name] - 1 if name in ready else None
                wanted = rule.drafts(name, texts[name], spec_tokens, accepted)
                assert rows[request.slot].tolist() == [texts[name][-1], *wanted]
    pairs = zip(prompts, texts.values(), strict=True)
    assert all(text == p + plain.generate(p, 24, stop=False) for p, text in pairs)
    assert rule.taken[0] > 5
    assert sum(rule.taken.values()) - rule.taken[0] > 5


def test_reuse_beside_mtp_layers(compiled: Callable[..., Any]) -> None:
    """Turns, forks, preemption and aborts: a slot's counts are those of its request."""
    check_reuse(Conversations(compiled("mimo", 3, **BESIDE)), 2)


def test_copies_draft_alone_where_no_layer_does(compiled: Callable[..., Any]) -> None:
    """Beside MTP layers that the checkpoint lacks; `strict` refuses what is not as asked."""
    spec, rule = compiled("mimo", 3, "plain", **BESIDE), CopyOracle()
    assert spec.options.draft == "copy"
    assert [text for text in spec.stats.fallbacks if text.startswith("copies alone draft: ")]
    assert check_drafts(spec, rule, REPEATING, 24) > 60
    assert rule.found > 15
    with pytest.raises(CheckpointError, match="announces no MTP layers"):
        compiled("mimo", 3, "plain", **BESIDE, strict=True)


def test_sampled_text_beside_mtp_layers(
    compiled: Callable[..., Any], sampling_oracle: Callable[..., Any]
) -> None:
    spec, plain = compiled("mimo", 3, **BESIDE), sampling_oracle("mimo")
    poison(spec)
    prompts = [REPEATING[2 + i % 4] for i in range(len(FILTERS))]
    found = spec.generate(prompts, 14, sampling=list(FILTERS.values()))
    pairs = zip(prompts, FILTERS.values(), strict=True)
    assert found == [plain.generate(prompt, 14, params) for prompt, params in pairs]


def test_what_is_no_drafter_is_refused(checkpoint: Callable[..., Path]) -> None:
    """`copy` is a name, and any other text a directory; what copies cannot do is said."""
    with pytest.raises(CheckpointError, match="copyy"):
        mtpc.compile(checkpoint("mimo"), draft="copyy", **TINY)
    with pytest.raises(OptionError, match="images is True, and draft is set"):
        mtpc.CompileOptions(draft="copy", images=True)
    with pytest.raises(GraphError, match="expected form='fused', or no draft"):
        mtpc.compile_host(checkpoint("mimo"), draft="copy", backend="eager", **ONE_BUCKET)


def test_a_plain_model_copies(checkpoint: Callable[..., Path]) -> None:
    """A checkpoint without MTP layers, and a model object, draft without being told K."""
    directory = checkpoint("mimo", "plain")
    spec = mtpc.compile(directory, draft="copy", backend="eager", **ONE_BUCKET)
    assert spec.options.spec_tokens == 3
    plain = mtpc.compile(directory, spec_tokens=0, backend="eager", **ONE_BUCKET)
    prompt = REPEATING[4]
    assert spec.generate(prompt, 20, ignore_eos=True) == plain.generate(prompt, 20, ignore_eos=True)
    assert not spec.stats.fallbacks
    assert torch.is_tensor(spec.program.shared["state.text_ids"])
