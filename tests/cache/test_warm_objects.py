"""A warm start of a transformers model object: packed weights are made from it, not found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from helpers.theorem import PROMPTS

import mtpc


def test_packed_weights_are_filled(checkpoint: Callable[..., Path], cpu_cache: Path) -> None:
    """No pass derives them where every step is cached: the binder does, and must not leave memory
    without contents. What memory holds by chance is made loud, and the text is a cold start's."""
    target = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("mimo"), dtype=torch.bfloat16
    )

    def generate() -> list[list[int]]:
        spec = mtpc.compile(
            target,
            spec_tokens=0,
            sampling=False,
            batch_buckets=(2,),
            max_len=64,
            prefill_chunk=8,
            backend="cpu",
            cache_dir=cpu_cache,
        )
        return spec.generate(PROMPTS[5:7], 12, ignore_eos=True)

    cold = generate()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        warm = generate()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    assert warm == cold
