"""aiter, AMD's kernels for ROCm, as candidates for binding: which, within what limits, and how.

Two of its kernels read the caches in mtpc's layout: `unified_attention` (Triton, any number of
query rows) and `mla_decode_fwd` (assembly, at most 4 rows), which gets mtpc's pages as lists of
tokens. Experts are bound to `fused_moe`, whose weights are shuffled by aiter's own
`shuffle_weight`, in place, when the first step is bound (`bindings.Order`). The others are not
bound: `pa_fwd_asm` and `pa_persistent_fwd` want another order of the cache; mtpc's own kernels do
rotary embeddings together with the cache writes, and norms. (`rmsnorm2d_fwd` and its like have no
signature that can be compared: aiter/jit/utils/torch_guard.py, 210.)

What aiter's sources say of attention (commit e404860):

- Where a step has few programs, `unified_attention` cuts contexts into segments, and then asserts
  that a tile, of up to 64 keys, is whole pages (aiter/ops/triton/attention/unified_attention.py,
  218 and 254). Larger pages are looked up key by key, whatever their size.
- It takes queries of any strides but the last, which is 1.
- `mla_decode_fwd` keeps the number of splits in an `lru_cache`, with a tensor of them on the
  device, which it frees after 128 kinds of calls (aiter/mla.py, 281): so we give both. Its kernels
  for bfloat16 are those of gfx942 and gfx950 (hsa/*/mla/mla_asm.csv; csrc/py_itfs_cu/asm_mla.cu,
  313, refuses gfx1250), and read contiguous queries (806).

What aiter's sources say of `fused_moe` on weights that are not quantised (commit e404860; line
numbers are those of aiter/fused_moe.py, if no other file is named):

- bfloat16 and float16 (line 753); the result has the dtype of the rows. No entry of the table of
  kernels in one stage has both gates and plain weights (1281), so it is two products of composable
  kernels, ck_moe_stage1 and 2 (2874). Those for 16 bits always read shuffled weights: the choice
  among them does not ask (csrc/ck_gemm_moe_2stages_codegen/gen_instances.py, 123; for 4 bits, 279,
  it does). The tensors' attribute `is_shuffled` (747) names the module that is built
  (aiter/ops/moe_op.py, 571 and 626). So a call on weights that are not shuffled is wrong, not
  refused.
- `shuffle_weight(x, layout=(16, 16))` (aiter/ops/shuffle.py, 192) reorders 16 rows at a time: of
  their pieces of 16 bytes, the 16 first ones come first. It takes multiples of 16 rows and 32
  inputs. The shape stays, and each expert is on its own.
- The kernels' tiles take 64 or 128 features, and 64 inputs; the second product on gfx950 takes 128
  (gen_instances.py, 123 and 369), and composable kernels refuse other multiples of inputs. On
  gfx1250 rows of 16 bits become 4 bits (803).
- GELU is the exact one (3993), mtpc's that of tanh. `swiglu_limit` is for other kernels, and is
  ignored here. So neither is bound.
- Sorting takes weights of choices in float32 (csrc/py_itfs_cu/moe_sorting_opus_kernels.cu, 31) and
  ids in int32. It notes choices in a table by (row, expert), without a check of the range
  (csrc/include/moe_sorting_opus.h, 794). So an id outside would write elsewhere, and of two equal
  ids of a row one is lost: mtpc cannot give such a choice weight 0 and the id of some expert. What
  `expert_mask` leaves out is not computed. aiter's own convention (op_tests/test_moe_ep.py, 122) is
  an expert more, which the mask leaves out, and a last choice of it in each row, which the lookup
  of tuned kernels expects (2230). `around.experts` follows it.
- Nothing waits for the host. Modules are compiled in the first call, which is mtpc's warm-up.
- The sum over experts is made by atomic additions of 16 bits into a zeroed result (217), in any
  order. So equal steps may differ in their last bits; `batch_invariant` binds nothing of aiter.

aiter changes quickly. Signatures are compared when kernels are bound, and a difference becomes a
note, not a crash in the middle of a capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import fx

from mtpc.backends.aiter import around, ops, sizes
from mtpc.backends.bindings import Binding, Limits, Order
from mtpc.backends.check_device import architecture_of
from mtpc.backends.expand import Traced, expand
from mtpc.capture.graph import StepGraph
from mtpc.layout import dtype_name
from mtpc.ops import references
from mtpc.ops.signatures import arguments_of
from mtpc.passes.linears import EXPERT_WEIGHTS

DISTRIBUTION, MODULE = "amd-aiter", "aiter"
MAX_MLA_ROWS = 4
"""Query rows per request of aiter's assembly MLA kernels; K = 3 drafts and the last token."""
_HALF = (torch.bfloat16, torch.float16)
_MLA_WIDTHS, _MLA_HEADS = (576, 512), (16, 128)
_EXPERT_STEP = 128
"""The largest tile of features or inputs of `fused_moe`'s kernels."""
_DEVICES = ("gfx942", "gfx950")
"""Where all of the bound kernels are; `sizes` has the formulas of these."""
_LEAST_PAGE, _TILE = 16, 64
SHUFFLED = "aiter's shuffle_weight"
"""The order of `fused_moe`'s weights."""


