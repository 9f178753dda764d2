"""Session fixtures: checkpoints, oracles and compiled models are made once and shared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny
from oracles import Oracle

import mtpc

FAMILY_NAMES = ("mimo", "glm4_moe", "deepseek_v3")
TINY = {"max_len": 64, "page_size": 4, "prefill_chunk": 8}
"""Small pages and chunks, so that short sequences cross their edges."""


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """Tiny graphs run faster on one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """checkpoint(family, kind): kind is "random", "trained", "plain" (no MTP) or "full"."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, kind: str = "trained") -> Path:
        if (family, kind) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{kind}")
            if kind == "trained":
                tiny.make_trained_checkpoint(family, directory)
            elif kind == "full":
                tiny.make_full_acceptance_checkpoint(directory)
            else:
                tiny.make_checkpoint(family, directory, mtp=kind == "random")
            made[family, kind] = directory
        return made[family, kind]

    return get


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[..., Path]) -> Callable[[str, str], Oracle]:
    """oracle(family, kind): plain float64 decoding of that checkpoint."""
    made: dict[tuple[str, str], Oracle] = {}

    def get(family: str, kind: str = "trained") -> Oracle:
        if (family, kind) not in made:
            made[family, kind] = Oracle(family, checkpoint(family, kind))
        return made[family, kind]

    return get


@pytest.fixture(scope="session")
def compiled(checkpoint: Callable[..., Path]) -> Callable[..., mtpc.SpecModel]:
    """compiled(family, K, kind, **options): a SpecModel, compiled once per distinct call."""
    made: dict[Any, mtpc.SpecModel] = {}

    def get(family: str, spec_tokens: int, kind: str = "trained", **options: Any) -> mtpc.SpecModel:
        options = {"backend": "eager", "dtype": "float64", **TINY, **options}
        key = (family, spec_tokens, kind, *sorted(options.items()))
        if key not in made:
            made[key] = mtpc.compile(checkpoint(family, kind), spec_tokens=spec_tokens, **options)
        return made[key]

    return get
