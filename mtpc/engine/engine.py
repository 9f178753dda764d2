"""The engine: admits requests into slots and pages, replays steps, reads results.

Everything decided per token is in the captured step; the host admits, frees, and reads
`out_token_ids` and `num_emitted`. Admission is first come, first served. A request reserves all
the pages it can ever need when it is admitted, so it never stalls once running. Prompts are
prefilled chunk by chunk before the next decode step.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc.capture.program import Program
from mtpc.config import CompileOptions
from mtpc.engine.pages import FreeList
from mtpc.engine.request import FinishReason, Request
from mtpc.engine.stats import Stats
from mtpc.errors import CapacityError, RequestError
from mtpc.layout import MAX_STOP_IDS, NULL_PAGE, SCRATCH_SLOT
from mtpc.pieces.accept import STOPPED_BY_LENGTH, STOPPED_BY_NONFINITE, STOPPED_BY_TOKEN

_REASONS: dict[int, FinishReason] = {
    STOPPED_BY_LENGTH: "length",
    STOPPED_BY_TOKEN: "stop",
    STOPPED_BY_NONFINITE: "nonfinite",
}


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request after one step; `finish_reason` where it ended."""

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None


class Engine:
    """Runs requests on a program.

    Args:
        program: captured steps.
        options: what it was compiled with.
        vocab_size: ids must be below it.
    """

    def __init__(self, program: Program, options: CompileOptions, vocab_size: int):
        self.program, self.options, self.vocab_size = program, options, vocab_size
        self.pages = FreeList("KV pages", NULL_PAGE + 1, options.pool_pages - 1)
        self.slots = FreeList("request slots", SCRATCH_SLOT + 1, program.max_reqs)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._stats = Stats(options.spec_tokens)
        self._ids = itertools.count()

    @property
    def stats(self) -> Stats:
        """Counts so far, replays and host writes as the program counted them."""
        self._stats.replays = self.program.replays.copy()
        self._stats.host_writes = self.program.host_writes
        return self._stats

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(
        self, prompt_ids: list[int], max_new_tokens: int, stop_ids: tuple[int, ...] = ()
    ) -> int:
        """Queue a request.

        Args:
            prompt_ids: token ids, not empty, each below vocab_size.
            max_new_tokens: at least 1; with the prompt at most `max_len`.
            stop_ids: at most MAX_STOP_IDS ids that end the request.

        Returns:
            The request's id.

        Raises:
            RequestError: one of the above does not hold.
            CapacityError: the page pool cannot hold the request even when it is empty.
        """
        request = Request(next(self._ids), list(prompt_ids), max_new_tokens, tuple(stop_ids))
        self.check(request)
        self.waiting.append(request)
        return request.request_id

    def check(self, request: Request) -> None:
        """Refuse what can never be served; see `add`."""
        prompt, limit = request.prompt_ids, self.options.sequence_limit
        if not prompt:
            raise RequestError("the prompt is empty; expected at least one token")
        bad = [i for i in prompt if not isinstance(i, int) or not 0 <= i < self.vocab_size]
        if bad:
            raise RequestError(f"prompt id {bad[0]!r}; expected ids in 0..{self.vocab_size - 1}")
        new = request.max_new_tokens
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise RequestError(f"max_new_tokens is {new!r}; expected an integer >= 1")
        if len(prompt) + new > limit:
            raise RequestError(
                f"prompt of {len(prompt)} + max_new_tokens {new} = {len(prompt) + new} tokens; "
                f"max_len is {limit}: shorten it, or compile with a larger max_len"
            )
        odd = [i for i in request.stop_ids if isinstance(i, bool) or not isinstance(i, int)]
        if odd:
            raise RequestError(f"stop id {odd[0]!r}; expected token ids (integers)")
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(request.stop_ids)} stop ids; at most {MAX_STOP_IDS} are supported"
            )
        pages = self._pages_for(request)
        if pages > self.pages.count:
            raise CapacityError(
                f"a request of {len(prompt) + new} tokens needs {pages} pages of "
                f"{self.options.page_size} tokens, the pool has {self.pages.count}: raise num_pages"
            )

    def _pages_for(self, request: Request) -> int:
        longest = len(request.prompt_ids) + request.max_new_tokens
        return self.options.blocks_per_request(longest)

    def abort(self, request_id: int) -> None:
        """Drop a request at any moment; unknown or finished ids are ignored."""
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                self._finish(request, "aborted")

    def step(self) -> list[StepOutput]:
        """One iteration: admit, then prefill one chunk or decode all running requests."""
        self._admit()
        for request in self.running:
            if not request.is_prefilled:
                return self._prefill(request)
        return self._decode() if self.running else []

    def _admit(self) -> None:
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            if self._pages_for(request) > self.pages.num_free:
                return
            self.waiting.popleft()
            request.pages = self.pages.take(self._pages_for(request))
            request.slot = self.slots.take(1)[0]
            self._write_state(request, request.slot)
            self.running.append(request)

    def _write_state(self, request: Request, slot: int) -> None:
        """The only writes a request ever costs the host, prompt chunks aside."""
        shared, write = self.program.shared, self.program.write
        table = torch.full_like(shared["state.block_table"][slot], NULL_PAGE)
        table[: len(request.pages)] = torch.tensor(request.pages, dtype=table.dtype)
        stops = torch.full_like(shared["state.stop_ids"][slot], -1)
        stops[: len(request.stop_ids)] = torch.tensor(request.stop_ids, dtype=stops.dtype)
        write(shared["state.block_table"][slot], table)
        write(shared["state.stop_ids"][slot], stops)
        write(shared["state.committed_lens"][slot], 0)
        write(shared["state.remaining_tokens"][slot], request.max_new_tokens)

    def _prefill(self, request: Request) -> list[StepOutput]:
        start = time.perf_counter()
        key = self.program.prefill_key()
        buffers, write = self.program.steps[key].buffers, self.program.write
        begin = request.num_prefilled
        chunk = request.prompt_ids[begin : begin + key.bucket.query_len]
        end = begin + len(chunk)
        following = request.prompt_ids[end] if end < len(request.prompt_ids) else -1
        assert request.slot is not None
        self.program.set_batch(key, [request.slot])
        write(buffers["batch.prompt_ids"], torch.tensor(chunk))
        write(buffers["batch.num_input"], len(chunk))
        write(buffers["batch.next_prompt_id"], following)
        self.program.run(key)
        request.num_prefilled = end
        self._stats.prefill_steps += 1
        self._stats.prompt_tokens += len(chunk)
        outputs = self._read(buffers, [request]) if request.is_prefilled else []
        self._stats.prefill_s += time.perf_counter() - start
        return outputs

    def _decode(self) -> list[StepOutput]:
        start = time.perf_counter()
        requests = list(self.running)
        key = self.program.decode_key(len(requests))
        self.program.set_batch(key, [r.slot for r in requests if r.slot is not None])
        buffers = self.program.run(key)
        self._stats.decode_steps += 1
        for row in range(len(requests)):
            accepted, emitted = (
                buffers["batch.num_accepted"][row],
                buffers["batch.num_emitted"][row],
            )
            self._stats.count_acceptance(int(accepted), int(emitted))
        outputs = self._read(buffers, requests)
        self._stats.decode_s += time.perf_counter() - start
        return outputs

    def _read(self, buffers: Mapping[str, Tensor], requests: list[Request]) -> list[StepOutput]:
        """Hand out what a step emitted, row by row."""
        rows = zip(
            requests,
            buffers["batch.out_token_ids"].tolist(),
            buffers["batch.num_emitted"].tolist(),
            buffers["batch.stop_reason"].tolist(),
            strict=False,
        )
        outputs = []
        for request, token_ids, count, code in rows:
            emitted, reason = token_ids[:count], _REASONS.get(code)
            request.output_ids += emitted
            self._stats.emitted_tokens += len(emitted)
            if reason is not None:
                self._finish(request, reason)
            outputs.append(StepOutput(request.request_id, emitted, reason))
        return outputs

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        assert request.slot is not None
        if reason == "aborted":  # The device still believes in it.
            self.program.write(self.program.shared["state.remaining_tokens"][request.slot], 0)
        self.pages.give_back(request.pages)
        self.slots.give_back([request.slot])
        request.slot, request.pages = None, []
