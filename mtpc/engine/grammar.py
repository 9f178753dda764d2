"""Grammars: a request's own say in which token may come next, through the masks of a step.

A step verifies drafts that the host can read, so it can advance a grammar along them and write a
mask for every row before the replay. What the step drafts rests on a token that it chooses itself:
those masks are written as far as few tokens are possible. docs/sampling.md has the argument.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtpc.config import CompileOptions
from mtpc.engine.request import Request
from mtpc.engine.scheduler import Turn
from mtpc.errors import GrammarError, RequestError
from mtpc.layout import StepKey
from mtpc.program.program import Program

FEW = 4
"""Texts that are followed at once to know what a draft may be; where more are possible, the draft
may be anything."""
_METHODS = ("fill_mask", "advance", "rollback")


class Grammar(Protocol):
    """What the text of one request may be; what grammar libraries call a matcher.

    It stands after the tokens that it took: none when the request is added. Tokens that end the
    request, its stop ids, are never handed to it; where the text may end it allows them.
    """

    def fill_mask(self, words: Tensor) -> None:
        """Write which tokens may come next.

        Args:
            words: int32 [ceil(V / 32)], contiguous, on the CPU, all bits set: bit v mod 32 of word
                v / 32 is token v.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take a token; returns False, and stays as it was, where it may not come next."""
        ...

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens taken."""
        ...


def check_grammar(request: Request, options: CompileOptions) -> None:
    """Refuse a grammar that this program, or this request, cannot serve.

    Raises:
        RequestError: the program was compiled without `token_mask`; a method is missing; the
            request's own masks could leave no token that the grammar allows.
    """
    grammar, params = request.grammar, request.sampling
    if grammar is None:
        return
    missing = [name for name in _METHODS if not callable(getattr(grammar, name, None))]
    if missing:
        raise RequestError(
            f"grammar is {grammar!r}, without {', '.join(missing)}; expected an object with the "
            "methods of mtpc.Grammar"
        )
    if not options.token_mask:
        raise RequestError(
            "the request has a grammar, the model was compiled without masks for tokens: compile "
            "with sampling=True, token_mask=True"
        )
    if params.has_mask or params.min_tokens:
        raise RequestError(
            "the request has a grammar and allowed_ids, banned_ids or min_tokens, which could "
            "leave no token; say in the grammar what is allowed"
        )


