"""A small server on mtpc's lower level, with its own scheduler, page allocator and memory.

mtpc only computes `verify` and `propose`. This file has everything else, and owns all tensors. The
contract in docs/embedding.md says what the host writes and when. Run it with
`python examples/host.py [CHECKPOINT]`.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

import mtpc
from mtpc.host.contract import HostBuffer
from mtpc.host.program import RowResult
from mtpc.layout import StepKey


@dataclass(eq=False)
class Request:
    """A prompt and its progress. A preempted request prefills its prompt and its output again."""

    prompt: list[int]
    max_new: int
    stop_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    num_input: int = 0
    num_prefilled: int = 0
    is_finished: bool = False

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def decodes(self) -> bool:
        return self.num_prefilled == self.num_input


class Host:
    """Continuous batching with pages on demand. Decoding requests share prefill steps.

    Args:
        model: the result of `mtpc.compile_host`.
    """

    def __init__(self, model: mtpc.HostedModel):
        self.model = model
        self.shared = {name: self._tensor(buffer) for name, buffer in model.buffers.items()}
        self.steps = {
            key: {name: buffer.allocate() for name, buffer in model.step_buffers(key).items()}
            for key in model.keys
        }
        self.program = model.bind(self.shared, self.steps)
        self.free_pages = list(range(1, model.options.num_pages))  # Page 0 is the null page.
        self.free_slots = list(range(1, model.num_slots + 1))  # Slot 0 is the scratch slot.
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.accepted: Counter[int] = Counter()
        self.num_preempted = 0
        self._prefilled_last = False

    def _tensor(self, buffer: HostBuffer) -> torch.Tensor:
        """Allocate a buffer. A page pool is a slice of a larger pool, as a host may have it."""
        if not buffer.is_paged:
            return buffer.allocate()
        ours = 3  # Pages at the front that mtpc does not use.
        pool = torch.zeros((ours + buffer.shape[0], *buffer.shape[1:]), dtype=buffer.dtype)
        return pool[ours:]

    def add(self, prompt: list[int], max_new: int, stop_ids: tuple[int, ...] = ()) -> Request:
        """Queue a request."""
        if not 0 < max_new <= self.model.options.max_len - len(prompt):
            raise ValueError(
                f"prompt of {len(prompt)} + max_new {max_new} tokens; expected max_new >= 1, and "
                f"at most max_len {self.model.options.max_len} together"
            )
        request = Request(list(prompt), max_new, stop_ids)
        if self.model.pages_for(len(prompt) + max_new) > self.model.options.num_pages - 1:
            raise ValueError("the request needs more pages than the whole pool has")
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request at any moment, even between verify and propose."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.is_finished = True

    def step(self) -> bool:
        """Run one iteration, and return whether there is work left.

        Decoding requests share the prefill step of a prompt. If that leaves less than half of the
        step's tokens for the prompt, prefill steps and decode steps alternate.
        """
        self._admit()
        decoding = self._with_pages([r for r in self.running if r.decodes])
        prompts = [r for r in self.running if not r.decodes][:1]
        joins = 2 * self._room(decoding) >= self.model.prefill_key.bucket.num_tokens
        self._prefilled_last = bool(prompts) and (joins or not decoding or not self._prefilled_last)
        if self._prefilled_last:
            beside = decoding if joins else []
            self._write_chunk(prompts[0], beside)
            self._run(self.model.prefill_key, beside, prompts)
        elif decoding:
            self._run(self.model.decode_key(len(decoding)), decoding, [])
        return bool(self.running or self.waiting)

    def _room(self, decoding: list[Request]) -> int:
        """The number of prompt tokens that fit into a prefill step beside decoding requests."""
        key = self.model.prefill_key
        has_row = len(decoding) < key.bucket.num_reqs
        return has_row * (key.bucket.num_tokens - len(decoding) * key.max_emitted)

    def _run(self, key: StepKey, decoding: list[Request], prompts: list[Request]) -> None:
        """Run verify, read the results and decide which requests go on, then run propose."""
        indices, batch = self.steps[key]["batch.state_indices"], decoding + prompts
        indices.zero_()
        indices[: len(batch)] = torch.tensor([request.slot for request in batch])
        self.program.verify(key)
        for request, row in zip(batch, self.program.results(key), strict=False):
            if request in decoding:
                self.accepted[row.num_accepted] += 1
            self.take(request, row)
        if not all(request.is_finished for request in batch):
            self.program.propose(key)
        self._release_finished()

    def take(self, request: Request, row: RowResult) -> None:
        """Take a step's tokens. A real server also streams them, and looks for stop strings."""
        request.output += row.token_ids
        request.is_finished |= row.stop_reason is not None

    def _admit(self) -> None:
        """Admit requests in order of arrival, while the pool has pages for their prefill."""
        self._release_finished()
        while self.waiting and self.free_slots:
            needed = self.model.pages_for(len(self.waiting[0].text))
            if needed + len(self.running) > len(self.free_pages):
                return
            self._join(self.waiting.popleft(), needed)

    def _join(self, request: Request, num_pages: int) -> None:
        """Give a request a slot and pages, and write its four rows of the state."""
        request.slot, request.pages = self.free_slots.pop(), self._take_pages(num_pages)
        request.num_input, request.num_prefilled = len(request.text), 0
        state, slot = self.shared, request.slot
        state["state.block_table"][slot].zero_()
        state["state.block_table"][slot, :num_pages] = torch.tensor(request.pages).int()
        state["state.stop_ids"][slot].fill_(-1)
        state["state.stop_ids"][slot, : len(request.stop_ids)] = torch.tensor(request.stop_ids)
        state["state.committed_lens"][slot] = 0
        state["state.remaining_tokens"][slot] = request.max_new - len(request.output)
        self.running.append(request)

    def _take_pages(self, count: int) -> list[int]:
        return [self.free_pages.pop() for _ in range(count)]

    def _with_pages(self, decoding: list[Request]) -> list[Request]:
        """Give each request the pages of its next step. Preempt the newest if the pool is empty.

        Returns:
            The requests that are not preempted.
        """
        for request in decoding:
            # The last emitted token has no KV yet, so the committed tokens are one less.
            missing = self.model.pages_for(len(request.text) - 1) - len(request.pages)
            while missing > len(self.free_pages) and request in self.running:
                self._preempt(self.running[-1])
            if missing > 0 and request in self.running:
                first = len(request.pages)
                request.pages += self._take_pages(missing)
                new = torch.tensor(request.pages[first:]).int()
                self.shared["state.block_table"][request.slot, first : first + missing] = new
        return [request for request in decoding if request in self.running]

    def _write_chunk(self, request: Request, decoding: list[Request]) -> None:
        """Write the next chunk of a request's tokens, in the row after the decoding requests."""
        batch, text, row = self.steps[self.model.prefill_key], request.text, len(decoding)
        begin = request.num_prefilled
        end = min(begin + self._room(decoding), request.num_input)
        batch["batch.is_decoding"].zero_()
        batch["batch.is_decoding"][:row] = 1
        batch["batch.prompt_ids"][: end - begin] = torch.tensor(text[begin:end])
        batch["batch.num_input"][row] = end - begin
        batch["batch.next_prompt_id"][row] = text[end] if end < request.num_input else -1
        request.num_prefilled = end

    def _preempt(self, request: Request) -> None:
        """Move a request back to the front of the queue. It computes its tokens again later."""
        self.num_preempted += 1
        self._release(request)
        self.waiting.appendleft(request)

    def _release_finished(self) -> None:
        for request in [r for r in self.running if r.is_finished]:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.free_pages += request.pages
        self.free_slots.append(request.slot)
        request.pages, request.slot = [], 0


def main() -> None:
    from mtpc.cli.demo import demo_checkpoint

    path = sys.argv[1] if len(sys.argv) > 1 else demo_checkpoint()
    model = mtpc.compile_host(path, spec_tokens=3, batch_buckets=(1, 4), max_len=256)
    host = Host(model)
    prompts = ["The with statement", "If the class", "A generator is"]
    requests = [host.add(model.served.encode(text), 32) for text in prompts]
    while host.step():
        pass
    for text, request in zip(prompts, requests, strict=True):
        print(text + model.served.decode(request.output))
    print("steps by accepted drafts:", dict(sorted(host.accepted.items())))


if __name__ == "__main__":
    main()
