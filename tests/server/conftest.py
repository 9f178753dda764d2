"""The model that servers of this room serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.word_model import compile_words, word_checkpoint

import mtpc


@pytest.fixture(scope="session")
def word_spec(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> mtpc.SpecModel:
    """A tiny model with tokenizer, chat template and sampling."""
    return compile_words(word_checkpoint(checkpoint("mimo"), tmp_path_factory.mktemp("words")))
