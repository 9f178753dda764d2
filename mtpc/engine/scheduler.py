"""Decides which requests run next: admission, chunked prefill, pages on demand, and preemption.

The policy and its bounds:

- Admission is first come, first served, without priorities. The scheduler admits the oldest waiting
  request when a slot is free and the pool has enough pages: those for the request's tokens to
  prefill and its first decode step, and one more for each running request. The extra pages keep a
  new request from being preempted at once. No request overtakes another.
- A step is either a prefill step, which runs one chunk of prompts, or a decode step of all decoding
  requests. If there is work of both kinds, chunks have the smaller busy size, and decoding requests
  share prefill steps: their rows stand beside the prompts' rows, so that the step reads the weights
  once for both. Then every step advances all decoding requests and a prompt. If a prefill step
  lacks the rows, or the tokens for half a busy chunk, the two kinds of steps alternate. A decoding
  request then waits for at most one busy chunk between two of its steps.
- A chunk is filled in order of arrival. The oldest unfinished prompt takes as much as it can; the
  next prompts take what is left, up to the number of rows. So the oldest prompt gets as much as it
  would get alone. Let c be the number of chunks that a prompt needs, plus those that the prompts
  admitted before it need, each rounded up. The prompt has its first token after at most 2c steps,
  or after c if whole chunks fit beside the decoding requests. If the rows suffice, c is the sum of
  these prompts' tokens divided by the chunk size.
- A decoding request gets pages as it grows. Before a step it owns pages for its committed tokens,
  the step's K + 1 tokens, and K chained drafts. If the pool has too few pages, the newest running
  request is preempted: it gives its pages back and returns to the front of the queue, where it must
  prefill its prompt and its output so far again. The oldest request is never preempted, and it fits
  into the pool alone (the engine refuses it otherwise), so there is always progress.

All running requests are older than all waiting ones; admission and preemption preserve this order.

The scheduler touches no tensor: a `Turn` says what to write and what to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Literal

from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prefix import ROOT, Match, PrefixCache
from mtpc.engine.request import Request
from mtpc.engine.stats import Stats
from mtpc.layout import Bucket

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Turn:
    """One step to run. All requests are in order of arrival.

    Attributes:
        placed: requests that got a slot since the last turn. Their rows must be written.
        grown: requests that got pages, each with the index of its first new page.
        prompts: the requests whose prompts share the chunk; none in a decode step.
        chunks: number of tokens for each of `prompts`.
    """

    decoding: list[Request]
    placed: list[Request]
    grown: list[tuple[Request, int]]
    prompts: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        return "prefill" if self.prompts else "decode"

    @property
    def requests(self) -> list[Request]:
        """The requests of the step, in the order of their rows."""
        return self.decoding + self.prompts

    @property
    def has_no_drafts(self) -> bool:
        """Whether there is nothing to verify; a grammar may still replace what is no draft."""
        return not any(request.num_drafts or request.grammar for request in self.decoding)

    def without(self, gone: Container[Request]) -> Turn | None:
        """The same step without some requests, all rows written; None if no request is left."""
        decoding = [request for request in self.decoding if request not in gone]
        pairs = zip(self.prompts, self.chunks, strict=True)
        kept = [(request, count) for request, count in pairs if request not in gone]
        if not decoding and not kept:
            return None
        return Turn(decoding, [], [], [one for one, _ in kept], [count for _, count in kept])


class Scheduler:
    """The queues of an engine, and the slots and pages of its requests.

    Args:
        prefixes: finds pages with a known content; None turns prefix reuse off.
        pages_for: given a number of committed tokens, the pages that a request with them needs for
            its next step.
        prefill: rows and tokens of a prefill step.
        busy_tokens: the most prompt tokens in a prefill step while requests decode.
        joining_tokens: tokens that a decoding request takes in a prefill step (K + 1).
    """

    def __init__(
        self,
        slots: FreeList,
        pages: PagePool,
        prefixes: PrefixCache | None,
        pages_for: Callable[[int], int],
        prefill: Bucket,
        busy_tokens: int,
        joining_tokens: int,
    ):
        self.slots, self.pages, self.prefixes, self.prefill = slots, pages, prefixes, prefill
        self.busy_tokens, self.joining_tokens = busy_tokens, joining_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.reused_tokens = 0
        self._pages_for = pages_for
        self._last: Phase = "decode"
        self._placed: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take out a waiting or running request. A running one gives its pages and slot back."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._release(request)

    def next_turn(self) -> Turn | None:
        """The next step, or None if nothing runs or a launched step must be read first."""
        while self.waiting and self.slots.num_free and self._place(self.waiting[0]):
            self.waiting.popleft()
        if self._must_read():
            return None
        can_join = self._can_join()
        turn = self._decode_turn() if can_join or self._last == "prefill" else None
        if turn is None or can_join:
            turn = self._prefill_turn(turn) or turn or self._decode_turn()
        if turn is None:
            return None
        self._last, self._placed = turn.phase, []
        return turn

    def restart(self, requests: Iterable[Request]) -> None:
        """Forget all slots, pages and queues, whatever state they are in. All unfinished requests,
        in order of arrival, wait again."""
        self.slots.reset()
        self.pages.reset()
        self.running.clear()
        self.waiting.clear()
        self._placed.clear()
        for request in requests:
            request.slot, request.pages, request.num_unread = None, [], 0
            request.snapshots.clear()
            request.newest = None
            request.num_input, request.num_prefilled = request.num_tokens, 0
            self.waiting.append(request)

    def describe(self, stats: Stats) -> None:
        stats.preemptions, stats.reused_tokens = self.num_preemptions, self.reused_tokens
        stats.num_waiting, stats.num_running = len(self.waiting), len(self.running)
        stats.num_pages, stats.pages_idle = self.pages.count, self.pages.num_idle
        stats.pages_used = self.pages.count - self.pages.num_free

    def learn(self, request: Request) -> None:
        """Let other requests reuse the pages of a request. Call this before it is removed."""
        if self.prefixes is not None:
            self.prefixes.learn(request)

    def _prefill_turn(self, joining: Turn | None) -> Turn | None:
        """A prefill turn with one chunk of the oldest unfinished prompts, and with the requests of
        the decode turn `joining`; None if there are no prompts."""
        room, rows = self.prefill.num_tokens, self.prefill.num_reqs
        decoding, grown = (joining.decoding, joining.grown) if joining else ([], [])
        if joining:
            room, rows = self._room_beside(decoding), rows - len(decoding)
        elif self._decoding():
            room = self.busy_tokens
        chunks = []
        prompts = [r for r in self.running if not r.is_prefilled][:rows]
        for request in prompts:
            # A chunk ends where the prompt leaves a snapshot.
            past = request.num_prefilled
            cut = self.prefixes and self.prefixes.next_snapshot(request, past)
            chunks.append(min(room, (cut or request.num_input) - past))
            room -= chunks[-1]
        if not prompts:
            return None
        sizes = [count for count in chunks if count]
        return Turn(decoding, self._still_placed(), grown, prompts[: len(sizes)], sizes)

    def _can_join(self) -> bool:
        """Whether a prefill step has room for all decoding requests and for enough prompt tokens.

        Enough is half a busy chunk, or all prompt tokens that are left.
        """
        decoding = self._decoding()
        left = [r.num_input - r.num_prefilled for r in self.running if not r.is_prefilled]
        if not decoding or not left or len(decoding) >= self.prefill.num_reqs:
            return False
        room = self._room_beside(decoding)
        return 2 * room >= self.busy_tokens or room >= sum(left)

    def _room_beside(self, decoding: list[Request]) -> int:
        """The number of prompt tokens that fit beside the decoding requests."""
        taken = len(decoding) * self.joining_tokens
        return min(self.busy_tokens, self.prefill.num_tokens - taken)

    def _must_read(self) -> bool:
        """Whether the next step depends on tokens of a launched step that is not read yet.

        A grammar's masks depend on them. If the pool lacks pages, a request would be preempted, and
        the tokens that it prefills again depend on them, too. Once they are read, the requests may
        need fewer pages than the upper limit.
        """
        unread = [request for request in self.running if request.num_unread]
        if not unread:
            return False
        if any(request.grammar is not None for request in unread):
            return True
        missing = sum(max(self._missing_pages(request), 0) for request in self._decoding())
        return missing > self.pages.num_free

    def _decoding(self) -> list[Request]:
        """The requests that decode in the next step, in order of arrival."""
        return [r for r in self.running if r.is_prefilled and not r.is_surely_done]

    def _missing_pages(self, request: Request) -> int:
        """The number of pages that a request lacks for its next step."""
        # If all drafts are accepted, the last row of a block of drafts is one further.
        return self._pages_for(request.most_committed + 1) - len(request.pages)

    def _decode_turn(self) -> Turn | None:
        """A turn of all decoding requests, with their pages allocated; None if there are none.

        This may preempt the newest running requests.
        """
        grown = []
        for request in self._decoding():
            missing = self._missing_pages(request)
            while missing > self.pages.num_free and request.slot is not None:
                self._preempt(self.running[-1])
            if missing > 0 and request.slot is not None:
                grown.append((request, len(request.pages)))
                request.pages += self.pages.take(missing)
        decoding = self._decoding()
        if not decoding:
            return None
        return Turn(decoding, self._still_placed(), grown)

    def _still_placed(self) -> list[Request]:
        """The placed requests that have not been preempted since."""
        return [r for r in self._placed if r.slot is not None]

    def _place(self, request: Request) -> bool:
        """Give a request its slot and pages.

        Return False if the pool has too few pages, or if the request should wait for a beginning
        that a running request is about to compute.
        """
        found = self.prefixes.match(request) if self.prefixes else Match([], ROOT)
        shared = found.pages
        if self.prefixes:
            known = len(shared) * self.prefixes.page_size
            if any(self.prefixes.coming(other, request) > known for other in self.running):
                return False
        idle = sum(not self.pages.users(page) for page in shared)
        count = self._pages_for(request.num_tokens)
        if count - len(shared) + idle + len(self.running) > self.pages.num_free:
            return False
        request.num_input, request.num_prefilled = request.num_tokens, 0
        request.slot = self.slots.take()
        if self.prefixes:
            # Files can only add to the known pages, and each that is shared needs no other page.
            while True:
                more = self.prefixes.match_files(request, found)
                self.pages.share(more.pages)
                request.pages = more.pages + self.pages.take(count - len(more.pages))
                if self.prefixes.load(request, more):
                    break
                self.pages.give_back(request.pages)
            request.num_indexed, request.last_block = len(more.pages), more.number
            request.num_prefilled = (len(more.pages) + more.num_stored) * self.prefixes.page_size
            self.reused_tokens += request.num_prefilled
        else:
            request.pages = self.pages.take(count)
        if request.num_cached is None:
            request.num_cached = request.num_prefilled
        self.running.append(request)
        self._placed.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._release(request)
        request.num_input, request.num_prefilled = request.num_tokens, 0
        request.num_unread = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self.pages.give_back(request.pages)
        self.slots.give_back(request.slot)
        for snapshot in request.snapshots.values():
            self.pages.index.snapshots.give_back(snapshot)
        request.slot, request.pages, request.newest = None, [], None
        request.snapshots.clear()