class GrammarMasks:
    """Writes the mask rows of steps, and hands grammars what was emitted.

    A grammar that raises, or contradicts itself, ends its own request: `Request.error`.

    Attributes:
        forced_drafts: drafts replaced because a grammar allowed one other token only.
    """

    def __init__(self, program: Program, vocab_size: int):
        self.program, self.vocab_size, self.forced_drafts = program, vocab_size, 0
        self._narrowed: set[StepKey] = set()

    def write(self, key: StepKey, turn: Turn) -> None:
        """Write a step's masks; nothing where nobody has a grammar, now or in its last replay.

        Args:
            key: of the step.
            turn: the step's; of a prefill, with this chunk counted as prefilled.
        """
        requests = turn.requests
        if all(request.grammar is None for request in requests):
            if key in self._narrowed:
                self._narrowed.remove(key)
                for name in self._masks(key):
                    self.program.write(self.program.steps[key].buffers[name], -1)
            return
        self._narrowed.add(key)
        buffers = self.program.steps[key].buffers
        fresh = {name: torch.full(buffers[name].shape, -1).int() for name in self._masks(key)}
        token_rows, width = fresh["batch.token_mask"], len(fresh["batch.token_mask"])
        each = width // key.bucket.num_reqs
        ahead = fresh.get("batch.draft_mask", torch.empty(width, 0, token_rows.shape[1]).int())
        for index, request in enumerate(requests):
            rows = slice(index * each, (index + 1) * each)
            if request.grammar is not None and request.is_prefilled:
                try:
                    decodes = index < len(turn.decoding)
                    self._fill(request, decodes, token_rows[rows], ahead[rows])
                except Exception as error:
                    request.error = error
                    token_rows[rows] = -1
        for name, mask in fresh.items():
            self.program.write(buffers[name], mask)

    def _masks(self, key: StepKey) -> list[str]:
        names = ("batch.token_mask", "batch.draft_mask")
        return [name for name in names if name in self.program.steps[key].buffers]

    def _fill(self, request: Request, decodes: bool, rows: Tensor, ahead: Tensor) -> None:
        """A request's rows, along the drafts that the step verifies.

        A draft in whose place one token alone may come is replaced by it: it will be accepted.
        Rows behind a draft that may not come, or that ends the request, are not used.
        """
        walk = _Walk(request)
        state = self.program.shared["state.token_ids"][request.slot]
        drafts = state[1 : len(rows)].tolist() if decodes else []
        before = list(drafts)
        try:
            for row in range(len(rows)):
                walk.fill(rows[row])
                self._look_ahead(walk, rows[row], ahead[row])
                if row == len(drafts):
                    break
                only = self._tokens(rows[row], 1)
                drafts[row] = only[0] if only else drafts[row]
                if not walk.take(drafts[row]):
                    break
        finally:
            walk.back()
        if drafts != before:
            self.forced_drafts += sum(a != b for a, b in zip(drafts, before, strict=True))
            self.program.write(state[1 : 1 + len(drafts)], torch.tensor(drafts))

    def _look_ahead(self, walk: _Walk, words: Tensor, masks: Tensor) -> None:
        """What may follow one, two, .. tokens from here, `words` being what the first may be."""
        texts: list[tuple[tuple[int, ...], Tensor]] = [((), words)]
        for mask in masks:
            longer = []
            for text, allowed in texts:
                tokens = self._tokens(allowed, FEW)
                if tokens is None:
                    return
                longer += [(*text, token) for token in tokens if token not in walk.stops]
            if not 0 < len(longer) <= FEW:
                return
            texts = [(text, walk.after(text, words)) for text in longer]
            mask.zero_()
            for _, allowed in texts:
                mask |= allowed

    def _tokens(self, words: Tensor, most: int) -> list[int] | None:
        """The tokens of a mask; None where they are more than `most`."""
        places = words.nonzero().flatten().tolist()
        if len(places) > most + 1:  # The last word may have bits beyond the vocabulary.
            return None
        bits = [(place, int(words[place]) & 0xFFFFFFFF) for place in places]
        tokens = [32 * place + i for place, word in bits for i in range(32) if word >> i & 1]
        tokens = [token for token in tokens if token < self.vocab_size]
        return tokens if len(tokens) <= most else None

    def take(self, request: Request, emitted: list[int], is_dead_end: bool) -> None:
        """Advance a request's grammar by what a step emitted.

        Args:
            request: whose, with a grammar.
            emitted: its new tokens.
            is_dead_end: whether it ended with a row of logits of which nothing was left.
        """
        walk = _Walk(request)
        try:
            for token_id in emitted:
                if token_id not in walk.stops:
                    walk.advance(token_id)
            words = torch.full(((self.vocab_size + 31) // 32,), -1, dtype=torch.int32)
            if is_dead_end:
                walk.fill(words)
                if not self._tokens(words, self.vocab_size):
                    count = len(request.output_ids) + len(emitted)
                    raise GrammarError(f"the grammar allows no token after {count} new ones")
        except Exception as error:
            request.error = request.error or error


class _Walk:
    """A grammar that is tried out: what it took can be taken back."""

    def __init__(self, request: Request):
        assert request.grammar is not None
        self.grammar, self.stops, self._taken = request.grammar, set(request.stop_ids), 0

    def fill(self, words: Tensor) -> None:
        self.grammar.fill_mask(words)

    def take(self, token_id: int) -> bool:
        """Whether it went on; it does not beyond a token that ends the request."""
        if token_id in self.stops or not self.grammar.advance(token_id):
            return False
        self._taken += 1
        return True

    def advance(self, token_id: int) -> None:
        """Take a token that its mask allowed, for good or until who calls takes it back.

        Raises:
            GrammarError: it does not go on.
        """
        if not self.grammar.advance(token_id):
            raise GrammarError(
                f"the grammar allowed token {token_id} in its mask, and does not take it"
            )

    def back(self) -> None:
        """To where it stood at first."""
        taken, self._taken = self._taken, 0
        if taken:
            self.grammar.rollback(taken)

    def after(self, text: tuple[int, ...], like: Tensor) -> Tensor:
        """The mask behind a text from here; it stays where it stands."""
        words, count = torch.full_like(like, -1), 0
        try:
            for token_id in text:
                self.advance(token_id)
                count += 1
            self.grammar.fill_mask(words)
        finally:
            if count:
                self.grammar.rollback(count)
        return words
