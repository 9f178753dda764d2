"""Iterations of vLLM's scheduler as mtpc's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mtpc.errors import NumericsError, UnsupportedModelError
from mtpc.integrations.host_steps import Chunk, HostSteps
from mtpc.integrations.vllm.step_requests import sampling_of
from mtpc.layout.specs import NO_TOKEN
from mtpc.sampling_params import SamplingParams


@dataclass
class Request:
    """What a worker knows of a request of vLLM's.

    Attributes:
        token_ids: prompt and output.
        pages: vLLM's blocks, in order.
        computed: tokens whose KV is final.
        num_prompt: tokens of the prompt.
        sampling: how its tokens are chosen.
        slot: its slot; 0 until it is scheduled, and after vLLM has preempted it.
        drafts: what vLLM may schedule next; None until the text has been prefilled to its end.
    """

    token_ids: list[int]
    pages: list[int]
    computed: int
    num_prompt: int
    sampling: SamplingParams
    slot: int = 0
    drafts: list[int] | None = None


@dataclass
class StepBatch:
    """Runs what vLLM's scheduler hands to a worker: `SchedulerOutput` of v1/core/sched/output.py.

    Requests that decode share one step, of which verify, acceptance and all drafts are one graph;
    chunks of prompts are prefill steps beside it.

    Attributes:
        steps: the steps.
        requests: those that vLLM has not finished, by id.
    """

    steps: HostSteps
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.steps.model.num_slots, 0, -1))

    def run(self, output: Any) -> dict[str, list[int]]:
        """One iteration of the scheduler.

        Args:
            output: vLLM's `SchedulerOutput`.

        Returns:
            New tokens of each scheduled request; none where a chunk does not end its text.

        Raises:
            NumericsError: a request's logits were not finite.
        """
        self._take(output)
        prefilled, decoded, chunks = list[Request](), list[Request](), list[Chunk]()
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            request.slot = request.slot or self._free.pop()
            if request.drafts is not None:
                scheduled = output.scheduled_spec_decode_tokens.get(name, ())
                self._choose_drafts(request, scheduled)
                decoded.append(request)
                continue
            # Behind a text that lacks one token, vLLM may count drafts that do not exist.
            end = request.computed + count
            following = request.token_ids[end] if end < len(request.token_ids) else None
            text = request.token_ids[request.computed : end]
            self._set_sampling(request)
            chunks.append(Chunk(request.slot, request.computed, text, following))
            prefilled.append(request)
        self._set_tables([*prefilled, *decoded])
        tokens = self._prefill(prefilled, chunks) | self._decode(decoded)
        found = {name: tokens[self.requests[name].slot] for name in output.num_scheduled_tokens}
        broken = [name for name, new in found.items() if new is None]
        if broken:
            raise NumericsError(f"the logits of {', '.join(broken)} were not finite")
        return {name: new or [] for name, new in found.items()}

    def _take(self, output: Any) -> None:
        """Take over what vLLM has finished, preempted, begun and given pages to."""
        for name in output.preempted_req_ids or ():
            if name in self.requests:
                self._leave(self.requests[name])
        for name in output.finished_req_ids:
            if name in self.requests:
                self._leave(self.requests.pop(name))
        for new in output.scheduled_new_reqs:
            if new.mm_features:
                raise UnsupportedModelError(
                    f"request {new.req_id} has images, which mtpc's steps in vLLM do not take: "
                    "start vLLM with --language-model-only"
                )
            if new.req_id in self.requests:
                self._leave(self.requests[new.req_id])
            # The V2 runner is told of a preempted request as of a new one, output included.
            self.requests[new.req_id] = Request(
                list(new.prefill_token_ids or new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
                len(new.prompt_token_ids),
                sampling_of(new.sampling_params),
            )
        cached = output.scheduled_cached_reqs
        for name, pages, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self.requests[name]
            if name in cached.resumed_req_ids:
                self._leave(request)
                request.pages.clear()
            request.pages += pages[0] if pages else ()
            request.computed = computed

    def _leave(self, request: Request) -> None:
        """Take a request's slot back. It is prefilled anew if it comes again."""
        if request.slot:
            self._free.append(request.slot)
        request.slot, request.drafts = 0, None

    def _choose_drafts(self, request: Request, scheduled: Sequence[int]) -> None:
        """Let the step verify the drafts that vLLM has scheduled, which may be fewer."""
        wanted = [*scheduled, *[NO_TOKEN] * (self._spec_tokens - len(scheduled))]
        if wanted != request.drafts:
            slot, drafts = torch.tensor([request.slot]), torch.tensor([wanted])
            self.steps.set_drafts(slot, drafts)

    @property
    def _spec_tokens(self) -> int:
        return self.steps.model.options.spec_tokens

    def _set_sampling(self, request: Request) -> None:
        text, begin = request.token_ids, request.num_prompt
        self.steps.set_sampling(request.slot, request.sampling, text[:begin], text[begin:])

    def _set_tables(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        width = self.steps.state["state.block_table"].shape[1]
        tables = torch.tensor([[*r.pages, *[0] * (width - len(r.pages))] for r in requests])
        self.steps.set_tables(torch.tensor([r.slot for r in requests]), tables)

    def _prefill(
        self, requests: Sequence[Request], chunks: Sequence[Chunk]
    ) -> dict[int, list[int] | None]:
        """New tokens by slot; None: not finite."""
        found = dict[int, list[int] | None]()
        ended = list[Request]()
        first = self.steps.prefill(chunks)
        for request, chunk, token in zip(requests, chunks, first, strict=True):
            found[request.slot] = [] if chunk.following is not None else None
            if token is not None:
                found[request.slot] = [token]
                request.token_ids.append(token)
                ended.append(request)
        self._read_drafts(ended)
        return found

    def _decode(self, requests: Sequence[Request]) -> dict[int, list[int] | None]:
        """New tokens by slot; None: not finite."""
        if not requests:
            return {}
        emitted = self.steps.decode(torch.tensor([request.slot for request in requests]))
        found = dict[int, list[int] | None]()
        rows = zip(requests, emitted.token_ids.tolist(), emitted.counts.tolist(), strict=True)
        for request, row, count in rows:
            found[request.slot] = row[:count] or None
            request.token_ids += row[:count]
        self._read_drafts(requests)
        return found

    def _read_drafts(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        drafts = self.steps.drafts(torch.tensor([request.slot for request in requests]))
        for request, row in zip(requests, drafts.tolist(), strict=True):
            request.drafts = row
