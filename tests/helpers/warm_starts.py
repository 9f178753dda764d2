"""Warm starts from the session's graph cache, and copies of checkpoints to be changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU_OPTIONS, CpuBuilt
from safetensors.torch import load_file, save_file
from test_theorem import PROMPTS

import mtpc
from mtpc.layout import StepKey

DECODE, PREFILL = StepKey.decode(2, 3), StepKey.prefill(2, 4, 3)
BATCH = PROMPTS[2:8]


@pytest.fixture
def warm(
    checkpoint: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt]
) -> Callable[..., mtpc.SpecModel]:
    """warm(family, directory): restored from what `cpu_built` left; building is an error."""

    def get(family: str, directory: Path | None = None, **changes: Any) -> mtpc.SpecModel:
        cpu_built(family)
        options = {**CPU_OPTIONS, "cache_dir": cpu_cache, "frozen": True, **changes}
        return mtpc.compile(directory or checkpoint(family), **options)

    return get


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """copied(family): its checkpoint in another place, to be changed."""

    def get(family: str) -> Path:
        return Path(shutil.copytree(checkpoint(family), tmp_path / f"copy-of-{family}"))

    return get


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite a checkpoint's tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
