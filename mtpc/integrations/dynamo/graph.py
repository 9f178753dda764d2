"""Rewrites one of Dynamo's graphs to call mtpc's kernels.

mtpc's passes need a flat graph of ATen operators whose weights are attributes. So the graph is
traced once more, without decompositions, and its parameters become attributes while the passes run.
Afterwards parameters are inputs again, and so are the weights that passes have derived.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mtpc.backends.cpu.backend import UseCpuKernels
from mtpc.backends.cpu.passes.fuse_head_max import FuseHeadMax
from mtpc.backends.cpu.passes.fuse_linear_chains import FuseLinearChains
from mtpc.backends.cpu.passes.pack_weights import PackWeights
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.capture.effects import Root, analyse
from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.errors import BackendError
from mtpc.layout import Layout, StepKey
from mtpc.passes.base import Pass, aten, is_call, run_pipeline
from mtpc.passes.canonicalise import Canonicalise
from mtpc.passes.fuse_elementwise import FuseElementwise
from mtpc.passes.pack_groups import PackGroups
from mtpc.weights.recipes import Recipe, names
from mtpc.weights.weights import Weights

_SEPARATORS = re.compile("_modules_|_parameters_")
_SWITCHES: Mapping[Any, int] = {
    torch._C._set_grad_enabled: 0,
    torch.amp.autocast_mode._enter_autocast: 2,
}
"""Calls that change a mode of the operators after them -> the index of their on/off argument."""
_FUSED = {
    *(aten.linear, aten.mul, aten.add, aten.silu, aten.pow, aten.mean, aten.rsqrt, aten.neg),
    *(aten.to, aten._to_copy, aten.type_as, aten.max, aten.argmax),
}
"""Operators that passes fuse. The fused operator reads their inputs, perhaps at another place."""
_SIZED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_LEAVE = torch.amp.autocast_mode._exit_autocast


@dataclass(frozen=True)
class Rewritten:
    """A graph for Inductor that calls mtpc's kernels.

    Attributes:
        module: its inputs are those of Dynamo's graph that are kept, then the derived weights.
        inputs: an example of each input; tensors are fake.
        kept: indices of the kept inputs of Dynamo's graph.
        recipes: recipes of the derived weights, by name; they refer to parameters by name.
        positions: indices of these parameters among the inputs of Dynamo's graph.
        counts: the fields of the graph's `Report`.
    """

    module: fx.GraphModule
    inputs: list[Any]
    kept: tuple[int, ...]
    recipes: Mapping[str, Recipe]
    positions: Mapping[str, int]
    counts: Mapping[str, Any]


def passes(quantize: str | None) -> tuple[Pass, ...]:
    """The passes that apply to a plain forward, without a step's buffers, pages or drafts."""
    return (
        Canonicalise(),
        PackGroups(quantize or ""),
        PackWeights(),
        FuseElementwise(),
        FuseHeadMax(),
        FuseLinearChains(),
        UseCpuKernels(),
    )


def why_not(module: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Why Inductor must compile the whole graph, as far as is known before it is traced again."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return (
            "it may need gradients, and mtpc's kernels have none; call the module under "
            "torch.no_grad() or torch.inference_mode()"
        )
    devices = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    if devices:
        return f"it has tensors on {', '.join(devices)}; this backend has kernels for cpu"
    if torch.is_autocast_enabled("cpu"):
        return "it runs under torch.autocast; convert the module to bfloat16 instead"
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            return f"it calls the higher-order operator {node.target}"
        value = node.meta.get("example_value")
        if isinstance(value, _SIZED) and free_unbacked_symbols(value):
            return f"a size depends on values: {node.format_node()}"
    return None


def rewrite(module: fx.GraphModule, inputs: Sequence[Any], quantize: str | None) -> Rewritten | str:
    """Run the passes on one of Dynamo's graphs.

    Args:
        module: the graph, which is not changed.
        inputs: one for each placeholder.
        quantize: scheme that quantises the weights of linear layers, or None.

    Returns:
        The rewritten graph, or the reason why no kernel of mtpc's can be used.
    """
    try:
        load_kernels()
    except BackendError as error:
        return str(error)
    traced = _trace(module, inputs)
    if isinstance(traced, str):
        return traced
    if (write := _late_write(traced.graph)) is not None:
        return f"it changes a tensor in place that it has read before: {write.format_node()}"
    targets = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    # `L_self_modules_lm_head_parameters_weight_` is "L_self.lm_head.weight".
    titles = [".".join(_SEPARATORS.split(target.rstrip("_"))) for target in targets]
    step, held = _with_weights(traced, titles, inputs)
    before = _calls(step.graph)
    for node in step.graph.nodes:
        node.meta["piece"] = "graph"
    run_pipeline(step, passes(quantize), lambda graph, name: graph.graph.lint())
    rewrites = {record.name: record.rewrites for record in step.history}
    if not rewrites[PackWeights.name] + rewrites[PackGroups.name]:
        forms = "bfloat16" if quantize is None else f"bfloat16, or one that {quantize!r} fits"
        return f"no linear layer of it has a parameter in {forms}"
    after, ours = _calls(step.graph), {str(kernel) for kernel in kernel_table().values()}
    counts = dict(
        operators=before.total(),
        kernels={name: count for name, count in after.items() if name in ours},
        left={name: count for name, count in after.items() if name not in ours},
        rewrites=rewrites,
    )
    return _with_inputs(step, held, inputs, counts)


