"""aiter, AMD's kernels for ROCm, as candidates for binding: which, within what limits, and how.

Some of its kernels read the caches in mtpc's layout: `unified_attention` (Triton, any number of
query rows), `mla_decode_fwd` and `mla_prefill_fwd` (assembly), which get mtpc's pages as lists of
tokens. Experts are bound to `fused_moe`, whose weights are shuffled by aiter's own
`shuffle_weight`, in place, when the first step is bound (`bindings.Order`). The others are not
bound; `facts.UNBOUND` says why.

What the sources say is in `facts`, with file and line. More of attention:

- Where a step has few programs, `unified_attention` cuts contexts into segments. Pages that are
  larger than a tile are looked up key by key, whatever their size. It takes queries of any strides
  but the last, which is 1.
- `mla_decode_fwd` keeps the number of splits in an `lru_cache`, with a tensor of them on the
  device, which it frees after 128 kinds of calls: so we give both.
- aiter's own test of `mla_prefill_fwd` has requests of different numbers of rows, and each has one
  (op_tests/test_mla.py, 158). That a request without rows, as a padded prompt is, ends like a tile
  behind another's rows is assumed: assembly cannot be read.

More of `fused_moe` on weights that are not quantised (lines of aiter/fused_moe.py, if no other
file is named):

- The result has the dtype of the rows. No entry of the table of kernels in one stage has both gates
  and plain weights (1281), so it is two products of composable kernels, ck_moe_stage1 and 2 (2874).
  Those for 16 bits always read shuffled weights: the choice among them does not ask
  (csrc/ck_gemm_moe_2stages_codegen/gen_instances.py, 123; for 4 bits, 279, it does). The tensors'
  attribute `is_shuffled` (747) names the module that is built (aiter/ops/moe_op.py, 571 and 626).
  So a call on weights that are not shuffled is wrong, not refused.
- `shuffle_weight(x, layout=(16, 16))` (aiter/ops/shuffle.py, 192) reorders 16 rows at a time: of
  their pieces of 16 bytes, the 16 first ones come first. It takes multiples of 16 rows and 32
  inputs. The shape stays, and each expert is on its own.
- Sorting takes weights of choices in float32 (csrc/py_itfs_cu/moe_sorting_opus_kernels.cu, 31) and
  ids in int32. It notes choices in a table by (row, expert), without a check of the range
  (csrc/include/moe_sorting_opus.h, 794). So an id outside would write elsewhere, and of two equal
  ids of a row one is lost: mtpc cannot give such a choice weight 0 and the id of some expert. What
  `expert_mask` leaves out is not computed. aiter's own convention (op_tests/test_moe_ep.py, 122) is
  an expert more, which the mask leaves out, and a last choice of it in each row, which the lookup
  of tuned kernels expects (2230). `around.experts` follows it.
- Nothing waits for the host. Modules are compiled in the first call, which is mtpc's warm-up.
- The sum over experts is made by atomic additions of 16 bits into a zeroed result (218), in any
  order. So equal steps may differ in their last bits.

With `batch_invariant` nothing of aiter is bound: tiles depend on rows, and this sum has no order.

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

from mtpc.backends.aiter import around, limits, ops, sizes
from mtpc.backends.aiter.facts import FACTS
from mtpc.backends.bindings import Binding, Order
from mtpc.backends.check_device import architecture_of
from mtpc.backends.expand import Traced, expand
from mtpc.capture.graph import StepGraph
from mtpc.ops import references
from mtpc.ops.signatures import arguments_of
from mtpc.passes.linears import EXPERT_WEIGHTS

DISTRIBUTION, MODULE = "amd-aiter", "aiter"
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


Load = Callable[[Published], Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """A function of aiter and our operator on it.

    Attributes:
        operator: a function of `ops`.
        published: the function.
        scratch: arguments of our operator, by name -> bytes of each of aiter's allocations beside
            the result.
    """

    operator: ops.Function
    published: Published
    scratch: Callable[[Mapping[str, Any]], tuple[int, ...]]


@dataclass(frozen=True)
class Kernel:
    """How an `mtpc::` operator is computed by functions of aiter.

    Attributes:
        around: computes it by our operators; its name is the operator's. See
            `mtpc.backends.aiter.around`.
        calls: our operators, in the order in which `around` takes them.
        limit: what they cannot take.
        shuffled: arguments that are weights in the order of `shuffle_weight`.
    """

    around: Callable[..., Any]
    calls: tuple[Call, ...]
    limit: limits.Limit
    shuffled: tuple[str, ...] = ()

    @property
    def functions(self) -> str:
        """Names of aiter's functions."""
        return ", ".join(call.published.function for call in self.calls)


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


