"""aiter, AMD's kernels for ROCm, as candidates for binding: which, within what limits, and how.

Two of its kernels read the caches in mtpc's layout: `unified_attention` (Triton, any number of
query rows) and `mla_decode_fwd` (assembly, at most 4 rows), which gets mtpc's pages as lists of
tokens. Where fuse-elementwise is enabled, `rmsnorm2d_fwd` and `rmsnorm2d_fwd_with_add` are bound,
too. The others are not bound: `pa_fwd_asm` and `pa_persistent_fwd` want another order of the cache;
`fused_moe` wants shuffled weights, which would be a pass of its own; mtpc's own kernel does rotary
embeddings together with the cache writes.

aiter changes quickly. Signatures are compared when kernels are bound, and a difference becomes a
note, not a crash in the middle of a capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

import torch
from torch import fx

from mtpc.backends.aiter import ops
from mtpc.backends.bindings import Binding, Complete, Limits, as_it_is
from mtpc.capture.graph import StepGraph, arguments
from mtpc.layout import dtype_name
from mtpc.ops import references
from mtpc.ops.signatures import arguments_of, value_of
from mtpc.passes.base import GETITEM, emit

DISTRIBUTION, MODULE = "amd-aiter", "aiter"
MAX_MLA_ROWS = 4
"""Query rows per request of aiter's assembly MLA kernels; K = 3 drafts and the last token."""
_HALF = (torch.bfloat16, torch.float16)
_MAX_NORM, _NORM_STEP = 8192, 8
_MLA_WIDTHS, _MLA_HEADS = (576, 512), (16, 128)


@dataclass(frozen=True)
class Kernel:
    """A function of aiter and how we call it.

    Attributes:
        operator: mtpc's operator around it, which has the name of the `mtpc::` op.
        modules: where it may be; it has moved between releases.
        function: its name.
        parameters: what we pass, by name, in the published order; all of them may be given by
            position or name.
        limits: what it cannot take.
        defaults: those of `parameters`, where they are published.
        complete: gives what our operator takes beside the arguments of the `mtpc::` op.
    """

    operator: ops.Function
    modules: tuple[str, ...]
    function: str
    parameters: tuple[str, ...]
    limits: Limits
    defaults: Mapping[str, Any] = field(default_factory=dict)
    complete: Complete = as_it_is


@dataclass(frozen=True)
class Found:
    """What was found of aiter.

    Attributes:
        bindings: candidates, best first; none where aiter cannot be used.
        message: what was found, in a line.
    """

    bindings: tuple[Binding, ...]
    message: str


def aiter_version() -> tuple[str | None, str]:
    """The version of AMD's aiter, or None; and a text that says what was found.

    The `aiter` of the public package index has the same import name and nothing to do with it.
    """
    version, other = _version_of(DISTRIBUTION), _version_of(MODULE)
    if version is not None:
        clash = (
            f", whose files aiter {other} of the public index, async-iterator helpers of the same "
            f"import name, may have replaced: uninstall both, then install {DISTRIBUTION}"
        )
        return version, f"{DISTRIBUTION} {version}{clash if other else ''}"
    if other is None:
        return None, f"{DISTRIBUTION} is not installed: Triton kernels only"
    return None, (
        f"aiter {other} is the async-iterator helpers of that name on the public index, not AMD's "
        f"kernels ({DISTRIBUTION}): pip uninstall aiter. Triton kernels only"
    )


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def aiter_bindings() -> Found:
    """Candidates for every kernel of the table whose signature is as expected."""
    version, message = aiter_version()
    if version is None:
        return Found((), message)
    bindings, faults = [], []
    for kernel in KERNELS:
        try:
            target = _bind(kernel)
        except Exception as error:
            # Importing it may ask for the architecture, or compile, and so raise anything.
            faults.append(f"{kernel.function}: {type(error).__name__}: {error}")
            continue
        reference = references()[kernel.operator.__name__]
        complete = kernel.complete
        bindings.append(Binding("aiter", reference, target, kernel.limits, complete=complete))
    if faults:
        message += f"; Triton stands in for {'; '.join(faults)}"
    return Found(tuple(bindings), message)


def _bind(kernel: Kernel) -> Any:
    """Our operator around a function of aiter.

    Raises:
        ImportError: none of its modules is there.
        AttributeError: the module lacks it.
        TypeError: its parameters are not those we pass.
    """
    function = _find(kernel)
    check_signature(function, kernel.parameters, kernel.defaults)
    return ops.define(kernel.operator, function)


def _find(kernel: Kernel) -> Callable[..., Any]:
    error: ImportError | None = None
    for name in kernel.modules:
        try:
            return getattr(import_module(name), kernel.function)
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith(MODULE):
                raise  # aiter is there, and cannot be imported.
            error = missing
    raise ImportError(f"none of {', '.join(kernel.modules)} is there") from error


def check_signature(
    function: Callable[..., Any], expected: tuple[str, ...], defaults: Mapping[str, Any]
) -> None:
    """Compare a function's parameters with those that we pass, all of them by name.

    Raises:
        TypeError: it lacks one of them, requires others, or has them in another order, of another
            kind or with another default than published, and so may mean something else.
    """
    found = inspect.signature(function).parameters
    missing = [name for name in expected if name not in found]
    required = [
        name
        for name, parameter in found.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in expected
    ]
    if missing or required:
        raise TypeError(
            f"its signature has changed (lacks {missing}, newly requires {required}); expected "
            f"{', '.join(expected)}"
        )
    changed = [
        f"{name} is {found[name]}, {found[name].kind.description}"
        for name in expected
        if found[name].kind is not found[name].POSITIONAL_OR_KEYWORD
        or (name in defaults and found[name].default != defaults[name])
    ]
    order = [name for name in found if name in expected]
    if changed or order != list(expected):
        raise TypeError(
            f"its signature has changed ({'; '.join(changed) or f'its order is {order}'}); "
            f"expected {', '.join(expected)}, with {dict(defaults)}"
        )


