"""A tiny model whose vocabulary is words, for tests of text. It does not import the server."""

from __future__ import annotations

import shutil
from pathlib import Path

import tokenizers
import torch

import mtpc
from helpers.families import TINY
from helpers.trained import cyclic_text

TEMPLATE = (
    "{{ bos_token }} {% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% generation %}w{{ loop.index + 10 }} {{ message.content }} {% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w90' if enable_thinking else 'w91' }}{% endif %}"
)
SPECIAL = 5
SMALL_MODEL = ["--backend", "eager", "--max-len", "64", "--no-sampling"]
"""Options of the command line that compile in a second."""


def word_checkpoint(source: Path, directory: Path) -> Path:
    """A tiny checkpoint with a vocabulary of words, w0 to w95, and a chat template."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w2")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # As in many models, a text gets a first token, and the chat template writes its own.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="w0 $A", special_tokens=[("w0", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"bos_token": {"__type": "AddedToken", "content": "w5", "special": true}}'
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def write_text(path: Path) -> Path:
    """A text of words that follow each other as in what trained targets have learned."""
    rows = cyclic_text(60, 30, torch.Generator().manual_seed(5)).flatten()
    path.write_text(" ".join(f"w{i}" for i in rows.tolist()))
    return path


def compile_words(directory: Path) -> mtpc.SpecModel:
    """The model with sampling, without token masks, and with few pages."""
    return mtpc.compile(
        directory,
        spec_tokens=2,
        backend="eager",
        dtype="float64",
        batch_buckets=(4,),
        num_pages=22,
        **{**TINY, "sampling": True, "token_mask": False},
    )


def words(ids: list[int]) -> str:
    """The text of words, without the special token w5."""
    return " ".join(f"w{i}" for i in ids if i != SPECIAL)


def word(token_id: int) -> str:
    return words([token_id])
