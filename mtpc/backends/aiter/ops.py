"""Our ops on aiter's functions: arguments translated on the device, with sizes of the bucket only.

Each takes a function of aiter, then the arguments of the `mtpc::` operator of its name. `define`
makes an operator of it that is opaque to Inductor and writes none of its arguments. (aiter's own
registration can declare that every tensor is written.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtpc.ops import references
from mtpc.ops.signatures import signature_of, with_signature

Function = Callable[..., Any]
ROUND_BEFORE_WEIGHT = 1
"""What aiter calls model-sensitive, T5's: it rounds the sum before the norm, and the norm before
the weight, where `mtpc::add_rms_norm` does; without it, it does not."""


def define(ours: Function, function: Function) -> Any:
    """The overload of `mtpc_aiter::NAME`, which computes `mtpc::NAME` by a function of aiter.

    Args:
        ours: one of the functions below; its name is the operator's.
        function: of aiter.
    """
    name = ours.__name__
    reference = references()[name]
    signature = signature_of(reference, list(inspect.signature(ours).parameters)[1:])

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return ours(function, **bound.arguments)

    call = with_signature(call, signature)
    operator = torch.library.custom_op(f"mtpc_aiter::{name}", call, mutates_args=())
    operator.register_fake(reference)
    return getattr(torch.ops.mtpc_aiter, name).default


def paged_attention(
    function: Function, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, scale: float, sliding_window: int, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """On `unified_attention`."""
    out = q.new_zeros(q.shape)
    function(
        q=q.contiguous(),
        k=k_cache,
        v=v_cache,
        out=out,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=-(-q.shape[0] // block_table.shape[0]),
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
    return off_rows_to_zero(out, seq_lens, query_start_loc)


def latent_attention(
    function: Function, q: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, scale: float, latent_rank: int,
) -> Tensor:  # fmt: skip
    """On `mla_decode_fwd`."""
    out = q.new_zeros((*q.shape[:2], latent_rank))
    page_size = latent_cache.shape[1]
    indptr, indices, last = page_lists(block_table, seq_lens, page_size)
    function(
        q=q.contiguous(),
        kv_buffer=latent_cache[:, :, None, :],
        o=out,
        qo_indptr=query_start_loc,
        kv_indptr=indptr,
        kv_indices=indices,
        kv_last_page_lens=last,
        max_seqlen_q=q.shape[0] // block_table.shape[0],
        page_size=page_size,
        nhead_kv=1,
        sm_scale=scale,
    )
    return off_rows_to_zero(out, seq_lens, query_start_loc)


def rms_norm(
    function: Function, x: Tensor, weight: Tensor, epsilon: float, plus_one: bool
) -> Tensor:
    """On `rmsnorm2d_fwd`; plus_one is refused before."""
    normed: Tensor = function(
        input=_flat(x),
        weight=weight,
        epsilon=epsilon,
        use_model_sensitive_rmsnorm=ROUND_BEFORE_WEIGHT,
    )
    return normed.view(x.shape)


def add_rms_norm(
    function: Function, x: Tensor, added: Tensor, weight: Tensor, epsilon: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """On `rmsnorm2d_fwd_with_add`; plus_one is refused before."""
    rows = _flat(x)
    total, normed = torch.empty_like(rows), torch.empty_like(rows)
    function(
        out=normed,
        input=rows,
        residual_in=_flat(added),
        residual_out=total,
        weight=weight,
        epsilon=epsilon,
        use_model_sensitive_rmsnorm=ROUND_BEFORE_WEIGHT,
    )
    return total.view(x.shape), normed.view(x.shape)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def page_lists(
    block_table: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables as flat lists of pages, all requests' one behind the other.

    Args:
        block_table: int32 [R, M].
        seq_lens: int32 [R]; a request that is off (0) is given its null page, so that no list is
            empty.
        page_size: tokens per page.

    Returns:
        indptr int32 [R+1], indices int32 [R * M] (0 behind the last), and tokens in each
        request's last page int32 [R].
    """
    num_reqs, blocks = block_table.shape
    lens = seq_lens.clamp(1, blocks * page_size)
    pages = (lens + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    place = torch.arange(num_reqs * blocks, device=block_table.device)
    request = (place[:, None] >= indptr[None, 1:]).sum(1).clamp(max=num_reqs - 1)
    block = (place - indptr[request]).clamp(0, blocks - 1)
    listed = (place < indptr[-1]) & (seq_lens[request] > 0)
    indices = torch.where(listed, block_table[request, block], 0).int()
    return indptr, indices, ((lens - 1) % page_size + 1).int()


def off_rows_to_zero(out: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
    """Zeros where a row belongs to no request, or to one that is off: aiter leaves that open."""
    token = torch.arange(out.shape[0], device=out.device)
    request = (token[:, None] >= query_start_loc[None, 1:]).sum(1)
    on = (request < seq_lens.shape[0]) & (seq_lens[request.clamp(max=seq_lens.shape[0] - 1)] > 0)
    return torch.where(on[:, None, None], out, 0)
