"""Draft tokens equal an independent, uncached, eager oracle after every single step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import FAMILY_NAMES
from oracles import DraftOracle, QwenDraftOracle, TransformersDraftOracle
from test_theorem import PROMPTS, poison


def check_drafts(spec: Any, oracle: DraftOracle, prompts: list[list[int]], new: int) -> int:
    """Compare the drafts in the state buffers with the oracle's; returns comparisons made."""
    poison(spec)
    compared = 0
    texts = {spec.engine.add(prompt, new): list(prompt) for prompt in prompts}
    while spec.engine.has_work:
        for output in spec.engine.step():
            texts[output.request_id] += output.token_ids
        for request in spec.engine.running:
            if not request.is_prefilled:
                continue
            found = spec.program.shared["state.token_ids"][request.slot].tolist()
            text = texts[request.request_id]
            assert found[0] == text[-1]
            assert found[1:] == oracle.drafts(text, spec.options.spec_tokens)
            compared += 1
    return compared


@pytest.mark.parametrize("kind", ["trained", "random"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_drafts_equal_the_wiring(
    family: str, kind: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """All families against the wiring written out plainly, K = 3, two requests in a bucket of 4."""
    spec = compiled(family, 3, kind, batch_buckets=(4,))
    prompts = [PROMPTS[3], PROMPTS[9]]
    assert check_drafts(spec, DraftOracle(oracle(family, kind)), prompts, 12) >= 6


@pytest.mark.parametrize("kind", ["trained", "random"])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_drafts_equal_transformers_mtp(
    family: str, kind: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Where transformers can build the MTP layer, its own MtpModel is the oracle."""
    spec = compiled(family, 3, kind, batch_buckets=(4,))
    prompts = [PROMPTS[5], PROMPTS[10]]
    assert check_drafts(spec, TransformersDraftOracle(oracle(family, kind)), prompts, 10) >= 6


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_drafts_equal_the_released_names(
    kind: str, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """qwen3_next: from the stored tensors, with nothing of mtpc's; transformers has no such MTP."""
    spec = compiled("qwen3_next", 3, kind, batch_buckets=(4,))
    prompts = [PROMPTS[5], PROMPTS[10]]
    assert check_drafts(spec, QwenDraftOracle(oracle("qwen3_next", kind)), prompts, 10) >= 6
