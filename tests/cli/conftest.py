"""A tiny model that the command line loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from helpers.tiny import make_checkpoint


@pytest.fixture(scope="session")
def word_model(tmp_path_factory) -> Path:
    """A tiny model whose vocabulary is the words w0 to w95."""
    directory = make_checkpoint("mimo", tmp_path_factory.mktemp("cli"))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w2")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def shared_cache(cpu_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the kernels, and share what they compile."""
    monkeypatch.setenv("MTPC_CACHE_DIR", str(cpu_cache))
