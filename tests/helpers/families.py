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
"""Families whose parts are those of the ones above: the default run has their text and their drafts
at K = 3, the slow run what it has of the others."""
DRAFTED = ("llama", "qwen3", "qwen2")
"""Families whose drafter is an EAGLE-3 head in a checkpoint of its own; the default run has the
first at K = 3."""
ASSISTED = ("gemma4", "gemma4_unified", "gemma4@experts")
"""Families whose drafter is an assistant, which reads the target's keys and values; the default run
has the first at K = 3."""
EVERY_FAMILY = (*FAMILY_NAMES, *NEAR_FAMILIES, "step3p5", "qwen3_5", "qwen3_5_moe", "glm4v_moe")
CPU_FAMILY_NAMES = FAMILY_NAMES[:4]
"""What the default run compiles for the cpu: paged, with experts, latent, recurrent."""
EACH_FAMILY = [
    *CPU_FAMILY_NAMES,
    *(pytest.param(n, marks=pytest.mark.slow) for n in (*FAMILY_NAMES[4:], *NEAR_FAMILIES)),
]
"""For what is not the theorem: the default run takes those, the slow run all."""
EACH_FAMILY_OF_FEW = [
    FAMILY_NAMES[0],
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_NAMES[1:]),
]
"""For one pass, or one way of running, each family of which takes ten seconds and more."""
TINY = {"max_len": 64, "page_size": 4, "prefill_chunk": 8}
"""Small pages and chunks, so that short sequences cross their edges."""
FEWER_BUCKETS: dict[str, dict[str, Any]] = {
    family: {"batch_buckets": (1, 4)} for family in FAMILY_NAMES
}
"""What `compiled` has where a test asks for no others: a bucket costs one to five seconds."""
FEWER_BUCKETS |= {
    family: {"batch_buckets": (4,)} for family in (*NEAR_FAMILIES, *DRAFTED, *ASSISTED)
}
NUM_PAGES = 89
"""A prime that is no other size of these models: found in generated code, it is the pool's."""
CPU_OPTIONS: dict[str, Any] = {
    **TINY,
    **dict(spec_tokens=3, batch_buckets=(2,), num_pages=NUM_PAGES, backend="cpu", dtype="float64"),
}
"""What is compiled for the cpu, once for the whole session."""
