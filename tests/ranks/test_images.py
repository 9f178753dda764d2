"""Prompts with images on two ranks: rank 0 embeds them, and each rank has its part of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.pictured import NEW, OPTIONS, prompts_of, serve
from helpers.ranks import Group
from helpers.vision import VisionOracle, make_vision_checkpoint

import mtpc
from mtpc.layout import PROMPT_EMBEDS

SLOW = pytest.mark.slow
FAMILIES = (
    "glm4v_moe",
    pytest.param("step3p7", marks=SLOW),
    pytest.param("qwen3_5", marks=SLOW),
    pytest.param("qwen3_5_moe", marks=SLOW),
)
"""Positions in three grids; several chained MTP layers, which keep rows of images by request slot;
recurrent state; experts."""


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """pictured(family): a checkpoint that takes images."""
    return cache(lambda family: make_vision_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=SLOW)])
@pytest.mark.parametrize("spec_tokens", [0, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_transformers(
    family: str,
    spec_tokens: int,
    backend: str,
    two: Group,
    pictured: Callable[[str], Path],
    cpu_cache: Path,
) -> None:
    """Together and again, when pages of the first time are reused; drafts are those of one rank."""
    directory, prompts = pictured(family), prompts_of(family)
    options = {**OPTIONS, "spec_tokens": spec_tokens, "backend": backend, "cache_dir": cpu_cache}
    oracle, spec = VisionOracle(directory), two.compile(directory, **options)
    alone = mtpc.compile(directory, **options) if spec_tokens else spec
    expected = [oracle.generate(*prompt, NEW) for prompt in prompts]
    for model in dict.fromkeys((alone, spec)):
        for _ in range(2):
            assert serve(model, prompts) == expected
    assert not spec.stats.fallbacks
    assert spec.stats.accepted == alone.stats.accepted
    assert not spec_tokens or 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted)
    first, *others = two.close()
    assert others == [first]


@SLOW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_arrive_bit_for_bit(
    dtype: torch.dtype, two: Group, pictured: Callable[[str], Path]
) -> None:
    """Of embeddings rank 0 sends the bytes, several writes in a message and in order."""
    few = {"spec_tokens": 0, "batch_buckets": (1,), "dtype": str(dtype)[6:]}
    spec = two.compile(pictured("glm4v_moe"), **{**OPTIONS, **few})
    rows, ids = (spec.program.shared[name] for name in (PROMPT_EMBEDS, "state.token_ids"))
    torch.manual_seed(0)
    some, more = (torch.randn(n, rows.shape[1]).to(dtype) for n in (3, 2))
    some[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    spec.program.write(rows, some)
    spec.program.write(ids[0], 7)
    spec.program.write(rows[3:], more)
    serve(spec, [([3, 4, 5], [])])
    assert spec.program.sent_bytes > rows[:5].nbytes
    first, *others = two.close()
    assert others == [first]
    sent = torch.cat([some, more]).view(torch.uint8).tolist()
    assert any(isinstance(part, list) and part[:5] == sent for part in first)
