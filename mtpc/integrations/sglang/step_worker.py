"""`--speculative-algorithm MTPC_STEP`: each iteration of SGLang is one step of mtpc."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from mtpc.errors import UnsupportedModelError
from mtpc.host.hosted import HostedModel
from mtpc.integrations.host_steps import Chunk, HostSteps, check_prefixes, compile_steps
from mtpc.integrations.sglang.algorithm import STEP_NAME
from mtpc.integrations.sglang.propose import by_pages
from mtpc.integrations.sglang.requests import end_broken, sampling_or_end
from mtpc.integrations.sglang.step_models.targets import HostedTarget


class StepWorker(BaseSpecWorker):
    """A worker whose forward is mtpc's step: verify, acceptance and all drafts are one graph.

    SGLang keeps scheduler, prefix cache, pages and pools. A request's slot is SGLang's index in
    `ReqToTokenPool`, whose index 0 no request has, and pages are SGLang's, whose page 0 no request
    has. The MTP layers' caches and mtpc's state rows are mtpc's own.

    Args:
        server_args: SGLang's options.
        gpu_id: unused.
        nccl_port: unused.
        target_worker: SGLang's worker, whose model is a `HostedTarget`.

    Raises:
        UnsupportedModelError: SGLang has a model of its own.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__()
        model = target_worker.model_runner.model
        if not isinstance(model, HostedTarget):
            raise UnsupportedModelError(
                f"--speculative-algorithm {STEP_NAME}: the target is {type(model).__module__}."
                f"{type(model).__name__}; set "
                "SGLANG_EXTERNAL_MODEL_PACKAGE=mtpc.integrations.sglang.step_models"
            )
        self.server_args, self._target_worker = server_args, target_worker

    @property
    def draft_worker(self) -> None:
        """None: mtpc's steps draft."""
        return None

    def alloc_memory_pool(self, *pools: Any, **named: Any) -> None:
        """Compile the steps over SGLang's pools, which exist now."""
        super().alloc_memory_pool(*pools, **named)
        runner = self.target_worker.model_runner
        pool, page_size = runner.token_to_kv_pool, runner.page_size
        drafts = self.server_args.speculative_num_draft_tokens
        self.page_size = page_size
        hosted = compile_steps(
            self.server_args.model_path,
            drafts - 1,
            (pool.size // page_size + 1, page_size),
            runner.model_config.context_len,
            self.req_to_token_pool.size,
            (runner.device, runner.dtype),
        )
        check_prefixes(hosted, not self.server_args.disable_radix_cache)
        layers = runner.model_config.num_hidden_layers
        self.steps = HostSteps(hosted, host_pools(hosted, pool, layers))

    @torch.no_grad()
    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        """Run one iteration of SGLang's scheduler.

        Args:
            batch: SGLang's `ScheduleBatch`: prompts' chunks, or requests that decode.

        Returns:
            SGLang's `GenerationBatchResult`.
        """
        slots = batch.req_pool_indices.long()
        if batch.forward_mode.is_extend():
            return self._prefill(batch, slots)
        drafts = self.steps.model.options.spec_tokens
        self._set_tables(slots, batch.seq_lens + 2 * drafts + 1)
        emitted = self.steps.decode(slots)
        counts = emitted.counts.tolist()
        end_broken([req for req, count in zip(batch.reqs, counts, strict=True) if not count])
        lengths = emitted.counts.clamp(min=1)
        last = emitted.token_ids.gather(1, lengths.long()[:, None] - 1)[:, 0]
        return GenerationBatchResult(
            next_token_ids=emitted.token_ids.flatten(),
            accept_lens=lengths,
            new_seq_lens=batch.seq_lens + lengths,
            next_draft_input=_carried(last),
            speculative_num_draft_tokens=drafts + 1,
            can_run_cuda_graph=True,
        )

    def _prefill(self, batch: Any, slots: Tensor) -> Any:
        # SGLang gives pages for drafts with the next iteration. Until then page 0 takes them.
        self._set_tables(slots, batch.seq_lens)
        chunks = []
        for slot, req, begin, count in zip(
            slots.tolist(), batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            text = req.full_untruncated_fill_ids
            end = begin + count
            following = text[end] if end < len(text) else None
            # SGLang's repetition penalty counts the output alone.
            self.steps.set_sampling(slot, sampling_or_end(req), (), req.output_ids)
            chunks.append(Chunk(slot, begin, list(text[begin:end]), following))
        found = self.steps.prefill(chunks)
        pairs = zip(batch.reqs, chunks, found, strict=True)
        end_broken([req for req, c, token in pairs if token is None and c.following is None])
        tokens = torch.tensor([token or 0 for token in found], device=slots.device)
        return GenerationBatchResult(
            next_token_ids=tokens,
            new_seq_lens=batch.seq_lens,
            next_draft_input=_carried(tokens),
        )

    def _set_tables(self, slots: Tensor, lengths: Tensor) -> None:
        """Write the block tables of requests, of which the first `lengths` [R] tokens are used."""
        pages = self.req_to_token_pool.req_to_token[slots, :: self.page_size] // self.page_size
        begins = torch.arange(pages.shape[1], device=pages.device) * self.page_size
        self.steps.set_tables(slots, pages.where(begins < lengths[:, None], 0))


def host_pools(hosted: HostedModel, pool: Any, num_layers: int) -> dict[str, Tensor]:
    """SGLang's caches of the target's layers, as views by pages, by mtpc's names.

    Args:
        hosted: what needs them.
        pool: SGLang's pool.
        num_layers: decoder layers of the target; what comes after them are MTP layers.

    Raises:
        UnsupportedModelError: the pool is of another kind; or see `by_pages`.
    """
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool, HybridLinearKVPool):
        raise UnsupportedModelError(
            f"--speculative-algorithm {STEP_NAME}: the KV pool is {type(pool).__name__}; expected "
            "a plain pool of K and V, of latents, or that of a hybrid model: use NEXTN"
        )
    found = {}
    for name, buffer in hosted.buffers.items():
        layer, _, role = name.removeprefix("kv.").partition(".")
        if buffer.is_paged and int(layer) < num_layers:
            found[name] = by_pages(pool, int(layer), role)
    return found


def _carried(last: Tensor) -> EagleDraftInput:
    """What SGLang's scheduler carries, filters and merges from one iteration to the next.

    The drafts lie in mtpc's state rows; only the last token is also here.
    """
    return EagleDraftInput(
        topk_p=last.new_zeros((len(last), 1), dtype=torch.float32),
        topk_index=last.new_zeros((len(last), 1)),
        bonus_tokens=last.int(),
    )
