"""The mask rows of steps with grammars, and how grammars advance; see `mtpc.engine.grammar`."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpc.engine.request import Request
from mtpc.engine.scheduler import Turn
from mtpc.errors import GrammarError, RequestError
from mtpc.layout import NO_TOKEN, StepKey
from mtpc.plan import Plan
from mtpc.program.program import Program

FEW = 4
"""The most continuations that the host follows to compute a draft's mask. If more are possible, the
draft stays unmasked."""
_METHODS = ("fill_mask", "advance", "rollback")


def check_grammar(request: Request, options: Plan) -> None:
    """Refuse a grammar that this program, or this request, cannot serve.

    Raises:
        RequestError: the program was compiled without `token_mask`; the grammar lacks a method; or
            the request has further masks, which could forbid every token that the grammar allows.
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
            "the request has a grammar; the model was compiled without masks for tokens: compile "
            "with sampling=True, token_mask=True"
        )
    if params.has_mask or params.min_tokens:
        raise RequestError(
            "the request has a grammar and allowed_ids, banned_ids or min_tokens, which together "
            "could forbid every token; express these limits in the grammar"
        )


class GrammarRows:
    """Writes the mask rows of steps, and advances grammars by the emitted tokens.

    If a grammar raises or contradicts itself, only its own request ends, with `Request.error`.

    Attributes:
        forced_drafts: drafts that were replaced because a grammar allowed a single, other token.
    """

    def __init__(self, program: Program, vocab_size: int):
        self.program, self.vocab_size, self.forced_drafts = program, vocab_size, 0
        self._narrowed: set[StepKey] = set()
        # Whose grammar raised as the last step's masks were made, and at which of its rows.
        self._failed: dict[Request, tuple[int, Exception]] = {}

    def write(self, key: StepKey, turn: Turn) -> None:
        """Write a step's masks. The chunks of a prefill step count as prefilled already.

        If no request of the turn has a grammar, this writes only if the step's last replay had
        masks, which it then clears.
        """
        requests = turn.requests
        self._failed = {}
        if all(request.grammar is None for request in requests):
            if key in self._narrowed:
                for name in self._masks(key):
                    self.program.write(self.program.steps[key].buffers[name], -1)
                self._narrowed.discard(key)
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
                request.is_walking = True
                try:
                    decodes = index < len(turn.decoding)
                    self._fill(request, decodes, token_rows[rows], ahead[rows])
                except Exception as error:
                    self._failed[request] = (0, error)
                    token_rows[rows] = -1
                request.is_walking = False
        for name, mask in fresh.items():
            self.program.write(buffers[name], mask)

    def _masks(self, key: StepKey) -> list[str]:
        names = ("batch.token_mask", "batch.draft_mask")
        return [name for name in names if name in self.program.steps[key].buffers]

    def _fill(self, request: Request, decodes: bool, rows: Tensor, ahead: Tensor) -> None:
        """Write a request's rows, along the drafts that the step verifies.

        If the grammar allows a single token at a draft's position, that token replaces the draft,
        and the step accepts it. Rows after a draft that the grammar rejects, or that ends the
        request, stay unmasked: the step does not use them.

        Args:
            request: a request with a grammar.
            decodes: whether the request decodes in this step; else it has no drafts to verify.
            rows: int32 [R, ceil(V / 32)], the request's R rows of `batch.token_mask`.
            ahead: int32 [R, N, ceil(V / 32)], its rows of `batch.draft_mask`; N is 0 if the step
                has no such buffer.
        """
        walk, row = _Walk(request), 0
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
                if drafts[row] == NO_TOKEN or not walk.take(drafts[row]):
                    break
        except Exception as error:  # The rows before this one are right.
            self._failed[request] = (row, error)
            rows[row:] = -1
        finally:
            walk.back()
        if drafts != before:
            self.forced_drafts += sum(a != b for a, b in zip(drafts, before, strict=True))
            self.program.write(state[1 : 1 + len(drafts)], torch.tensor(drafts))

    def _look_ahead(self, walk: _Walk, words: Tensor, masks: Tensor) -> None:
        """Write the masks of the tokens after the next one, as far as few texts are possible.

        Args:
            walk: the grammar, at the position of the next token.
            words: int32 [ceil(V / 32)], the mask of the next token.
            masks: int32 [N, ceil(V / 32)]; row i is for the token i + 1 positions after the next
                one. A row allows every token that some possible text allows there.
        """
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
        """The ids of the tokens that a mask allows, or None if there are more than `most`."""
        places = words.nonzero().flatten().tolist()
        if len(places) > most + 1:  # The last word may have bits beyond the vocabulary.
            return None
        bits = [(place, int(words[place]) & 0xFFFFFFFF) for place in places]
        tokens = [32 * place + i for place, word in bits for i in range(32) if word >> i & 1]
        tokens = [token for token in tokens if token < self.vocab_size]
        return tokens if len(tokens) <= most else None

    def take(self, request: Request, emitted: list[int], is_dead_end: bool) -> list[int]:
        """Advance a request's grammar by the tokens that a step emitted.

        If the grammar fails, `Request.error` becomes its exception.

        Args:
            request: a request with a grammar.
            emitted: the request's new tokens.
            is_dead_end: whether the request ended with non-finite logits. A mask that allows no
                token is one cause; then `Request.error` becomes a `GrammarError`.

        Returns:
            The tokens before the failure, or all of them: the same as steps without drafts emit.
        """
        walk, taken = _Walk(request), list[int]()
        row, failure = self._failed.pop(request, (len(emitted), None))
        request.is_walking = True  # Until the request has these tokens.
        try:
            for token_id in emitted[:row]:
                if token_id not in walk.stops:
                    walk.advance(token_id)
                taken.append(token_id)
            if failure is not None and row < len(emitted):
                raise failure
            words = torch.full(((self.vocab_size + 31) // 32,), -1, dtype=torch.int32)
            if is_dead_end:
                walk.fill(words)
                if not self._tokens(words, self.vocab_size):
                    count = len(request.output_ids) + len(emitted)
                    raise GrammarError(f"the grammar allows no token after {count} new ones")
        except Exception as error:
            request.error = request.error or error
        return taken


class _Walk:
    """Advances a request's grammar tentatively, and takes it back to where it was."""

    def __init__(self, request: Request):
        assert request.grammar is not None
        self.grammar, self.stops, self._taken = request.grammar, set(request.ends), 0

    def fill(self, words: Tensor) -> None:
        self.grammar.fill_mask(words)

    def take(self, token_id: int) -> bool:
        """Advance by a token. Return False if it ends the request or the grammar rejects it."""
        if token_id in self.stops or not self.grammar.advance(token_id):
            return False
        self._taken += 1
        return True

    def advance(self, token_id: int) -> None:
        """Advance by a token that the mask allows. `back` does not undo this. Raises GrammarError:
        the grammar rejects the token."""
        if not self.grammar.advance(token_id):
            raise GrammarError(
                f"the grammar allowed token {token_id} in its mask, but rejects it in advance(); "
                "expected both to agree: fix the grammar"
            )

    def back(self) -> None:
        """Take back all tokens that `take` advanced by."""
        taken, self._taken = self._taken, 0
        if taken:
            self.grammar.rollback(taken)

    def after(self, text: tuple[int, ...], like: Tensor) -> Tensor:
        """The mask after a text that starts at the current position, which does not change: int32
        [ceil(V / 32)], as `like` is."""
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