def aiter_bindings(architecture: str | None = None) -> Found:
    """Candidates for every kernel of the table whose signature is as expected.

    Args:
        architecture: of the GPU, such as gfx942; None asks the device of each call.
    """
    version, message = aiter_version()
    if version is None:
        return Found((), message)
    bindings, faults = [], []
    for kernel in KERNELS:
        try:
            bindings.append(bind(kernel, architecture))
        except Exception as error:
            # Importing it may ask for the architecture, or compile, and so raise anything.
            faults.append(f"{kernel.functions}: {type(error).__name__}: {error}")
    if faults:
        message += f"; Triton stands in for {'; '.join(faults)}"
    return Found(tuple(bindings), message)


def bind(kernel: Kernel, architecture: str | None, load: Load = Published.load) -> Binding:
    """Our operators around functions of aiter, and the function that orders its weights.

    Raises:
        Exception: see `Published.load`; importing may raise anything.
    """
    order, name = None, kernel.around.__name__
    if kernel.shuffled:
        order = Order(SHUFFLED, kernel.shuffled, partial(load(SHUFFLE), layout=(16, 16)))
    functions = [load(call.published) for call in kernel.calls]
    targets = [
        ops.define(call.operator, function, name)
        for call, function in zip(kernel.calls, functions, strict=True)
    ]

    def place_of(node: fx.Node, graph: StepGraph) -> limits.Place:
        device = next(iter(arguments_of(node).values())).device
        phase = "prefill" if graph.layout.is_ragged else graph.key.phase
        return limits.Place(phase, architecture or _architecture(device))

    def refuses(node: fx.Node, graph: StepGraph) -> str | None:
        place = place_of(node, graph)
        return limits.refused_device(place.device) or kernel.limit(arguments_of(node), place)

    traced: dict[limits.Place, Traced] = {}

    def put(node: fx.Node, graph: StepGraph) -> fx.Node:
        place = place_of(node, graph)
        function = partial(kernel.around, targets, place)
        return expand(node, graph, function, traced.setdefault(place, {}))

    return Binding("aiter", references()[name], targets[0], refuses, expand=put, order=order)


def row_bound(node: fx.Node) -> str | None:
    """Why a row's sums in a call of aiter depend on other rows; None of other calls."""
    call = _call_of(node)
    if call is None:
        return None
    name = call.published.function
    if name in FACTS["sums by atomics"].value:
        return f"{name} sums by atomic additions, in any order"
    return f"{name} chooses tiles and splits by the rows of a step"


def scratch_of(node: fx.Node) -> tuple[int, ...]:
    """Bytes of what aiter allocates in a call beside its result; of no call of aiter, nothing."""
    call = _call_of(node)
    return () if call is None else call.scratch(arguments_of(node))


def _call_of(node: fx.Node) -> Call | None:
    for call in (call for kernel in KERNELS for call in kernel.calls):
        if str(node.target) == f"mtpc_aiter.{call.operator.__name__}.default":
            return call
    return None


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
_LATENTS = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens",
            "max_seqlen_q")  # fmt: skip
KERNELS = (
    Kernel(
        around.paged_attention,
        (
            Call(
                ops.paged_attention,
                Published(
                    ("aiter.ops.triton.attention.unified_attention",
                     "aiter.ops.triton.unified_attention"),
                    "unified_attention",
                    ("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k",
                     "max_seqlen_k", "softmax_scale", "causal", "window_size", "block_table",
                     "softcap", "q_descale", "k_descale", "v_descale", "sinks"),
                ),
                sizes.paged_scratch,
            ),
        ),
        limits.paged_attention,
    ),
    Kernel(
        around.latent_attention,
        (
            Call(
                ops.latent_attention,
                Published(
                    ("aiter.mla",),
                    "mla_decode_fwd",
                    (*_LATENTS, "page_size", "nhead_kv", "sm_scale", "num_kv_splits",
                     "num_kv_splits_indptr"),
                    {"page_size": 1, "nhead_kv": 1},
                ),
                sizes.latent_scratch,
            ),
            Call(
                ops.latent_prefill,
                Published(("aiter.mla",), "mla_prefill_fwd", (*_LATENTS, "sm_scale")),
                sizes.prompt_scratch,
            ),
        ),
        limits.latent_attention,
    ),
    Kernel(
        around.experts,
        (
            Call(
                ops.experts,
                Published(
                    ("aiter.fused_moe",),
                    "fused_moe",
                    ("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask",
                     "activation", "quant_type", "doweight_stage1"),
                    {"activation": "Silu", "quant_type": "No", "doweight_stage1": False},
                ),
                sizes.experts_scratch,
            ),
        ),
        limits.experts,
        EXPERT_WEIGHTS,
    ),
)  # fmt: skip
"""aiter's table. Signatures as published at `facts.COMMIT`; never run by us."""
