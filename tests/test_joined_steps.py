"""Requests that decode in the prefill steps of others: text, drafts, acceptance, and no waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import EACH_FAMILY
from test_engine import PROMPTS, Session
from test_sampling import FILTERS
from test_theorem import poison

import mtpc

WIDE: dict[str, Any] = {"prefill_chunk": 24, "busy_prefill_chunk": 5, "batch_buckets": (3,)}
"""Room for chunks of five tokens beside two requests that decode, whatever K is up to 4."""
NEW = 16
FIRST, *LATER = PROMPTS[5], PROMPTS[-1], PROMPTS[-4]


def run(spec: mtpc.SpecModel, **params: Any) -> tuple[list[list[int]], list[int]]:
    """One request, and two more when it decodes; their texts, and what the first got of each step
    in which there was a prompt."""
    texts: dict[int, list[int]] = {spec.engine.add(FIRST, NEW, **params): []}
    beside = []
    while spec.engine.has_work:
        before = spec.stats.joined.steps
        outputs = {output.request_id: output.token_ids for output in spec.engine.step()}
        for request_id, tokens in outputs.items():
            texts[request_id] += tokens
        if spec.stats.joined.steps > before and min(texts) in outputs:
            beside.append(len(outputs[min(texts)]))
        if len(texts) == 1:
            texts |= {spec.engine.add(prompt, NEW, **params): [] for prompt in LATER}
    return list(texts.values()), beside


@pytest.mark.parametrize("spec_tokens", [0, 1, 3])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_text_and_acceptance(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Plain decoding's tokens, from wild memory; as many at a time as elsewhere."""
    spec, plain = compiled(family, spec_tokens, **WIDE), oracle(family)
    poison(spec)
    texts, beside = run(spec)
    assert texts == [plain.generate(prompt, NEW, False) for prompt in (FIRST, *LATER)]
    assert beside, "some steps were of both kinds"
    assert spec_tokens == 0 or max(beside) > 1, "drafts were accepted in them"


@pytest.mark.parametrize(("family", "spec_tokens"), [("mimo", 2), ("glm4_moe", 3)])
def test_drafts(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Those that a joined step makes are an uncached chain's, of prompts and of who decodes."""
    session = Session(compiled(family, spec_tokens, **WIDE), oracle(family))
    engine = session.spec.engine
    engine.add(FIRST, NEW)
    while engine.has_work:
        before = session.spec.stats.joined.steps
        engine.step()
        if session.spec.stats.joined.steps > before:
            session.check_drafts()
        if len(engine.running) == 1 and not engine.running[0].output_ids[1:]:
            engine.add(LATER[0], NEW)
    assert session.seen["drafts compared"] > 2


def test_who_decodes_never_waits(compiled: Callable[..., Any]) -> None:
    """An output of each step, and a chunk in each; where the step has one row, of each other."""
    for rows, most in ((3, 1), (1, 2)):
        spec = compiled("mimo", 2, **{**WIDE, "prefill_rows": rows})
        engine, first = spec.engine, spec.engine.add(FIRST, 40)
        while not engine.step():
            pass
        second, chunks, got = engine.add(LATER[0], 2), spec.stats.prefill_steps, list[set[int]]()
        while not any(second in each for each in got):
            got.append({output.request_id for output in engine.step()})
        assert all(first in set.union(*got[i : i + most]) for i in range(len(got) - most + 1))
        assert len(got) <= most * (spec.stats.prefill_steps - chunks)
        assert spec.stats.prefill_steps - chunks > 3
        engine.abort(first)
        engine.abort(second)


def test_sampled_texts_are_those_of_requests_alone(compiled: Callable[..., Any]) -> None:
    """Filters and penalties are of a request's own rows, wherever they stand."""
    spec = compiled("mimo", 2, sampling=True, **WIDE)
    for params in FILTERS.values():
        found, beside = run(spec, sampling=params, stop_ids=spec.served.stop_ids)
        alone = [spec.generate([prompt], NEW, sampling=params)[0] for prompt in (FIRST, *LATER)]
        assert found == alone
        assert beside
