"""What a token costs in cache, in every family: the architecture's own minimum, in closed form.

State that does not grow with the text has tests of its own: rings (test_chained_families.py),
recurrence (test_recurrent.py), DeepSeek-V4's windows and entries (test_deepseek_v4.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny
from helpers.families import ASSISTED, DRAFTED

from mtpc.layout import Layout
from mtpc.layout.buffers import N, P
from mtpc.models import FAMILIES
from mtpc.models.load import load

HEADS_AND_WIDTHS = {
    "mimo": 3 * 2 * (16 + 16),
    "glm4_moe": 3 * 2 * (16 + 16),
    "deepseek_v3": 3 * (32 + 8),
    "glm4_moe_lite": 3 * (32 + 8),
    "longcat_flash": (2 * 2 + 1) * (32 + 8),
    "glm4v_moe": 3 * 2 * (16 + 16),
    "ernie4_5_moe": 3 * 2 * (16 + 16),
    "nemotron_h": 2 * 2 * (16 + 16),
    "exaone_moe": 1 * 2 * (16 + 16),
    "glm_moe_dsa": 3 * (32 + 8) + 2 * 12,
    "deepseek_v32": 3 * (32 + 8 + 12),
    "deepseek_v4": 0,
    "qwen3_next": 2 * 2 * (16 + 16),
    "qwen3_5": 2 * 2 * (16 + 16),
    "qwen3_5_moe": 2 * 2 * (16 + 16),
    "qwen4_exp": 2 * (2 * (16 + 16) + 16),
    "step3p5": 2 * 2 * (16 + 16),
    "step3p7": 2 * 2 * (16 + 16),
    "mimo_v2": 1 * 1 * (24 + 16),
    **dict(zip(ASSISTED[:2], (1 * 2 * (24 + 24), 2 * 1 * (24 + 24)), strict=True)),
    **dict.fromkeys(DRAFTED, 4 * 2 * (16 + 16) + 1 * (24 + 24)),
}
"""Values a token in all layers together, those of MTP included: layers that see the whole text
times key/value heads times key and value width; or latents. The others hold a fixed number."""


@pytest.mark.parametrize("family", HEADS_AND_WIDTHS)
def test_bytes_per_token(family: str, checkpoint: Callable[..., Path]) -> None:
    """Page pools of one page of one token: what `mtpc inspect` prints as cost of a token."""
    directory = checkpoint(family, "random")
    loaded = load(directory, "bfloat16", needs_mtp=True, **tiny.drafter(directory))
    paged = [s for s in loaded.state_specs if s.dims[:2] == (N, P)]
    layout = Layout(paged, {N: 1, P: 1})
    assert sum(layout.nbytes(name) for name in layout) == 2 * HEADS_AND_WIDTHS[family]


def test_every_family_is_here() -> None:
    """In the tests' table of sizes and in the tiny models' table."""
    assert {family.name for family in FAMILIES} | {*DRAFTED} == HEADS_AND_WIDTHS.keys()
    assert HEADS_AND_WIDTHS.keys() <= tiny.CONFIGS.keys()
