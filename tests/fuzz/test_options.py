"""Options drawn at random: the text is plain decoding's, or one error refuses them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.theorem import PROMPTS

import mtpc
from mtpc.config import CompileOptions
from mtpc.errors import MtpcError

MODELS = 6
"""Of each seed."""
FAMILIES = (
    *("mimo", "qwen3_next", "step3p7", "deepseek_v3", "deepseek_v4", "mimo_v2", "nemotron_h"),
    *("llama", "gemma4", "glm4_moe"),
)
SIZES: dict[str, Any] = {"max_len": 64, "page_size": 4, "prefill_chunk": 8, "backend": "cpu"}
CHANGES_TEXT: dict[str, tuple[float, tuple[Any, ...]]] = {
    "dtype": (1.0, ("bfloat16", "bfloat16", "float32")),
    "quantize": (0.3, ("int8", "int8-g128", "int4-g32", "fp8", "q8_0")),
    "kv_cache_dtype": (0.3, ("int8", "fp8")),
}
"""Option -> how often it is given, and what it is then. Plain decoding is given these, too."""
OPTIONS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "spec_tokens": (0.9, (1, 2, 3, 5, "auto")),
    "draft": (0.35, ("copy", "copy+own")),
    "draft_vocab": (0.25, (20, 40)),
    "row_budgets": (0.3, ((2,), (1, 2), (3,), (1, 2, 3))),
    "synthetic_acceptance_length": (0.2, (1.0,)),
    "sampling": (0.4, (False,)),
    "token_mask": (0.2, (False, True)),
    "max_logprobs": (0.2, (1, 5)),
    "batch_buckets": (0.5, ((1,), (2,), (4,), (8,), (1, 3))),
    "prefill_rows": (0.2, (1, 2)),
    "busy_prefill_chunk": (0.2, (4, 8)),
    "prefix_caching": (0.2, (False,)),
    "snapshot_distance": (0.2, (8,)),
    "async_scheduling": (0.3, (True,)),
    "build_in_background": (0.2, (True,)),
    "verify_passes": (0.2, (True,)),
    "disabled_passes": (
        0.3,
        tuple(
            (name,)
            for name in (
                *("fuse-elementwise", "skip-idle-rows", "fuse-linear-chains", "select-head-rows"),
                *("fuse-head-max", "hoist-shared", "pack-weights", "fuse-cache-write"),
                *("trim-draft-head", "copy-layers"),
            )
        ),
    ),
}
GREEDY: dict[str, Any] = {"ignore_eos": True}
SAMPLED = (
    {"temperature": 0.8, "top_p": 0.9, "seed": 7, **GREEDY},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3, "repetition_penalty": 1.2, **GREEDY},
)


def test_every_option_is_there() -> None:
    """One that is renamed would be refused, and nothing compared."""
    for name, (_, values) in (CHANGES_TEXT | OPTIONS).items():
        for value in values:
            CompileOptions.parse({name: value})


def drawn(
    chances: random.Random, table: dict[str, tuple[float, tuple[Any, ...]]]
) -> dict[str, Any]:
    """Some options of a table, with a value each."""
    return {
        name: chances.choice(values)
        for name, (often, values) in table.items()
        if chances.random() < often
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_text_is_plain_decodings(
    seed: int, checkpoint: Callable[..., Path], cpu_cache: Path, tmp_path: Path
) -> None:
    """Twice each, so that the second time finds prefixes and states that the first one left."""
    chances, done = random.Random(seed), Counter[str]()
    for _ in range(MODELS):
        directory = checkpoint(chances.choice(FAMILIES))
        common = {**SIZES, "cache_dir": cpu_cache, **drawn(chances, CHANGES_TEXT)}
        options = {**tiny.drafter(directory), **drawn(chances, OPTIONS)}
        if chances.random() < 0.2:
            options["kv_offload_dir"] = tmp_path / "pages"
        prompts = chances.sample(PROMPTS, 5)
        asked = [GREEDY, *SAMPLED] if options.get("sampling", True) else [GREEDY]
        shown = f"{directory.name} {common} {options}"
        try:
            model = mtpc.compile(directory, **common, **options)
        except MtpcError:
            done["refused"] += 1
            continue
        plain = mtpc.compile(directory, **common, spec_tokens=0, batch_buckets=(1,))
        with closing(model), closing(plain):
            for params in asked:
                alone = [plain.generate(prompt, 16, **params) for prompt in prompts]
                assert model.generate(prompts, 16, **params) == alone, shown
                assert model.generate(prompts, 16, **params) == alone, f"again: {shown}"
        done["equal"] += 1
    print(dict(done))
    assert done["equal"], "or the seed shows nothing"
