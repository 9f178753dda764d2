"""Warm starts from the session's graph cache, and changes to copies of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.families import CPU_OPTIONS
from helpers.theorem import PROMPTS
from mtpc.layout import StepKey
from mtpc.program.step_cache import CachedStep

DECODE, PREFILL = StepKey.decode(2, 3), StepKey.prefill(2, 4, 3)
BATCH = PROMPTS[2:8]


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite a checkpoint's tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def damage(cache: Path, step: CachedStep, file: str) -> None:
    """Flip one bit in the middle of a file of a step's entry."""
    assert step.entry is not None
    path = cache / "entries" / step.entry.digest / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def option_words(**changes: object) -> list[str]:
    """CPU_OPTIONS as arguments of commands that build what `mtpc.compile` builds."""
    words = ["--no-sampling"]
    for name, value in {**CPU_OPTIONS, **changes}.items():
        if name == "sampling":
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return words
