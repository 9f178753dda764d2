"""Block drafters: drafts are those of the authors' code, text is plain decoding, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import block_drafters, eagle, tiny
from helpers.families import TINY
from helpers.oracles import DraftOracle, Oracle
from helpers.released.dflash import DFlash
from helpers.reuse import Conversations, check_reuse
from helpers.sampling_oracle import FILTERS
from helpers.theorem import PROMPTS, check_drafts, check_theorem, poison
from helpers.trained import cyclic_text

import mtpc
from mtpc.errors import MtpcError

OPTIONS: dict[str, Any] = {**TINY, "backend": "eager", "dtype": "float64", "batch_buckets": (2,)}
ON_CPU: dict[str, Any] = {"backend": "cpu", "sampling": True, "batch_buckets": (1, 4)}
"""What users run, with small pages and few buckets."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def drafter(directory: Path, rename: dict[str, str] | None = None, **changes: Any) -> Path:
    """A random drafter in `directory`, with another config and other names of tensors."""
    config = {**block_drafters.CONFIG, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    inner = {**config, **config.get("transformer_layer_config", {})}
    tensors = block_drafters.new_dflash(inner, inner.get("target_hidden_size", 64))
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return eagle.save_head(tensors, config, directory)


def oracle_of(directory: Path, family: str = "llama") -> DraftOracle:
    """Drafts by the authors' code of the drafter in the directory `draft` of a target's."""
    plain = Oracle(family, directory)
    return DraftOracle(plain, DFlash(plain.model, directory))


@pytest.mark.parametrize(
    ("family", "spec_tokens", "changes"),
    [
        ("llama", 1, {}),
        ("qwen3", 3, {"num_hidden_layers": 3, "attention_bias": None}),
        # Windows end at a row's own position; full attention is both ways.
        ("llama", 7, SLIDING),
        # By the authors' entry, all layers are causal within the block.
        pytest.param(
            *("llama", 3),
            {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 0], "causal": True}},
            marks=pytest.mark.slow,
        ),
        # A block of all rows may be longer than the authors'.
        ("qwen2", 15, {"block_size": 8}),
    ],
)
def test_drafts_equal_the_authors_code(
    family: str, spec_tokens: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Row by row after each step; text is transformers'."""
    tiny.make_checkpoint(family, tmp_path, mtp=False, num_hidden_layers=4)
    draft = drafter(tmp_path / "draft", **changes)
    spec = mtpc.compile(tmp_path, draft=draft, spec_tokens=spec_tokens, **OPTIONS)
    oracle = oracle_of(tmp_path, family)
    assert check_drafts(spec, oracle, [PROMPTS[3], PROMPTS[9]], 10) >= 6
    prompts = [PROMPTS[5], PROMPTS[12]]
    wanted = [oracle.oracle.generate(prompt, 12, stop=False) for prompt in prompts]
    assert spec.generate(prompts, 12, ignore_eos=True) == wanted
