"""Our ops on aiter's functions, with sizes of the bucket only.

Each takes a function of aiter, the arguments of an `mtpc::` operator, by their names, and what that
operator does not have. `define` makes an operator of it that is opaque to Inductor
and writes none of its arguments. (aiter's own registration can declare that every tensor is
written.) So what PyTorch computes for it is not here, but in `mtpc.backends.aiter.around`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtpc.ops import references
from mtpc.ops.signatures import with_signature
from mtpc.ops.traits import share_traits

Function = Callable[..., Any]
_FUNCTIONS: dict[str, Function] = {}
"""aiter's, by the name of the operator that calls it. An operator is defined once per process."""


def define(ours: Function, function: Function, of: str) -> Any:
    """The overload of `mtpc_aiter::NAME`, which computes `mtpc::OF` by a function of aiter.

    Args:
        ours: one of the functions below; its name is the operator's.
        function: of aiter.
        of: name of the `mtpc::` operator.
    """
    name = ours.__name__
    is_defined = name in _FUNCTIONS
    _FUNCTIONS[name] = function
    if not is_defined:
        _define(name, ours, of)
    return getattr(torch.ops.mtpc_aiter, name).default


def _define(name: str, ours: Function, of: str) -> None:
    reference, signature = references()[of], inspect.signature(ours, eval_str=True)
    parameters = list(signature.parameters.values())[1:]
    share_traits(name, reference)
    known = {argument.name for argument in reference._schema.arguments}
    count = sum(parameter.name in known for parameter in parameters)

    def call(*args: Any) -> Any:
        return ours(_FUNCTIONS[name], *args)

    call = with_signature(call, signature.replace(parameters=parameters))
    operator = torch.library.custom_op(f"mtpc_aiter::{name}", call, mutates_args=())
    operator.register_fake(lambda *args: reference(*args[:count]))


def paged_attention(
    function: Function, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, scale: float, sliding_window: int, softcap: float,
    sinks: Tensor | None, max_query_len: int,
) -> Tensor:  # fmt: skip
    """On `unified_attention`. Rows of requests that are off are left open.

    Its `max_seqlen_q` chooses block sizes; 1 says, too, that each request has one row. So any upper
    bound serves for requests of more rows.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    function(
        q=q,
        k=k_cache,
        v=v_cache,
        out=out,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_query_len,
        seqused_k=seq_lens,
        max_seqlen_k=block_table.shape[1] * k_cache.shape[1],
        softmax_scale=scale,
        causal=True,
        # Keys to the left of a row's own; -1 is all.
        window_size=(sliding_window - 1, 0) if sliding_window > 0 else (-1, -1),
        block_table=block_table,
        softcap=softcap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        sinks=sinks,
    )
    return out


def latent_attention(
    function: Function, q: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, scale: float, latent_rank: int, kv_indptr: Tensor,
    kv_indices: Tensor, kv_last_page_lens: Tensor, num_kv_splits: int, num_kv_splits_indptr: Tensor,
) -> Tensor:  # fmt: skip
    """On `mla_decode_fwd`, as a cache whose pages have one token, whatever they have in ours.
    Rows of requests that are off hold anything."""
    out = q.new_empty((*q.shape[:2], latent_rank))
    function(
        **_latents(q, latent_cache, out, query_start_loc, kv_indptr, kv_indices, kv_last_page_lens),
        max_seqlen_q=q.shape[0] // block_table.shape[0],
        page_size=1,
        nhead_kv=1,
        sm_scale=scale,
        num_kv_splits=num_kv_splits,
        num_kv_splits_indptr=num_kv_splits_indptr,
    )
    return out


def latent_prefill(
    function: Function, q: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, scale: float, latent_rank: int, kv_indptr: Tensor,
    kv_indices: Tensor, kv_last_page_lens: Tensor,
) -> Tensor:  # fmt: skip
    """On `mla_prefill_fwd`, over the same lists, for requests of any number of rows.

    Its `max_seqlen_q` is the size of the grid, so any upper bound serves.
    """
    out = q.new_empty((*q.shape[:2], latent_rank))
    function(
        **_latents(q, latent_cache, out, query_start_loc, kv_indptr, kv_indices, kv_last_page_lens),
        max_seqlen_q=q.shape[0],
        sm_scale=scale,
    )
    return out


def _latents(
    q: Tensor, latent_cache: Tensor, out: Tensor, query_start_loc: Tensor, kv_indptr: Tensor,
    kv_indices: Tensor, kv_last_page_lens: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """What both functions take; the cache as pages of one token, [pages * P, 1, 1, width]."""
    return dict(
        q=q,
        kv_buffer=latent_cache.view(-1, 1, 1, latent_cache.shape[-1]),
        o=out,
        qo_indptr=query_start_loc,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_lens=kv_last_page_lens,
    )


def experts(
    function: Function, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor,
    expert_weights: Tensor, expert_mask: Tensor,
) -> Tensor:  # fmt: skip
    """On `fused_moe`, with its defaults: SwiGLU, nothing quantised, weighted after the second
    product. Weights are in the order of its `shuffle_weight`; choices are those of
    `around.experts`.

    It finds out about the order by an attribute of the tensors, which those of a compiled step
    lack.
    """
    for weight in (gate_up, down):
        weight.is_shuffled = True  # type: ignore[attr-defined]
    result: Tensor = function(
        hidden_states=x,
        w1=gate_up,
        w2=down,
        topk_weight=expert_weights,
        topk_ids=expert_ids,
        expert_mask=expert_mask,
    )
    return result