def _gqa_limits(node: fx.Node, graph: StepGraph) -> str | None:
    call = arguments_of(node)
    q, k, v = call["q"], call["k_cache"], call["v_cache"]
    if q.dtype not in _HALF or k.dtype != q.dtype:
        return f"{dtype_name(q.dtype)} queries on a {dtype_name(k.dtype)} cache"
    if k.shape[3] != v.shape[3]:
        return f"heads of {k.shape[3]} and {v.shape[3]}; it takes equal ones"
    if k.shape[1] < 16:
        return f"pages of {k.shape[1]} tokens; it takes at least 16"
    return None


def _mla_limits(node: fx.Node, graph: StepGraph) -> str | None:
    call = arguments_of(node)
    q, cache, table, rank = (
        call[name] for name in ("q", "latent_cache", "block_table", "latent_rank")
    )
    tokens, heads, width = q.shape
    if q.dtype != torch.bfloat16:
        return f"{dtype_name(q.dtype)}; it takes bfloat16"
    if (width, rank) != _MLA_WIDTHS:
        return f"rows of {width} with rank {rank}; it takes {_MLA_WIDTHS[0]} and {_MLA_WIDTHS[1]}"
    if not cache.is_contiguous():
        return "a cache with gaps; it takes rows that follow each other"
    if heads not in _MLA_HEADS:
        return f"{heads} heads; it takes {' or '.join(map(str, _MLA_HEADS))}"
    if graph.key.phase != "decode" or tokens % table.shape[0]:
        return "a ragged batch; it takes as many rows of each request"
    rows = tokens // table.shape[0]
    if rows > MAX_MLA_ROWS:
        return f"{rows} query rows a request; it takes up to {MAX_MLA_ROWS}"
    return None


def _norm_limits(node: fx.Node, graph: StepGraph) -> str | None:
    call = arguments_of(node)
    x, weight = call["x"], call["weight"]
    if x.dtype not in _HALF or weight.dtype != x.dtype:
        return f"{dtype_name(x.dtype)} rows with {dtype_name(weight.dtype)} weights"
    if call.get("plus_one", False):
        return "1 + weight; it scales by the weight"
    if x.shape[-1] > _MAX_NORM or x.shape[-1] % _NORM_STEP:
        return f"rows of {x.shape[-1]}; it takes multiples of {_NORM_STEP} up to {_MAX_NORM}"
    return None


def _complete_gqa(node: fx.Node, graph: StepGraph) -> dict[str, Any]:
    """Which rows are on, and the most rows of a request: a prompt may have all of them."""
    call = arguments(node)
    rows, num_reqs = (value_of(call[name]).shape[0] for name in ("q", "block_table"))
    longest = rows // num_reqs if graph.key.phase == "decode" else rows
    return {"is_on": _rows_on(node, graph), "max_query_len": longest}


def _complete_mla(node: fx.Node, graph: StepGraph) -> dict[str, Any]:
    """Which rows are on, and each request's tokens."""
    call, lists = arguments(node), torch.ops.mtpc_aiter.token_lists.default
    page_size = value_of(call["latent_cache"]).shape[1]
    made = emit(graph.graph, lists, (call["block_table"], call["seq_lens"], page_size), node)
    parts = [emit(graph.graph, GETITEM, (made, index), node) for index in range(3)]
    names = ("kv_indptr", "kv_indices", "kv_last_page_lens")
    return {"is_on": _rows_on(node, graph), **dict(zip(names, parts, strict=True))}


def _rows_on(node: fx.Node, graph: StepGraph) -> fx.Node:
    call = arguments(node)
    args = (call["seq_lens"], call["query_start_loc"], value_of(call["q"]).shape[0])
    return emit(graph.graph, torch.ops.mtpc_aiter.rows_on.default, args, node)


KERNELS = (
    Kernel(
        ops.paged_attention,
        ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention"),
        "unified_attention",
        ("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k",
         "softmax_scale", "causal", "window_size", "block_table", "softcap",
         "q_descale", "k_descale", "v_descale", "sinks"),
        _gqa_limits,
        complete=_complete_gqa,
    ),
    Kernel(
        ops.latent_attention,
        ("aiter.mla",),
        "mla_decode_fwd",
        ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens",
         "max_seqlen_q", "page_size", "nhead_kv", "sm_scale"),
        _mla_limits,
        {"page_size": 1, "nhead_kv": 1},
        _complete_mla,
    ),
    Kernel(
        ops.rms_norm,
        ("aiter.ops.rmsnorm",),
        "rmsnorm2d_fwd",
        ("input", "weight", "epsilon", "use_model_sensitive_rmsnorm"),
        _norm_limits,
    ),
    Kernel(
        ops.add_rms_norm,
        ("aiter.ops.rmsnorm",),
        "rmsnorm2d_fwd_with_add",
        ("out", "input", "residual_in", "residual_out", "weight", "epsilon",
         "use_model_sensitive_rmsnorm"),
        _norm_limits,
    ),
)  # fmt: skip
"""aiter's table. Signatures as published in August 2026 (commit e404860); never run by us."""
