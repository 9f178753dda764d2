"""Faults that bit public engines' speculative decoding, each as a case here.

docs/conformance.md lists these and the others, which have tests of their own. One program serves
all with drafts: MiMo, K = 3, a bucket of eight requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracles import DraftOracle, Oracle
from helpers.theorem import PROMPTS, poison
from torch import Tensor

import mtpc
from mtpc.layout import SCRATCH_SLOT, StepKey

K, BUCKET = 3, 8


@pytest.fixture
def spec(compiled: Callable[..., Any]) -> Any:
    made = compiled("mimo", K, batch_buckets=(BUCKET,), sampling=True, max_logprobs=2)
    poison(made)
    return made


def caches(spec: Any) -> dict[str, Tensor]:
    """Copies of all pools but page 0, which padding may write."""
    named = {n: t for n, t in spec.program.shared.items() if n.startswith("kv.")}
    assert named
    return {name: pool[1:].clone().view(torch.int64) for name, pool in named.items()}


def draft_rows(spec: Any, request: Any, count: int) -> Tensor:
    """The MTP layer's keys at a request's positions up to `count`."""
    last = max(int(name.split(".")[1]) for name in spec.program.shared if name.startswith("kv."))
    size = spec.options.page_size
    slots = [request.pages[i // size] * size + i % size for i in range(count)]
    return spec.program.shared[f"kv.{last}.k"].flatten(0, 1)[slots].flatten(1)


def test_a_step_of_no_request_writes_no_kv(spec: Any) -> None:
    """An empty batch, and a dummy one of finished requests, after requests have ended."""
    spec.generate(PROMPTS[3:6], 9, ignore_eos=True)
    before = caches(spec)
    step = spec.program.steps[StepKey.decode(BUCKET, K)]
    for slots in ([SCRATCH_SLOT] * BUCKET, [*range(1, 4), *[SCRATCH_SLOT] * (BUCKET - 3)]):
        spec.program.forget_batches()
        step.buffers["batch.state_indices"].copy_(torch.tensor(slots))
        for _ in range(2):
            step.replay()
    spec.program.forget_batches()
    for name, pool in caches(spec).items():
        assert torch.equal(pool, before[name]), name


def test_three_requests_in_a_bucket_of_eight(spec: Any, oracle: Callable[..., Oracle]) -> None:
    """Five padded rows over poisoned buffers harm no text, and the draft layer's KV of a request
    is as long as its text after each step: no row is missing, and drafts, which read all rows, see
    none that a rejection left."""
    texts = {spec.engine.add(prompt, 14): [*prompt] for prompt in PROMPTS[6:9]}
    compared, drafts = 0, DraftOracle(oracle("mimo"))
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in [r for r in spec.engine.running if r.is_prefilled]:
            # Row t is of token t + 1, so the last token's row is the next step's.
            text = texts[request.request_id]
            assert request.num_committed == len(text) - 1
            assert draft_rows(spec, request, len(text) - 1).isfinite().all()
            found = spec.program.shared["state.token_ids"][request.slot].tolist()
            assert found[: 1 + K] == [text[-1], *drafts.drafts(text, K)]
            compared += 1
    assert compared > 6
    used = {key.bucket.num_reqs for key in spec.stats.replays if key.phase == "decode"}
    assert used == {BUCKET}
    for text, prompt in zip(texts.values(), PROMPTS[6:9], strict=True):
        assert text == prompt + oracle("mimo").generate(prompt, 14, stop=False)


@torch.no_grad()
def test_every_draft_rejected_leaves_log_probabilities(
    spec: Any, oracle: Callable[..., Oracle]
) -> None:
    """Wrong drafts are planted before each step: one token a step, with its own log-probability."""
    plain, prompt = oracle("mimo"), PROMPTS[7]
    truth = plain.generate(prompt, 8, stop=False)
    spec.engine.add(prompt, 8, sampling=mtpc.SamplingParams(logprobs=2))
    ids, entries = list[int](), list[Any]()
    while spec.engine.has_work:
        for request in [r for r in spec.engine.running if r.is_prefilled]:
            wrong = [(token + 1) % 96 for token in truth[len(ids) : len(ids) + K]]
            row = spec.program.shared["state.token_ids"][request.slot]
            row[1 : 1 + len(wrong)] = torch.tensor(wrong, dtype=row.dtype)
            row[1 + len(wrong) :] = 0
        for output in spec.engine.step():
            assert len(output.token_ids) == 1
            ids += output.token_ids
            entries += output.logprobs or []
    assert ids == truth
    logits = plain.model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    expected = logits.double().log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).flatten()
    found = torch.tensor([entry.logprob for entry in entries], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("drafts", [K, 0])
def test_prefix_hits_at_each_edge_of_a_page(
    drafts: int, spec: Any, compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Beginnings that end before, at and after a page's last token, with MTP layers and without."""
    if not drafts:
        spec = compiled("mimo", 0)
        poison(spec)
    size, base = spec.options.page_size, PROMPTS[12]
    spec.generate(base, 4, ignore_eos=True)
    for shared in range(size - 1, 3 * size + 2):
        prompt = [*base[:shared], (base[shared] + 1) % 96]
        before = spec.stats.reused_tokens
        assert spec.generate(prompt, 5, ignore_eos=True) == oracle("mimo").generate(
            prompt, 5, stop=False
        )
        reused = spec.stats.reused_tokens - before
        # Draft i's row t needs token t + i + 1, so a page needs K tokens beyond it.
        assert reused == max(shared - drafts, 0) // size * size
