"""Our ops on aiter's functions: arguments translated on the device, with sizes of the bucket only.

Each takes a function of aiter, then the arguments of the `mtpc::` operator of its name, and by name
what that operator does not have: results of `rows_on` and `token_lists`, which the calls of a step
share. `define` makes an operator of it that is opaque to Inductor and writes none of its arguments.
(aiter's own registration can declare that every tensor is written.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
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
    parameters = list(inspect.signature(ours, eval_str=True).parameters.values())[1:]
    added = [each for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    taken = signature_of(reference, [each.name for each in parameters if each not in added])
    # Positional, and without defaults: an operator's tensors cannot be given by name alone.
    own = [each.replace(default=Parameter.empty) for each in taken.parameters.values()]
    more = [each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in added]
    signature = taken.replace(parameters=[*own, *more]) if added else taken

    def bind(args: Any, kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(function, **bind(args, kwargs))

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        return reference(*(given[each.name] for each in own))

    call = with_signature(call, signature)
    operator = torch.library.custom_op(f"mtpc_aiter::{name}", call, mutates_args=())
    operator.register_fake(fake)
    return getattr(torch.ops.mtpc_aiter, name).default


def paged_attention(
    function: Function, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, scale: float, sliding_window: int, softcap: float,
    sinks: Tensor | None, *, is_on: Tensor, max_query_len: int,
) -> Tensor:  # fmt: skip
    """On `unified_attention`.

    Its `max_seqlen_q` chooses block sizes; 1 says, too, that each request has one row. So any upper
    bound serves for requests of more rows.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    function(
        q=q.contiguous(),
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
    return torch.where(is_on, out, 0)


def latent_attention(
    function: Function, q: Tensor, latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start_loc: Tensor, scale: float, latent_rank: int, *, is_on: Tensor,
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor,
) -> Tensor:  # fmt: skip
    """On `mla_decode_fwd`, as a cache whose pages have one token, whatever they have in ours."""
    out = q.new_empty((*q.shape[:2], latent_rank))
    function(
        q=q.contiguous(),
        kv_buffer=latent_cache.view(-1, 1, 1, latent_cache.shape[-1]),
        o=out,
        qo_indptr=query_start_loc,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_lens=kv_last_page_lens,
        max_seqlen_q=q.shape[0] // block_table.shape[0],
        page_size=1,
        nhead_kv=1,
        sm_scale=scale,
    )
    return torch.where(is_on, out, 0)


def experts(
    function: Function, x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor,
    expert_weights: Tensor, *, expert_mask: Tensor,
) -> Tensor:  # fmt: skip
    """On `fused_moe`, with its defaults: SwiGLU, nothing quantised, weighted after the second
    product. Weights are in the order of its `shuffle_weight`; choices are those of
    the binding's `complete`.

    It finds out about the order by an attribute of the tensors, which those of a compiled step
    lack.
    """
    for weight in (gate_up, down):
        weight.is_shuffled = True  # type: ignore[attr-defined]
    result: Tensor = function(
        hidden_states=x.contiguous(),
        w1=gate_up,
        w2=down,
        topk_weight=expert_weights.contiguous(),
        topk_ids=expert_ids.contiguous(),
        expert_mask=expert_mask,
    )
    return result


def experts_scratch(x: Tensor, down: Tensor, expert_ids: Tensor) -> int:
    """Bytes that `fused_moe` allocates beside its result: the rows between its two products, and
    lists of rows sorted by expert, in blocks of up to 128."""
    rows, (count, _, inner) = expert_ids.numel(), down.shape
    return rows * inner * x.itemsize + 3 * 4 * (rows + 128 * (count + 1))


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


@torch.library.custom_op("mtpc_aiter::token_lists", mutates_args=())
def token_lists(
    block_table: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The cache rows of all requests' tokens, one request behind the other: pages of one token.

    Args:
        block_table: int32 [R, M].
        seq_lens: int32 [R]; a request that is off (0) is given the null page's first row, so that
            no list is empty.
        page_size: tokens per page, P.

    Returns:
        Where each request's list begins, int32 [R + 1]; the lists, int32 [R * M * P] (0 behind the
        last); and tokens in each request's last page, int32 [R], all 1.
    """
    num_reqs, blocks = block_table.shape
    lens = seq_lens.clamp(1, blocks * page_size)
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    place = torch.arange(num_reqs * blocks * page_size, device=block_table.device)
    request = torch.searchsorted(starts[1:], place, right=True).clamp(max=num_reqs - 1)
    position = (place - starts[request]).clamp(0, blocks * page_size - 1)
    row = block_table[request, position // page_size] * page_size + position % page_size
    listed = (place < starts[-1]) & (seq_lens[request] > 0)
    return starts, torch.where(listed, row, 0).int(), torch.ones_like(lens)


@torch.library.custom_op("mtpc_aiter::rows_on", mutates_args=())
def rows_on(seq_lens: Tensor, query_start_loc: Tensor, num_rows: int) -> Tensor:
    """Which rows are of a request that is on: aiter leaves open what it writes to the others.

    Args:
        seq_lens: int32 [R]; 0 is off.
        query_start_loc: int32 [R + 1].
        num_rows: T.

    Returns:
        bool [T, 1, 1].
    """
    num_reqs, row = seq_lens.shape[0], torch.arange(num_rows, device=seq_lens.device)
    request = torch.searchsorted(query_start_loc[1:], row, right=True)
    on = (request < num_reqs) & (seq_lens[request.clamp(max=num_reqs - 1)] > 0)
    return on[:, None, None]


@token_lists.register_fake
def _(block_table: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    num_reqs, blocks = block_table.shape
    sizes = (num_reqs + 1, num_reqs * blocks * page_size, num_reqs)
    starts, lists, last = (seq_lens.new_empty((size,), dtype=torch.int32) for size in sizes)
    return starts, lists, last


@rows_on.register_fake
def _(seq_lens: Tensor, query_start_loc: Tensor, num_rows: int) -> Tensor:
    return seq_lens.new_empty((num_rows, 1, 1), dtype=torch.bool)
