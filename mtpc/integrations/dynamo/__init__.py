"""mtpc as a backend of torch.compile: `torch.compile(module, backend="mtpc")`.

mtpc's passes rewrite the graph that Dynamo captures: mtpc's CPU kernels replace linear layers and
the operators between them, and Inductor compiles the rest. If mtpc rewrites nothing, Inductor
compiles the whole graph, and a `Report` says why. See docs/embedding.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from mtpc.config import check_scheme, warn_of_cost
from mtpc.errors import BackendError, OptionError
from mtpc.integrations.dynamo.graph import Rewritten, rewrite, why_not
from mtpc.integrations.dynamo.weights import CallWeights, WeightStore
from mtpc.option_checks import unknown_option

log = logging.getLogger("mtpc")
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]
FALLBACKS = ("inductor", "error")


@dataclass(frozen=True)
class Options:
    """The options of this backend: `torch.compile(..., options={...})`.

    Attributes:
        quantize: a scheme that quantises the weights of linear layers, such as "int4-g32"; the
            outputs then differ from the module's. None rounds nothing.
        fallback: what to do with a graph that mtpc cannot rewrite: "inductor" compiles it with
            Inductor and warns; "error" raises.
    """

    quantize: str | None = None
    fallback: str = FALLBACKS[0]

    def __post_init__(self) -> None:
        if self.quantize is not None:
            check_scheme("quantize", self.quantize)
            warn_of_cost(self.quantize)
        if self.fallback not in FALLBACKS:
            expected = " or ".join(map(repr, FALLBACKS))
            raise OptionError(f"fallback is {self.fallback!r}; expected {expected}")

    @classmethod
    def of(cls, mode: str | None, given: Mapping[str, Any] | None) -> Options:
        """Parse the arguments of torch.compile.

        Raises:
            OptionError: an option or value is unknown, or a mode is given.
        """
        if mode is not None:
            raise OptionError(
                f"mode is {mode!r}, a setting of the backend 'inductor'; leave it out with 'mtpc'"
            )
        known = [option.name for option in fields(cls)]
        for name in given or ():
            if name not in known:
                raise OptionError(unknown_option(name, known))
        return cls(**(given or {}))


@dataclass(frozen=True)
class Report:
    """Which operators of one of Dynamo's graphs mtpc and Inductor compute.

    Attributes:
        operators: number of the graph's operators before the passes.
        kernels: calls by mtpc kernel; empty if Inductor computes the whole graph.
        left: calls by operator that Inductor computes.
        rewrites: rewrites by pass.
        reason: why Inductor computes the whole graph; None if mtpc computes a part of it.
    """

    operators: int
    kernels: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    rewrites: Mapping[str, int] = field(default_factory=dict)
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"a graph is left to Inductor: {self.reason}"
        taken = self.operators - sum(self.left.values())
        return (
            f"a graph of {self.operators} operators: mtpc's kernels take {taken} of them, in the "
            f"calls {_counts(self.kernels)}; Inductor compiles {_counts(self.left)}"
        )


def _counts(calls: Mapping[str, int]) -> str:
    ordered = sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ordered) or "nothing"


class Backend:
    """A backend of torch.compile.

    The name "mtpc" stands for the object `backend`. A host that wants separate reports makes an
    object of its own and passes it to torch.compile instead of the name.

    Args:
        rest: compiles a graph after the passes, from the graph and an example of each input;
            Inductor by default.

    Attributes:
        reports: one report per graph since the last `torch.compiler.reset()`, in order.
    """

    def __init__(self, rest: Compiler = compile_fx) -> None:
        self.reports: list[Report] = []
        self._rest, self._store = rest, WeightStore()

    def __call__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Sequence[Any]]:
        """Compile one of Dynamo's graphs; torch.compile calls this.

        Args:
            module: the graph.
            example_inputs: one for each placeholder.
            mode: torch.compile's argument; must be None.
            options: torch.compile's argument; see `Options`.

        Returns:
            A function with the graph's inputs and outputs.

        Raises:
            OptionError: see `Options.of`.
            BackendError: mtpc can rewrite no part of the graph, and `fallback` is "error".
        """
        chosen = Options.of(mode, options)
        found = why_not(module, example_inputs) or rewrite(module, example_inputs, chosen.quantize)
        if isinstance(found, Rewritten):
            self._add(Report(**found.counts), logging.INFO)
            return self._compile(found)
        if chosen.fallback == "error":
            raise BackendError(f"mtpc takes no part of a graph: {found}")
        count = sum(node.op.startswith("call_") for node in module.graph.nodes)
        self._add(Report(count, reason=found), logging.WARNING)
        return self._rest(module, example_inputs)

    def reset(self) -> None:
        """Drop all reports and packed weights; torch.compiler.reset() calls this."""
        self.reports, self._store = [], WeightStore()

    def _add(self, report: Report, level: int) -> None:
        self.reports.append(report)
        log.log(level, "%s", report)

    def _compile(self, found: Rewritten) -> Callable[..., Sequence[Any]]:
        inner = self._rest(found.module, found.inputs)
        weights, kept = CallWeights(found.recipes, found.positions, self._store), found.kept

        def run(*args: Any) -> Sequence[Tensor]:
            return inner(*[args[i] for i in kept], *weights.of(args))

        return run


backend = Backend()
"""The backend named "mtpc"."""

__all__ = ["Backend", "Options", "Report", "backend"]
