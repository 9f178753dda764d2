"""Who runs next: admission, prefill beside decode, pages on demand, preemption.

The policy, and its bounds:

- Admission is first come, first served; there are no priorities. The request that waits longest is
  admitted when a slot is free and the pool can give it pages for all it has to prefill and its
  first decode step, and one page more for each request that runs (so that it is not sent back at
  once). Nobody overtakes it.
- A step is one prefill chunk, or one decode step of all requests that decode. Where there is work
  of both kinds, chunks are the smaller busy ones, and who decodes joins them: its rows stand beside
  the prompts', so that weights are read once for both. It never waits, and a prompt has a chunk in
  each step. Where a prefill step has not the rows, or the tokens for half of what a chunk should
  be, the two kinds take turns: a request that decodes then waits for at most one busy chunk between
  two of its steps.
- A chunk is filled in order of arrival: the oldest unfinished prompt takes what it can, the next
  ones what it leaves, as many prompts as the step has rows. The oldest gets all it would get
  alone. So a prompt that has c chunks left, its own and those of prompts admitted before it, each
  rounded up, has its first token after at most 2c steps; after c where whole chunks have room
  beside who decodes. Where rows suffice, c is all their tokens over the chunk's.
- A request that decodes gets pages as it grows: before a step it owns those for the committed
  tokens, the K + 1 of the step, and K chained drafts. Where the pool has none left, the request
  that came last is preempted: it gives its pages back and returns to the front of the queue, with
  its prompt and its output so far to prefill. The request that came first is never preempted and
  fits alone into the pool (the engine refuses it otherwise), so that there is always progress.

All running requests came before all waiting ones; admission and preemption keep it so.

Nothing here touches a tensor: a `Turn` says what is to be written and run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prefix import PrefixCache
from mtpc.engine.request import Request
from mtpc.layout import Bucket

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Turn:
    """One step to run.

    Attributes:
        decoding: all requests that decode, in order of arrival; of prefill, those that join it.
        placed: requests that got a slot since the last turn: their rows are to be written.
        grown: requests that got pages, and which of their pages is the first new one.
        prompts: of prefill, whose prompts share the chunk; in order of arrival.
        chunks: how many tokens of each.
    """

    decoding: list[Request]
    placed: list[Request]
    grown: list[tuple[Request, int]]
    prompts: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        """Of the step."""
        return "prefill" if self.prompts else "decode"

    @property
    def requests(self) -> list[Request]:
        """Of the step's rows, in their order."""
        return self.decoding + self.prompts


class Scheduler:
    """Queues, slots and pages of an engine.

    Args:
        slots: rows of the state buffers.
        pages: the KV pool.
        prefixes: what of the pool's content is known; None reuses nothing.
        pages_for: pages a request with that many committed tokens needs for its next step.
        prefill: requests and tokens that a prefill step holds.
        busy_tokens: tokens of prompts that it is given while requests decode.
        joining_tokens: of a request that decodes in a prefill step.
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
        """Queue a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; its pages and slot come back."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._release(request)

    def next_turn(self) -> Turn | None:
        """The next step, or None where nothing runs, or what was launched has to be read first."""
        self._admit()
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

    def preempt_all(self) -> None:
        """Send all that runs back to the queue, in order: a step failed in an unknown state."""
        for request in list(reversed(self.running)):
            self._preempt(request)

    def learn(self, request: Request) -> None:
        """Keep what a request computed for others; before it is removed."""
        if self.prefixes is not None:
            self.prefixes.learn(request)

    def _prefill_turn(self, joining: Turn | None) -> Turn | None:
        """One chunk, of the oldest prompts that are left; None where there are none.

        Args:
            joining: a decode turn that is to be part of it.
        """
        room, rows = self.prefill.num_tokens, self.prefill.num_reqs
        decoding, grown = (joining.decoding, joining.grown) if joining else ([], [])
        if joining:
            room, rows = self._room_beside(decoding), rows - len(decoding)
        elif self._decoding():
            room = self.busy_tokens
        chunks = []
        prompts = [r for r in self.running if not r.is_prefilled][:rows]
        for request in prompts:
            chunks.append(min(room, request.num_input - request.num_prefilled))
            room -= chunks[-1]
        if not prompts:
            return None
        held = [count for count in chunks if count]
        return Turn(decoding, self._still_placed(), grown, prompts[: len(held)], held)

    def _can_join(self) -> bool:
        """Whether all who decode, and enough of the prompts that are left, have room in a step."""
        decoding = self._decoding()
        left = [r.num_input - r.num_prefilled for r in self.running if not r.is_prefilled]
        if not decoding or not left or len(decoding) >= self.prefill.num_reqs:
            return False
        room = self._room_beside(decoding)
        return 2 * room >= self.busy_tokens or room >= sum(left)

    def _room_beside(self, decoding: list[Request]) -> int:
        """Tokens for prompts beside those of requests that decode."""
        taken = len(decoding) * self.joining_tokens
        return min(self.busy_tokens, self.prefill.num_tokens - taken)

    def _must_read(self) -> bool:
        """Whether the next step depends on what one that is not read yet has emitted.

        A grammar's masks do. So does what a preempted request has to prefill; and fewer pages may
        be needed than the most that was emitted would need.
        """
        unread = [request for request in self.running if request.num_unread]
        if not unread:
            return False
        if any(request.grammar is not None for request in unread):
            return True
        missing = sum(max(self._missing_pages(request), 0) for request in self._decoding())
        return missing > self.pages.num_free

    def _decoding(self) -> list[Request]:
        """Requests that go on decoding, in order of arrival."""
        return [r for r in self.running if r.is_prefilled and not r.is_surely_done]

    def _missing_pages(self, request: Request) -> int:
        """Pages that a request lacks for its next step."""
        return self._pages_for(request.most_committed) - len(request.pages)

    def _decode_turn(self) -> Turn | None:
        """All that decode, each with the pages of its next step; None where nobody does."""
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
        """Without those that were placed and then preempted, in this very turn or an empty one."""
        return [r for r in self._placed if r.slot is not None]

    def _admit(self) -> None:
        while self.waiting and self.slots.num_free and self._place(self.waiting[0]):
            self.waiting.popleft()

    def _place(self, request: Request) -> bool:
        """Give a request its slot and pages, unless the pool is too full for it."""
        shared, number = self.prefixes.match(request) if self.prefixes else ([], 0)
        idle = sum(not self.pages.users(page) for page in shared)
        fresh = self._pages_for(request.num_tokens) - len(shared)
        if fresh + idle + len(self.running) > self.pages.num_free:
            return False
        self.pages.share(shared)
        request.pages = shared + self.pages.take(fresh)
        request.slot = self.slots.take()
        request.num_input = request.num_tokens
        request.num_indexed, request.last_block = len(shared), number
        request.num_prefilled = 0
        if self.prefixes:
            request.num_prefilled = len(shared) * self.prefixes.page_size
            self.reused_tokens += request.num_prefilled
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
        request.slot, request.pages = None, []
