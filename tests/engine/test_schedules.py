"""The engine against plain decoding: random arrival, aborts, pool pressure, shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.schedules import BASE, LATER_FAMILIES, PRESSED, Session, run_schedules
from helpers.theorem import poison

import mtpc


@pytest.mark.parametrize(
    ("family", "spec_tokens", "count"),
    [
        ("mimo", 2, 50),
        ("mimo", 0, 15),
        pytest.param("glm4_moe", 3, 10, marks=pytest.mark.slow),
        *LATER_FAMILIES,
    ],
)
def test_schedules(
    family: str,
    spec_tokens: int,
    count: int,
    compiled: Callable[..., Any],
    oracle: Callable[..., Any],
) -> None:
    """100 schedules: text and drafts survive aborts, preemption and reuse; nothing leaks.

    The slow ones: chained layers over rings, recurrent state, compressed entries. (Schedules of
    these families at K = 3 are in the fast part of `test_reuse_changes_no_text_and_no_draft`.)
    """
    run_schedules(Session(compiled(family, spec_tokens, **PRESSED), oracle(family)), count)


def caches_of(spec: mtpc.SpecModel, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Decode a few tokens; all layers' rows of the committed tokens, in order of position."""
    engine = spec.engine
    request_id = engine.add(prompt, 3)
    while not any(r.is_prefilled for r in engine.running):
        engine.step()
    (request,) = engine.running
    slots = [
        request.pages[i // engine.options.page_size] * engine.options.page_size
        + i % engine.options.page_size
        for i in range(request.num_committed)
    ]
    pools = {n: t for n, t in spec.program.shared.items() if n.startswith("kv.")}
    rows = {name: pool.flatten(0, 1)[slots].clone() for name, pool in pools.items()}
    engine.abort(request_id)
    return rows


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [("mimo", 2), ("mimo", 0), pytest.param("glm4_moe", 3, marks=pytest.mark.slow)],
)
def test_reused_pages_hold_what_would_be_computed(
    family: str, spec_tokens: int, compiled: Callable[..., Any]
) -> None:
    """Every layer's rows, the draft layer's too, whatever followed them where they were made."""
    spec = compiled(family, spec_tokens, **PRESSED)
    target = BASE[:20]
    wanted = None
    for earlier in ([*target[:8], 7, 9, 11], [*target[:9], 50, 51], target[:16], target):
        poison(spec)
        fresh = caches_of(spec, target)
        wanted = wanted or fresh
        poison(spec)
        before = spec.stats.reused_tokens
        spec.generate(earlier, 6, ignore_eos=True)
        found = caches_of(spec, target)
        assert spec.stats.reused_tokens > before
        for name, rows in wanted.items():
            torch.testing.assert_close(found[name], rows, rtol=0, atol=1e-9, msg=name)
            torch.testing.assert_close(fresh[name], rows, rtol=0, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", range(5))
@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
def test_many_schedules(
    family: str, spec_tokens: int, compiled: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """2,000 schedules over every K."""
    run_schedules(Session(compiled(family, spec_tokens, **PRESSED), oracle(family)), 200)
