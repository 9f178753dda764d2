"""mtpc as a backend of torch.compile: `torch.compile(module, backend="mtpc")`.

Dynamo captures a graph. mtpc's passes put its CPU kernels in the place of linear layers and of what
stands between them, and Inductor compiles the rest. A graph that mtpc does not rewrite is
Inductor's as a whole; a `Report` says so and why. See docs/embedding.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from mtpc.config import check_scheme
from mtpc.errors import BackendError, OptionError
from mtpc.integrations.dynamo.graph import Rewritten, rewrite, why_not
from mtpc.integrations.dynamo.weights import CallWeights, WeightStore
from mtpc.option_checks import unknown_option

log = logging.getLogger("mtpc")
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]
FALLBACKS = ("inductor", "error")


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options={...})` may say to this backend.

    Attributes:
        quantize: a scheme for the weights of linear layers, "int4-g32" for example; the outputs
            then differ from the module's. None rounds nothing.
        fallback: what becomes of a graph in which mtpc finds nothing to do: "inductor" leaves it to
            Inductor and warns; "error" raises.
    """

    quantize: str | None = None
    fallback: str = FALLBACKS[0]

    def __post_init__(self) -> None:
        if self.quantize is not None:
            check_scheme("quantize", self.quantize)
        if self.fallback not in FALLBACKS:
            expected = " or ".join(map(repr, FALLBACKS))
            raise OptionError(f"fallback is {self.fallback!r}; expected {expected}")

    @classmethod
    def of(cls, mode: str | None, given: Mapping[str, Any] | None) -> Options:
        """From the arguments of torch.compile.

        Raises:
            OptionError: an unknown option or value, or a mode, which is Inductor's.
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
    """Which parts of one of Dynamo's graphs mtpc and Inductor compute.

    Attributes:
        operators: of the graph, before the passes.
        kernels: mtpc's kernels -> calls; empty if Inductor computes the whole graph.
        left: operators that Inductor computes -> calls.
        rewrites: passes -> rewrites.
        reason: why Inductor computes the whole graph; None if mtpc computes a part.
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

    The entry point's is `backend`. A host that wants reports of its own makes another one and gives
    it to torch.compile in the place of the name.

    Args:
        rest: compiles graphs, with mtpc's kernels in them or without; takes the graph and an
            example of each input, and returns what takes the inputs. By default Inductor.

    Attributes:
        reports: of each graph since the last `torch.compiler.reset()`, in order.
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
        """Compile a graph of Dynamo's; torch.compile calls this.

        Args:
            module: the graph.
            example_inputs: one for each placeholder.
            mode: of torch.compile; must be None.
            options: of torch.compile; see `Options`.

        Returns:
            Takes what the graph takes, and returns what it returns.

        Raises:
            OptionError: an option that this backend does not have.
            BackendError: mtpc takes no part of the graph, and `fallback` is "error".
        """
        chosen = Options.of(mode, options)
        found = why_not(module, example_inputs) or rewrite(module, example_inputs, chosen.quantize)
        if isinstance(found, Rewritten):
            self._add(Report(**found.counts), logging.INFO)
            return self._compile(found)
        if chosen.fallback == "error":
            raise BackendError(f"mtpc takes no part of a graph: {found}")
        self._add(Report(_count_calls(module), reason=found), logging.WARNING)
        return self._rest(module, example_inputs)

    def reset(self) -> None:
        """Forget all graphs and weights; torch.compiler.reset() calls this."""
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


def _count_calls(module: fx.GraphModule) -> int:
    return sum(node.op.startswith("call_") for node in module.graph.nodes)


backend = Backend()
"""The backend of the name "mtpc"."""

__all__ = ["Backend", "Options", "Report", "backend"]
