"""What serving a model takes beyond its program: its vocabulary, its ends, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtpc.errors import CheckpointError, RequestError
from mtpc.weights.hub import hub_id


@dataclass(frozen=True)
class ServedModel:
    """A model as the engine's callers see it; the same whether it was compiled or restored.

    Attributes:
        source: where it came from, for messages.
        vocab_size: token ids are below it.
        stop_ids: the model's end-of-sequence ids.
        directory: its checkpoint, where it has one.
    """

    source: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    directory: Path | None

    @property
    def name(self) -> str:
        """Its hub id or, without one, the last part of its path."""
        directory = (self.directory or Path(self.source)).absolute()
        return hub_id(directory) or directory.resolve().name

    @cached_property
    def _tokenizer(self) -> Any | None:
        """Loaded when text first comes in: ids need none, and transformers takes a second."""
        if self.directory is None or not (self.directory / "tokenizer.json").is_file():
            return None
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(self.directory, local_files_only=True)
        except Exception as error:  # The tokenizers library raises Exception itself.
            raise CheckpointError(
                f"{self.directory / 'tokenizer.json'} cannot be read: {type(error).__name__}: "
                f"{error}; copy or download the tokenizer's files again"
            ) from error

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can come in and go out."""
        return self._tokenizer is not None

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Args:
            text: of any length; nothing is cut off.
            special_tokens: add those that the tokenizer puts around a text; chat templates write
                their own.

        Raises:
            RequestError: the checkpoint has no tokenizer.
        """
        if self._tokenizer is None:
            raise RequestError(f"{self.source} has no tokenizer; give prompts as token ids")
        return list(self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """The text of new tokens, special ones left out; only where `encode` works."""
        return self._decode(token_ids, skip_special_tokens=True)

    @cached_property
    def _decode(self) -> Callable[..., str]:
        """The tokenizer's inner decoder, which is called per request and step, where it says all.

        transformers' own method costs five times as much, and adds nothing but the clean-up of
        spaces that old tokenizers ask for.
        """
        assert self._tokenizer is not None
        if self._tokenizer.clean_up_tokenization_spaces:
            return self._tokenizer.decode
        return self._tokenizer.backend_tokenizer.decode