@dataclass(frozen=True)
class Published:
    """A function of aiter as its sources have it.

    Attributes:
        modules: where it may be; it has moved between releases.
        function: its name.
        parameters: what we pass or leave at its default, by name, in the published order; all of
            them may be given by position or name.
        defaults: those of `parameters`, where they are published; of an enumeration, its name.
    """

    modules: tuple[str, ...]
    function: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """The function that is installed.

        Raises:
            ImportError: none of its modules is there.
            AttributeError: the module lacks it.
            TypeError: its parameters are not those we pass.
        """
        function = _find(self)
        check_signature(function, self.parameters, self.defaults)
        return function


@dataclass(frozen=True)
class Kernel:
    """A function of aiter and how we call it.

    Attributes:
        operator: mtpc's operator on it, which has the name of the `mtpc::` op.
        around: computes the `mtpc::` op by our operator; see `mtpc.backends.aiter.around`.
        published: the function.
        limits: what it cannot take.
        scratch: arguments of our operator, by name -> bytes of each of aiter's allocations beside
            the result.
        shuffled: arguments that are weights in the order of `shuffle_weight`.
    """

    operator: ops.Function
    around: Callable[..., Any]
    published: Published
    limits: Limits
    scratch: Callable[[Mapping[str, Any]], tuple[int, ...]]
    shuffled: tuple[str, ...] = ()


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
            bindings.append(_bind(kernel))
        except Exception as error:
            # Importing it may ask for the architecture, or compile, and so raise anything.
            faults.append(f"{kernel.published.function}: {type(error).__name__}: {error}")
    if faults:
        message += f"; Triton stands in for {'; '.join(faults)}"
    return Found(tuple(bindings), message)


def _bind(kernel: Kernel) -> Binding:
    """Our operator around a function of aiter, and the function that orders its weights.

    Raises:
        Exception: see `Published.load`; importing may raise anything.
    """
    order = None
    if kernel.shuffled:
        order = Order(SHUFFLED, kernel.shuffled, partial(SHUFFLE.load(), layout=(16, 16)))
    target = ops.define(kernel.operator, kernel.published.load())
    reference = references()[kernel.operator.__name__]

    def refuses(node: fx.Node, graph: StepGraph) -> str | None:
        return _refused_device(node) or kernel.limits(node, graph)

    traced: dict[str, Traced] = {}

    def put(node: fx.Node, graph: StepGraph) -> fx.Node:
        phase = "prefill" if graph.layout.is_ragged else graph.key.phase
        function = partial(kernel.around, target, phase)
        return expand(node, graph, function, traced.setdefault(phase, {}))

    return Binding("aiter", reference, target, refuses, expand=put, order=order)


def scratch_of(node: fx.Node) -> tuple[int, ...]:
    """Bytes of what aiter allocates in a call beside its result; of no call of aiter, nothing."""
    for kernel in KERNELS:
        if str(node.target) == f"mtpc_aiter.{kernel.operator.__name__}.default":
            return kernel.scratch(arguments_of(node))
    return ()


def _find(published: Published) -> Callable[..., Any]:
    error: ImportError | None = None
    for name in published.modules:
        try:
            return getattr(import_module(name), published.function)
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith(MODULE):
                raise  # aiter is there, and cannot be imported.
            error = missing
    raise ImportError(f"none of {', '.join(published.modules)} is there") from error


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
        or (name in defaults and _named(found[name].default) != defaults[name])
    ]
    order = [name for name in found if name in expected]
    if changed or order != list(expected):
        raise TypeError(
            f"its signature has changed ({'; '.join(changed) or f'its order is {order}'}); "
            f"expected {', '.join(expected)}, with {dict(defaults)}"
        )


