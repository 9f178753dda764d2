"""Compiles grammars of requests with the library llguidance, for the engine's token masks."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mtpc.server.errors import ApiError
from mtpc.weights.served_model import ServedModel

LIBRARY = "llguidance"


class Matcher:
    """A `mtpc.Grammar` over one of llguidance's matchers; errors name `param`, the request's
    field."""

    def __init__(self, matcher: Any, param: str):
        self._matcher, self._param = matcher, param

    def fill_mask(self, words: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * words.numel())
        self.check()

    def advance(self, token_id: int) -> bool:
        is_taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        self.check()
        return is_taken

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def check(self) -> None:
        """Raise if the library has given up: it has limits, which only some texts reach.

        Raises:
            ApiError: 400, with the library's words.
        """
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()[0]
            message = f"{self._param} cannot be followed: {reason}"
            raise ApiError(400, message, self._param, "invalid_value")

    def copy(self) -> Matcher:
        """Another one, at the same place."""
        return Matcher(self._matcher.deep_copy(), self._param)

    def try_out(self, vocab_size: int) -> None:
        """Take a token that may come first, so that most limits are found before any step.

        Raises:
            ApiError: 400, see `check`.
        """
        words = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
        self.fill_mask(words)
        for place in words.nonzero().flatten()[:1].tolist():
            word = int(words[place])
            self.advance(32 * place + (word & -word).bit_length() - 1)


class Grammars:
    def __init__(self, served: ServedModel):
        self._served = served

    @cached_property
    def _tokenizer(self) -> Any:
        """llguidance's view of the tokenizer; building it takes up to a second."""
        from llguidance import LLTokenizer

        ends = list(self._served.stop_ids)
        return LLTokenizer(
            self._served.tokenizer_json(), n_vocab=self._served.vocab_size, eos_token=ends
        )

    def matchers(self, lark: str, count: int, param: str) -> list[Matcher]:
        """Grammars for `count` texts, of one in llguidance's dialect of Lark. Errors name the field
        `param`.

        Raises:
            ApiError: the library is not installed, or refuses the tokenizer or the grammar.
        """
        if find_spec(LIBRARY) is None:
            raise ApiError(
                400,
                f"{param} needs {LIBRARY}, not installed on this server: pip install {LIBRARY}",
                param,
                "not_installed",
            )
        from llguidance import LLMatcher

        try:
            tokenizer = self._tokenizer
        except ValueError as error:
            message = f"{param} cannot be followed: {LIBRARY} does not read this model's tokenizer"
            raise ApiError(400, f"{message}: {error}", param, "unsupported_tokenizer") from error
        made = Matcher(LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0), param)
        made.check()
        made.copy().try_out(self._served.vocab_size)
        return [made, *(made.copy() for _ in range(count - 1))]
