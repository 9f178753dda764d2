"""Log-probabilities of given tokens: a grammar allows these tokens alone, and the engine reports.

The reported log-probabilities are the model's own, before all masks (`mtpc::write_logprobs`). At
every draft's position the grammar allows a single token, which replaces the draft. So a step scores
K + 1 tokens, and what it computes is what decoding the same text computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mtpc.engine.engine import Engine
from mtpc.engine.request import Request
from mtpc.engine.stream import check_all, stream
from mtpc.errors import RequestError
from mtpc.sampling_params import SamplingParams, TokenLogprobs


class ForcedText:
    """A `mtpc.Grammar` that allows one text, and anything after it."""

    def __init__(self, token_ids: Sequence[int]):
        self._ids, self._taken = list(token_ids), 0

    def fill_mask(self, words: Tensor) -> None:
        """Clear every bit but the next token's; see `mtpc.Grammar`."""
        if self._taken < len(self._ids):
            word, bit = divmod(self._ids[self._taken], 32)
            words.zero_()
            words[word] = 1 << bit if bit < 31 else -(1 << 31)

    def advance(self, token_id: int) -> bool:
        """Take a token, if it is the text's next one."""
        allowed = self._taken >= len(self._ids) or token_id == self._ids[self._taken]
        self._taken += allowed
        return allowed

    def rollback(self, count: int) -> None:
        self._taken -= count


def scoring_request(token_ids: Sequence[int], start: int, top: int, vocab_size: int) -> Request:
    """A request that emits the tokens of a text from `start` on, with their log-probabilities.

    `start` is at least 1, because nothing predicts the first token of a text. Beside each token,
    the `top` most probable ones are reported.

    Raises:
        RequestError: `start` or an id is out of range.
    """
    wrong = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        last = vocab_size - 1
        raise RequestError(f"a text to score has token id {wrong}; expected ids in 0..{last}")
    if not 0 < start < len(token_ids):
        raise RequestError(
            f"start is {start} in a text of {len(token_ids)} tokens; expected 1 or more, and a "
            "token after it to score"
        )
    sampling, forced = SamplingParams(logprobs=top), ForcedText(token_ids[start:])
    ids = list(token_ids)
    return Request(-1, ids[:start], len(ids) - start, (), sampling, grammar=forced)


def score(engine: Engine, requests: Sequence[Request]) -> list[list[TokenLogprobs]]:
    """Run scoring requests; returns the entries of each.

    Raises:
        RequestError: see `Engine.add`; the model was compiled without sampling or token_mask.
    """
    check_all(engine, requests)
    entries: list[list[TokenLogprobs]] = [[] for _ in requests]
    for output in stream(engine, requests, [None] * len(requests)):
        entries[output.index] += output.logprobs or []
    return entries
