"""Runs SGLang's draft phase as one replay, in place of SGLang's own draft graph runner."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from mtpc.backends import Backend, make_backend
from mtpc.environment import cache_directory
from mtpc.errors import UnsupportedModelError
from mtpc.integrations.chain import ChainPlan, DraftChain, HostPools
from mtpc.integrations.host_steps import buckets_up_to
from mtpc.integrations.sglang.draft import HostedDraft
from mtpc.store.entries import EntryStore

_logger = logging.getLogger(__name__)


class ProposeRunner:
    """Chains drafts for SGLang's `EagleDraftWorker`, instead of one forward per draft.

    SGLang calls `can_run_graph` and `execute` of its worker's `cuda_graph_runner`, and prepares no
    attention metadata. It computes the first draft itself, in its forward over the verified rows.

    Args:
        worker: SGLang's draft worker, with allocated pools and loaded weights.

    Raises:
        UnsupportedModelError: mtpc has not traced the draft, or the chain cannot address the pool.
    """

    def __init__(self, worker: Any):
        self.worker = worker
        runner = worker.draft_runner
        hosted = runner.model
        if not isinstance(hosted, HostedDraft):
            raise UnsupportedModelError(
                f"the draft is {type(hosted).__module__}.{type(hosted).__name__}, which mtpc did "
                "not trace; set SGLANG_EXTERNAL_MODEL_PACKAGE=mtpc.integrations.sglang.models"
            )
        self.req_to_token: Tensor = worker.req_to_token_pool.req_to_token
        self.page_size: int = runner.token_to_kv_pool.page_size
        columns = -(-self.req_to_token.shape[1] // self.page_size)
        weight = hosted.lm_head.weight
        backend = choose_backend(weight.device)
        vocab = hosted.draft.config.get_text_config(decoder=True).vocab_size
        self.chain = DraftChain(
            hosted.draft,
            GatheredHead(hosted.lm_head, vocab) if hosted.draft.hosted else weight,
            HostPools(host_pools(runner.token_to_kv_pool, weight.dtype), columns),
            ChainPlan(
                worker.speculative_num_steps - 1,
                buckets_up_to(worker.req_to_token_pool.size),
                vocab,
            ),
            backend,
        )
        buckets = ", ".join(map(str, self.chain.plan.buckets))
        drafts = self.chain.plan.steps
        _logger.info(
            "mtpc: %d drafts after the first as one graph on backend %r, for batches up to %s",
            *(drafts, backend.name, buckets),
        )
        for note, count in backend.notes.items():
            _logger.warning("mtpc: %s (%d)", note, count)

    def can_run_graph(self, forward_batch: Any) -> bool:
        """Whether the batch has requests."""
        return not forward_batch.forward_mode.is_idle()

    def execute(self, forward_batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Draft for a batch.

        Returns:
            The four values that SGLang expects: the parents and the score indices of a chain, which
            are constant; the drafts, int64 [R, steps]; and what the drafts were drawn from, float32
            [R, steps, V] with rejection sampling, else None.
        """
        given, count = forward_batch.spec_info, forward_batch.batch_size
        pages = self.req_to_token[forward_batch.req_pool_indices, :: self.page_size]
        more = self.chain.propose(
            given.topk_index[:, 0],
            given.hidden_states,
            forward_batch.positions,
            pages // self.page_size,
        )
        drafts = torch.cat([given.topk_index, more], 1)
        parents = self.worker._topk1_parents_prealloc[:count]
        scores = self.worker._topk1_score_indices_prealloc[:count]
        if given.draft_probs is None or forward_batch.sampling_info.is_all_greedy:
            return parents, scores, drafts, None
        return parents, scores, drafts, proposals(given.draft_probs, more)


class GatheredHead(nn.Module):
    """SGLang's head, of which each rank has consecutive rows: [R, H] -> logits [R, V]."""

    def __init__(self, head: nn.Module, vocab_size: int):
        super().__init__()
        self.head, self.vocab_size = head, vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        weight: Any = self.head.weight
        part = nn.functional.linear(hidden, weight)
        whole: Tensor = get_parallel().tp_group.all_gather(part, -1)
        return whole[:, : self.vocab_size]


def proposals(first: Tensor, more: Tensor) -> Tensor:
    """What the drafts of a chain were drawn from.

    SGLang draws the first draft. Each later one is the argmax of its logits, so it was drawn from a
    distribution with all its mass at one token. Rejection sampling is exact for any distribution,
    if the draft was drawn from it.

    Args:
        first: float [R, V], what the first draft was drawn from.
        more: int64 [R, steps - 1], the later drafts.

    Returns:
        [R, steps, V], of the dtype of `first`.
    """
    certain = first.new_zeros(*more.shape, first.shape[1]).scatter_(2, more[..., None], 1.0)
    return torch.cat([first[:, None], certain], 1)


def choose_backend(device: torch.device) -> Backend:
    """Make the backend for SGLang's device.

    Raises:
        UnsupportedModelError: the device is neither an NVIDIA or AMD GPU nor a CPU.
    """
    names = {"cuda": "cuda", "cpu": "eager"}
    if device.type not in names:
        raise UnsupportedModelError(
            f"--speculative-algorithm MTPC runs on {device.type!r}; mtpc has backends for "
            f"{', '.join(names)}: use NEXTN"
        )
    # The cache has kernels that were compiled for this device, and its autotuning results.
    return make_backend(names[device.type], store=EntryStore(cache_directory()))


def host_pools(pool: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The draft's only layer in SGLang's pool, as views by pages.

    Args:
        pool: the draft runner's pool.
        dtype: dtype of the draft's weights.

    Returns:
        By role ("k" and "v", or "latent"), a view [pages, page size, ...].

    Raises:
        UnsupportedModelError: the pool is of another kind, stores another dtype, or has another
            memory layout.
    """
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool) or pool.dtype != dtype:
        raise UnsupportedModelError(
            f"the draft's KV pool is {type(pool).__name__} of {pool.dtype}; expected a plain "
            f"MHATokenToKVPool or MLATokenToKVPool of {dtype}, the weights' dtype: use NEXTN"
        )
    roles = ("latent",) if type(pool) is MLATokenToKVPool else ("k", "v")
    return {role: by_pages(pool, 0, role) for role in roles}


def by_pages(pool: Any, layer: int, role: str) -> Tensor:
    """A layer's rows in SGLang's pool as [pages, page size, ...], without what is after the last
    whole page.

    Args:
        pool: SGLang's pool.
        layer: the layer's number there.
        role: "k", "v" or "latent", of which all heads have one.

    Raises:
        UnsupportedModelError: the slots are not rows of a contiguous tensor.
    """
    rows = (pool.get_value_buffer if role == "v" else pool.get_key_buffer)(layer)
    rows = rows.flatten(1) if role == "latent" else rows
    if not rows.is_contiguous() or rows.dim() not in (2, 3):
        raise UnsupportedModelError(
            f"the draft's KV pool has the shape {tuple(rows.shape)}, strides {rows.stride()}; "
            "expected one contiguous row per slot: choose another attention backend or page size"
        )
    pages = rows.shape[0] // pool.page_size
    return rows[: pages * pool.page_size].view(pages, pool.page_size, *rows.shape[1:])
