"""What a server needs of a model and its program lacks: vocabulary size, stop ids, tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from mtpc.errors import CheckpointError, RequestError
from mtpc.weights.json_file import CONFIG, read_json


def tokenizer_ends(directory: Path) -> tuple[int, ...]:
    """The id of a tokenizer's end-of-sequence token, or () if it has none.

    This reads the tokenizer's files itself, because a warm start does not import transformers.
    Files that cannot be read name no token; `ServedModel.encode` tells whoever needs them.
    """
    try:
        config = _entries(directory / "tokenizer_config.json")
        token = config.get("eos_token") or _entries(directory / "special_tokens_map.json").get(
            "eos_token"
        )
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            return ()
        added = dict(config.get("added_tokens_decoder") or {})
        ids = {entry["content"]: int(token_id) for token_id, entry in added.items()}
        if text not in ids:  # Newer files have all added tokens in the tokenizer itself.
            whole = _entries(directory / "tokenizer.json")
            ids |= {entry["content"]: entry["id"] for entry in whole.get("added_tokens", ())}
            if text not in ids:
                words = whole.get("model", {}).get("vocab", {})
                ids = words if isinstance(words, dict) else {w[0]: i for i, w in enumerate(words)}
    except (CheckpointError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return ()
    found = ids.get(text)
    return (found,) if isinstance(found, int) else ()


def _entries(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.isfile(path) else {}


class Kept(Protocol):
    """Where tokenizers are kept from one process to the next."""

    def read(self, place: Path) -> bytes | None:
        """The tokenizer of a file, as a tokenizer.json; None if it is not kept."""

    def write(self, place: Path, made: bytes) -> None:
        """Keep it, where that is possible."""


@dataclass(frozen=True)
class ServedModel:
    """A model as callers of the engine see it, whether it was compiled or came from the cache.

    Attributes:
        source: where it came from, for messages.
        vocab_size: token ids are below it.
        stop_ids: the model's end-of-sequence ids.
        directory: its checkpoint, where it has one.
        kept: where its tokenizer is kept; None if nowhere.
    """

    source: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    directory: Path | None
    kept: Kept | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Its hub id or, without one, the last part of its path."""
        from mtpc.weights.hub import hub_id  # Not above: few starts need it.

        directory = (self.directory or Path(self.source)).absolute()
        return hub_id(directory) or directory.resolve().name

    @cached_property
    def _place(self) -> Path | None:
        return None if self.directory is None else find_tokenizer(self.directory)[0]

    @cached_property
    def _from_kept(self) -> Any | None:
        """The tokenizer as it is kept."""
        found = None
        if self.kept is not None and self._place is not None:
            found = self.kept.read(self._place)
        if found is None:
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_buffer(found)

    def load_kept(self) -> bool:
        """Load the tokenizer now, if it is kept; returns whether it is."""
        return self._from_kept is not None

    @cached_property
    def _loaded(self) -> tuple[Any | None, bool]:
        """The tokenizer of the library tokenizers, and whether transformers must decode.

        transformers' own method costs five times as much, and only adds the clean-up of spaces that
        old tokenizers ask for. A tokenizer is loaded on first use, because token ids need none;
        from `kept` if it is there, because transformers takes seconds.
        """
        if self._from_kept is not None:
            return self._from_kept, False
        kept, place, whole = self.kept, self._place, self._tokenizer
        if whole is None:
            return None, False
        made, cleans_up = whole.backend_tokenizer, bool(whole.clean_up_tokenization_spaces)
        made.no_padding()
        made.no_truncation()
        if kept is not None and place is not None and not (cleans_up or made.encode_special_tokens):
            kept.write(place, made.to_str().encode())
        return made, cleans_up

    @property
    def _backend(self) -> Any | None:
        return self._loaded[0]

    @cached_property
    def _tokenizer(self) -> Any | None:
        """transformers' own, whose import alone takes a second."""
        if self.directory is None:
            return None
        place, more = find_tokenizer(self.directory)
        if place is None:
            return None
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(
                place.parent, local_files_only=True, **more
            )
        except BaseException as error:  # The tokenizers library raises Exception itself, or panics.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(
                f"the tokenizer of {place} cannot be read: {type(error).__name__}: {error}; copy "
                "or download the tokenizer's files again, or put a tokenizer.json beside it"
            ) from error

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can come in and go out.

        Raises:
            CheckpointError: the tokenizer's files cannot be read.
        """
        return self._backend is not None

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt of any length, with the special tokens that the tokenizer puts
        around a text; chat templates write their own.

        Raises:
            RequestError: the checkpoint has no tokenizer.
        """
        if self._backend is None:
            raise RequestError(f"{self.source} has no tokenizer; give prompts as token ids")
        return list(self._backend.encode(text, add_special_tokens=special_tokens).ids)

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, as the checkpoint's own chat template takes it, up to the
        start of the assistant's next message.

        Raises:
            RequestError: the checkpoint has no chat template, or it refuses the messages.
        """
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise RequestError(f"{self.source} has no chat template; give prompts as text or ids")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # Whatever the template raises.
            raise RequestError(
                f"the chat template refuses these messages: {type(error).__name__}: {error}"
            ) from error
        return self.encode(text, special_tokens=False)

    def decode(self, token_ids: list[int], special_tokens: bool = False) -> str:
        """The text of tokens, by default without special ones; only where `encode` works."""
        return self._decode(token_ids, skip_special_tokens=not special_tokens)

    def decode_keeping(self, texts: Collection[str]) -> Callable[[list[int]], str]:
        """`decode`, but the tokens of these texts are not left out where they are special."""
        tokens = self.own_tokens
        kept = {tokens[text]: text for text in texts if text in tokens}
        kept = {i: text for i, text in kept.items() if not self.decode([i])}
        if not kept:
            return self.decode

        def decode(token_ids: list[int]) -> str:
            parts, start = [], 0
            for place, token_id in enumerate(token_ids):
                if token_id in kept:
                    parts += [self.decode(token_ids[start:place]), kept[token_id]]
                    start = place + 1
            return "".join([*parts, self.decode(token_ids[start:])])

        return decode

    @cached_property
    def own_tokens(self) -> dict[str, int]:
        """Added tokens, which the tokenizer never splits: text -> id."""
        if self._backend is None:
            return {}
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def tokenizer_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, without padding and truncation."""
        assert self._backend is not None
        return str(self._backend.to_str())

    @cached_property
    def _decode(self) -> Callable[..., str]:
        """The tokenizer's decoder, which is called for each request and step."""
        backend, cleans_up = self._loaded
        assert backend is not None
        tokenizer: Any = self._tokenizer if cleans_up else backend
        decode: Callable[..., str] = tokenizer.decode
        return decode


def find_tokenizer(directory: Path) -> tuple[Path | None, dict[str, Any]]:
    """The file with a checkpoint's tokenizer, and the arguments by which transformers finds it. The
    file may be a GGUF file with a vocabulary; None if there is none.

    Raises:
        CheckpointError: the directory or its GGUF file cannot be read.
    """
    files: list[Path] = []
    try:
        if not (directory / CONFIG).is_file():
            from mtpc.weights.gguf import find_gguf  # Not above: few checkpoints need it.

            files = find_gguf(directory)
        own = (files[0].parent if files else directory) / "tokenizer.json"
        if own.is_file():
            return own, {}
    except OSError as error:
        raise CheckpointError(f"cannot look for a tokenizer: {error}") from None
    if files:
        from mtpc.weights.gguf.file import has_tokens  # Not above: few checkpoints need it.

        if has_tokens(files[0]):
            return files[0], {"gguf_file": files[0].name}
    return None, {}