def _named(default: Any) -> Any:
    """A default, or the name of a value of aiter's enumerations, which are its own classes."""
    return getattr(default, "name", default)


def _gqa_limits(node: fx.Node, graph: StepGraph) -> str | None:
    call = arguments_of(node)
    q, k, v = call["q"], call["k_cache"], call["v_cache"]
    if q.dtype not in _HALF or k.dtype != q.dtype:
        return f"{dtype_name(q.dtype)} queries on a {dtype_name(k.dtype)} cache"
    if k.shape[3] != v.shape[3]:
        return f"heads of {k.shape[3]} and {v.shape[3]}; it takes equal ones"
    page = k.shape[1]
    if page < _LEAST_PAGE or (page < _TILE and _TILE % page):
        return f"pages of {page} tokens; it takes {_LEAST_PAGE}, 32, and {_TILE} or more"
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
    if graph.layout.is_ragged or tokens % table.shape[0]:
        return "a ragged batch; it takes as many rows of each request"
    rows = tokens // table.shape[0]
    if rows > MAX_MLA_ROWS:
        return f"{rows} query rows a request; it takes up to {MAX_MLA_ROWS}"
    return None


def _experts_limits(node: fx.Node, graph: StepGraph) -> str | None:
    """By what all steps have in common, so that they agree on the order of the weights."""
    call = arguments_of(node)
    x, gate_up, down = call["x"], call["gate_up"], call["down"]
    if x.dtype not in _HALF or {gate_up.dtype, down.dtype} != {x.dtype}:
        return f"{dtype_name(x.dtype)} rows with {dtype_name(gate_up.dtype)} weights"
    _, hidden, inner = down.shape
    if hidden % _EXPERT_STEP or inner % _EXPERT_STEP:
        return f"experts of {inner} features of {hidden}; it takes multiples of {_EXPERT_STEP}"
    return None


def _refused_device(node: fx.Node) -> str | None:
    first = next(iter(arguments_of(node).values()))
    found = _architecture(first.device)
    if found not in (*_DEVICES, None):
        return f"{found}; it is bound on {' and '.join(_DEVICES)}"
    return None


def _architecture(device: torch.device) -> str | None:
    """The name of an AMD GPU's architecture, such as gfx942; None for what is no GPU."""
    if device.type != "cuda":
        return None
    return architecture_of(device).partition(":")[0]


SHUFFLE = Published(
    ("aiter.ops.shuffle",),
    "shuffle_weight",
    ("x", "layout", "use_int4", "is_guinterleave", "gate_up", "pad_k_to"),
    {"layout": (16, 16), "use_int4": False, "is_guinterleave": False, "gate_up": False,
     "pad_k_to": 0},
)  # fmt: skip
KERNELS = (
    Kernel(
        ops.paged_attention,
        around.paged_attention,
        Published(
            ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention"),
            "unified_attention",
            ("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k",
             "softmax_scale", "causal", "window_size", "block_table", "softcap",
             "q_descale", "k_descale", "v_descale", "sinks"),
        ),
        _gqa_limits,
        sizes.paged_scratch,
    ),
    Kernel(
        ops.latent_attention,
        around.latent_attention,
        Published(
            ("aiter.mla",),
            "mla_decode_fwd",
            ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens",
             "max_seqlen_q", "page_size", "nhead_kv", "sm_scale", "num_kv_splits",
             "num_kv_splits_indptr"),
            {"page_size": 1, "nhead_kv": 1},
        ),
        _mla_limits,
        sizes.latent_scratch,
    ),
    Kernel(
        ops.experts,
        around.experts,
        Published(
            ("aiter.fused_moe",),
            "fused_moe",
            ("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation",
             "quant_type", "doweight_stage1"),
            {"activation": "Silu", "quant_type": "No", "doweight_stage1": False},
        ),
        _experts_limits,
        sizes.experts_scratch,
        EXPERT_WEIGHTS,
    ),
)  # fmt: skip
"""aiter's table. Signatures as published in August 2026 (commit e404860); never run by us."""