def _trace(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | str:
    """Trace the graph to ATen operators; returns a reason if that fails.

    There is no decomposition and no functionalisation, which Inductor does later: a linear layer
    stays one node, and an in-place operator stays in place.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    mode: Any = detect_fake_mode()  # Dynamo's, whose sizes have its symbols.
    fakes = [
        mode.from_tensor(node.meta["example_value"]) if isinstance(value, Tensor) else value
        for node, value in zip(placeholders, inputs, strict=True)
    ]
    run = _Calls(module).run
    try:
        with mode, enable_python_dispatcher():
            traced = make_fx(run, pre_dispatch=True)(*fakes)
    except Exception as error:  # A host's custom operators may raise anything.
        return f"it cannot be traced again: {type(error).__name__}: {error}"
    for name, value in [*traced.named_parameters(), *traced.named_buffers()]:
        if isinstance(value, FakeTensor):
            return (
                f"tracing it again loses where {name} comes from, a {value.dtype} of {value.shape}"
            )
    for node in list(traced.graph.nodes):
        if node.target in _SWITCHES and node.args[_SWITCHES[node.target]]:
            return f"it switches {node.target.__name__.strip('_')} on"
    for node in reversed(traced.graph.nodes):
        if node.target in _SWITCHES or node.target is _LEAVE:
            traced.graph.erase_node(node)
    return traced


class _Calls(fx.Interpreter):
    """Runs one of Dynamo's graphs under `make_fx`."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Replace `.data` by `detach`, which is the same without gradients.

        make_fx does not trace `.data`: its result would be a constant without a value.
        """
        if target is torch._C._autograd._get_data_attr:  # type: ignore[attr-defined]
            return args[0].detach()
        return super().call_function(target, args, kwargs)


def _late_write(graph: fx.Graph) -> fx.Node | None:
    """The first in-place write to a value that a pass may read earlier or later than the graph.

    Passes move reads of floating-point values to the fused operator, and a norm up to the sum that
    it reads. They do not look for writes in between, because a step's graph has none.
    """
    effects, read = analyse(graph), set[Root]()
    for node in graph.nodes:
        for root in effects.writes[node]:
            if root in read or (is_call(root, aten.add.Tensor) and _is_floating(root)):
                return node
        if getattr(node.target, "overloadpacket", None) in _FUSED:
            values = [arg for arg in node.all_input_nodes if _is_floating(arg)]
            read.update(*(effects.roots[arg] - effects.roots[node] for arg in values))
    return None


def _is_floating(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _with_weights(
    traced: fx.GraphModule, titles: Sequence[str], inputs: Sequence[Any]
) -> tuple[StepGraph, dict[str, fx.Node]]:
    """Turn parameters into attributes; returns the graph, and their placeholders by name.

    Args:
        traced: the graph, which is changed in place.
        titles: the name of each input in the module.
        inputs: one for each placeholder.
    """
    graph, effects = traced.graph, analyse(traced.graph)
    written = frozenset[Root]().union(*effects.writes.values())
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    held: dict[str, fx.Node] = {}
    tensors: dict[str, Tensor] = {}
    for node, title, value in zip(placeholders, titles, inputs, strict=True):
        if not _is_weight(value) or written & effects.roots[node] or not node.users:
            continue
        name = title if title not in held else f"{title}.{len(held)}"
        held[name], tensors[name] = node, value
        set_tensor(traced, name, value)
        with graph.inserting_after(placeholders[-1]):
            weight = graph.get_attr(name)
        weight.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(weight)
    table = Weights(tensors)
    table.defers = True
    return StepGraph(traced, StepKey.decode(1, 0), Layout([], {}), table), held


def _is_weight(value: Any) -> bool:
    """Whether an input is a strided parameter with a version counter, which shows changes."""
    return (
        isinstance(value, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_inference()
        and not is_traceable_wrapper_subclass(value)
    )


def _with_inputs(
    step: StepGraph, held: Mapping[str, fx.Node], given: Sequence[Any], counts: Mapping[str, Any]
) -> Rewritten:
    """Turn parameters and derived weights back into inputs.

    Args:
        step: the graph after the passes.
        held: placeholders of parameters by name.
        given: inputs of Dynamo's graph.
        counts: see `Rewritten`.
    """
    graph = step.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last, used = placeholders[-1], dict[str, Recipe]()
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name in held:
            node.replace_all_uses_with(held[name])
        elif name in step.weights.recipes:
            used[name] = step.weights.recipes[name]
            with graph.inserting_after(last):
                last = graph.placeholder(f"derived_{len(used)}")
            last.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(last)
        else:
            continue
        graph.erase_node(node)
    index = {node: i for i, node in enumerate(placeholders)}
    positions = {name: index[node] for name, node in held.items()}
    read = {name for recipe in used.values() for name in names(recipe)}
    for node in placeholders:
        if node in held.values() and not node.users:
            graph.erase_node(node)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    kept = tuple(index[node] for node in nodes if node in index)
    others = {node: given[i] for node, i in index.items() if not isinstance(given[i], Tensor)}
    return Rewritten(
        fx.GraphModule(step.module, graph),
        [others[node] if node in others else node.meta["val"] for node in nodes],
        kept,
        used,
        {name: position for name, position in positions.items() if name in read},
        counts,
    )


def _calls(graph: fx.Graph) -> Counter[str]:
    """The number of calls of each operator, by name."""
    return Counter(str(node.target) for node in graph.nodes if isinstance(node.target, OpOverload))
