"""Families and options of the models that tests compile."""

from __future__ import annotations

from typing import Any

import pytest

FAMILY_NAMES = (
    "mimo",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_next",
    "mimo_v2",
    "step3p7",
    "deepseek_v4",
    "deepseek_v32",
)
"""Qwen3.5 differs from qwen3_next by its projections and its loading: models/test_recurrent.py."""
NEAR_FAMILIES = (
    "glm4_moe_lite",
    "glm_moe_dsa",
    "ernie4_5_moe",
    "exaone_moe",
    "nemotron_h",
    "longcat_flash",
    "qwen4_exp",
)
"""Families whose parts the families above have, too. The default run checks text and drafts of some
at K = 3, the slow run everything."""
DRAFTED = ("llama", "qwen3", "qwen2")
"""Families whose drafter is an EAGLE-3 head in a checkpoint of its own; the default run has the
first at K = 3."""
ASSISTED = ("gemma4", "gemma4_unified", "gemma4@experts")
"""Families whose drafter is an assistant, which reads the target's keys and values; the default run
has the first at K = 3."""
EVERY_FAMILY = (*FAMILY_NAMES, *NEAR_FAMILIES, "step3p5", "qwen3_5", "qwen3_5_moe", "glm4v_moe")
CPU_FAMILY_NAMES = FAMILY_NAMES[:4]
"""Families of each kind: paged, experts, latent, recurrent."""
EACH_FAMILY = [
    pytest.param(n, marks=[pytest.mark.slow] * (n not in ("mimo", "qwen3_next")))
    for n in (*FAMILY_NAMES, *NEAR_FAMILIES)
]
"""For tests other than the theorem: the default run takes pages alone, and recurrent layers beside
attention and experts; the slow run all families."""
EACH_FAMILY_OF_FEW = [
    FAMILY_NAMES[0],
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_NAMES[1:]),
]
"""For tests of one pass or one way of running, which take ten seconds or more per family."""
TINY = {"max_len": 64, "page_size": 4, "prefill_chunk": 8, "sampling": False}
"""Small pages and chunks, so that short sequences have several of each; greedy steps."""
FEWER_BUCKETS: dict[str, dict[str, Any]] = {
    family: {"batch_buckets": (1, 4) if family in ("mimo", "qwen3_next") else (4,)}
    for family in (*FAMILY_NAMES, *NEAR_FAMILIES, *DRAFTED, *ASSISTED)
}
"""The default buckets of `compiled`: each takes one to five seconds."""
NUM_PAGES = 89
"""A prime that is no other size of these models: it identifies the pool in generated code."""
CPU_OPTIONS: dict[str, Any] = {
    **TINY,
    **dict(spec_tokens=3, batch_buckets=(2,), num_pages=NUM_PAGES, backend="cpu", dtype="float64"),
}
"""Models that are compiled for the cpu backend once per session."""
