"""SGLang's scheduler as its speculative worker sees it: pools, pages, and batches of requests.

Written from SGLang 0.5.23: `ReqToTokenPool` (mem_cache/memory_pool.py:376-411), whose row 0 no
request has; `MHATokenToKVPool`, whose page 0 no request has; what `ScheduleBatch` hands over
(managers/schedule_batch.py:2856-2886); `_resolve_spec_v2_tokens`
(scheduler_components/batch_result_processor.py:770-844); how many tokens ahead slots are given out
(speculative/eagle_utils.py:857-881).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

GREEDY: dict[str, Any] = dict(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, sampling_seed=None)
GREEDY |= dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
GREEDY |= dict(min_new_tokens=0, logit_bias=None)
"""Temperature 0, as SGLang stores it (sampling/sampling_params.py:236-241)."""
TOP_K_ALL = 1 << 30


@dataclass(eq=False)
class Req:
    """A request: `Req` of managers/schedule_batch.py."""

    prompt: list[int]
    slot: int
    output: list[int] = field(default_factory=list)
    committed: int = 0
    allocated: int = 0
    to_finish: Any = None
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(**GREEDY))
    return_logprob = False
    return_hidden_states = False
    custom_logit_processor = grammar = input_embeds = multimodal_inputs = lora_id = None

    @property
    def output_ids(self) -> list[int]:
        return self.output

    @property
    def full_untruncated_fill_ids(self) -> list[int]:
        return [*self.prompt, *self.output]

    def finished(self) -> bool:
        return False


class KVPool:
    """`MHATokenToKVPool`: K and V of each layer by slot, with NaN where nothing was written."""

    def __init__(
        self, layers: Sequence[int], pages: int, shape: tuple[int, int, int], dtype: torch.dtype
    ):
        self.page_size, heads, width = shape
        self.size = (pages - 1) * self.page_size  # Page 0 comes on top.
        rows = (pages * self.page_size, heads, width)
        self.rows = {
            (role, layer): torch.full(rows, float("nan"), dtype=dtype)
            for layer in layers
            for role in "kv"
        }

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.rows["k", layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.rows["v", layer_id]


class HybridPool(KVPool):
    """`HybridLinearKVPool`: it has the layers with full attention alone, by the model's numbers."""


class BaseSpecWorker:
    """speculative/base_spec_worker.py:111-311: what a worker without a draft model takes over."""

    @property
    def target_worker(self) -> Any:
        return self._target_worker  # type: ignore[attr-defined]

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator


class Scheduler:
    """Gives requests slots and pages, and runs a worker.

    Args:
        worker: of `MTPC_STEP`, without pools.
        slots: requests at once.
        page_size: tokens.
        width: most tokens of a request.
    """

    def __init__(self, worker: Any, slots: int, page_size: int, width: int):
        self.worker, self.page_size = worker, page_size
        table = torch.zeros((slots + 1, width), dtype=torch.int32)
        self.pool = SimpleNamespace(size=slots, req_to_token=table)
        worker.alloc_memory_pool(None, self.pool, None)
        pages = worker.target_worker.model_runner.token_to_kv_pool.size // page_size
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        self.free = (order + 1).tolist()
        self.accepted: list[int] = []
        self.num_decoded = 0

    def give(self, req: Req, length: int) -> None:
        """Give a request the pages of its first `length` tokens, beside those that it has."""
        row, size = self.pool.req_to_token[req.slot], self.page_size
        for begin in range(req.allocated, length, size):
            first = self.free.pop() * size
            row[begin : begin + size] = torch.arange(first, first + size)
            req.allocated = begin + size

    def share(self, req: Req, other: Req, length: int) -> None:
        """Let a request begin with the pages of another, as SGLang's prefix cache does."""
        table = self.pool.req_to_token
        table[req.slot, :length] = table[other.slot, :length]
        req.committed = req.allocated = length

    def extend(self, reqs: Sequence[Req], counts: Sequence[int]) -> list[int]:
        """Prefill the next tokens of prompts; the worker's tokens."""
        for req, count in zip(reqs, counts, strict=True):
            self.give(req, req.committed + count)
        result = self._run(
            reqs,
            is_extend=True,
            prefix_lens=[req.committed for req in reqs],
            extend_lens=list(counts),
            seq_lens=torch.tensor(
                [req.committed + count for req, count in zip(reqs, counts, strict=True)]
            ),
        )
        tokens: list[int] = result.next_token_ids.tolist()
        for req, count, token in zip(reqs, counts, tokens, strict=True):
            req.committed += count
            if req.committed == len(req.prompt):
                req.output.append(token)
        return tokens

    def decode(self, reqs: Sequence[Req]) -> None:
        """One iteration: what was accepted becomes output."""
        width = self.worker.server_args.speculative_num_draft_tokens
        self.num_decoded += 1
        for req in reqs:
            self.give(req, req.committed + 2 * width)
        seq_lens = torch.tensor([req.committed for req in reqs])
        result = self._run(reqs, is_extend=False, seq_lens=seq_lens)
        assert result.speculative_num_draft_tokens == width
        rows = result.next_token_ids.view(-1, width).tolist()
        counts = result.accept_lens.tolist()
        assert result.new_seq_lens.tolist() == (seq_lens + result.accept_lens).tolist()
        for req, row, count, last in zip(
            reqs, rows, counts, result.next_draft_input.bonus_tokens.tolist(), strict=True
        ):
            req.output += row[:count]
            assert req.output[-1] == last
            req.committed += count
            self.accepted.append(count - 1)

    def leave(self, req: Req) -> None:
        """Take a request's pages back. Its row keeps what it held, as SGLang's does."""
        row = self.pool.req_to_token[req.slot, : req.allocated : self.page_size]
        self.free += (row // self.page_size).tolist()

    def _run(self, reqs: Sequence[Req], is_extend: bool, **fields: Any) -> Any:
        batch = SimpleNamespace(
            reqs=list(reqs),
            req_pool_indices=torch.tensor([req.slot for req in reqs]),
            forward_mode=SimpleNamespace(is_extend=lambda: is_extend),
            **fields,
        )
        result = self.worker.forward_batch_generation(batch)
        for req in reqs:  # What the row still holds of another request is not this one's.
            table = self.worker.steps.state["state.block_table"][req.slot]
            assert not table[-(-req.allocated // self.page_size) :].any()
        return result
