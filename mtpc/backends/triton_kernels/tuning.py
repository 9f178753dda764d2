"""Which configuration of a kernel is fastest on a device, and whether a library is faster still.

    call of an op -> its launches -> the table's row of each -> `configs`
    call of an op -> with these `configs`, beside a library -> the table's row -> which of the two

Without a device nothing is measured: every launch runs by default, and no library is asked.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from mtpc.backends.expand import Function
from mtpc.backends.measured import Table
from mtpc.backends.triton_kernels.configs import Config, configs_of
from mtpc.backends.triton_kernels.crosscompile import triton_fields
from mtpc.backends.triton_kernels.launch import Launch, vendor_here
from mtpc.backends.triton_kernels.plans import node_launches, op_name
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.capture.inline import fake_mode_of
from mtpc.layout import dtype_name
from mtpc.ops.signatures import arguments_of
from mtpc.store.key import hash_of

OURS, THEIRS = "triton", "library"
"""The candidates for a whole operator."""


@dataclass(frozen=True)
class Call:
    """A call of an operator, to be measured.

    Attributes:
        node: the call, of fake tensors.
        graph: its step, whose weights are on the device.
    """

    node: fx.Node
    graph: StepGraph

    def weight(self, argument: Any) -> Tensor | None:
        """An argument's tensor if it is a weight, else None."""
        if not isinstance(argument, fx.Node) or argument.op != "get_attr":
            return None
        tensor = get_tensor(self.graph.module, str(argument.target))
        return None if self.graph.weights.name_of(tensor) is None else tensor


Timer = Callable[[Call, int, Sequence[Config]], list[float]]
"""Seconds that one launch of a call, given by its index, takes in each configuration; infinite
where the device refuses it. Raises BackendError where nothing can be measured."""
WholeTimer = Callable[[Call, str, Function], list[float]]
"""Seconds of a whole call in a graph: on our kernels in such `configs`, and by the function;
infinite where the device refuses the latter. Raises as `Timer` does."""


@dataclass
class Tuner:
    """Chooses for every launch of a call, and between our kernels and a library.

    Attributes:
        table: the rows.
        timer: measures.
        sources: a digest of this package: kernels, what they share, and their configurations. With
            other sources a row is measured anew.
    """

    table: Table
    timer: Timer
    sources: str = field(
        default_factory=lambda: hash_of(
            path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))
        )
    )

    def __call__(self, node: fx.Node, graph: StepGraph) -> tuple[str, tuple[str, ...]]:
        """The argument `configs` of a call ("" if all launches run by default), and notes."""
        with fake_mode_of(graph.graph):
            launches = node_launches(node)
        words: list[str] = []
        notes: list[str] = []
        for index, launch in enumerate(launches):
            configs = configs_of(launch, vendor_here())
            if len(configs) > 1:
                measure = partial(self.timer, Call(node, graph), index, configs)
                key = {**launch_fields(launch), "source": self.sources}
                names = tuple(map(str, configs))
                choice, more = self.table.choose(launch.name, names, key, measure)
                notes += more
                if choice != names[0]:
                    words.append(f"{launch.name}:{choice}")
        return ";".join(words), tuple(notes)

    def prefers(
        self, timer: WholeTimer, function: Function, node: fx.Node, graph: StepGraph
    ) -> tuple[bool, tuple[str, ...]]:
        """Whether a library's function computes a call faster than our kernels in their fastest
        configurations; and notes. Those on our launches are said again where these are bound."""
        configs, notes = self(node, graph)
        names, measure = (OURS, THEIRS), partial(timer, Call(node, graph), configs, function)
        source = Path(inspect.getfile(function)).read_bytes()
        key = {
            **_call_fields(node),
            "ours": configs,
            "source": hash_of([self.sources.encode(), source]),
        }
        choice, more = self.table.choose(f"mtpc::{op_name(node)}", names, key, measure)
        return choice == THEIRS, (*notes, *more) if choice == THEIRS else more


def launch_fields(launch: Launch) -> dict[str, str]:
    """A launch in the key of a row: everything that the time depends on, except lengths and the
    numbers of pages and slots."""
    arguments, constants = launch.arguments, dict(launch.constants)
    dtypes = {n: dtype_name(a.dtype) for n, a in arguments.items() if isinstance(a, Tensor)}
    integers = {n: a for n, a in arguments.items() if not isinstance(a, Tensor)}
    return {
        "kernel": launch.name,
        "dtypes": json.dumps(dtypes, sort_keys=True),
        "arguments": json.dumps(integers, sort_keys=True),
        "constants": json.dumps(constants, sort_keys=True),
        "grid": json.dumps(launch.grid),
        **triton_fields(),
    }


def _call_fields(node: fx.Node) -> Mapping[str, str]:
    """A call in the key of a row."""
    call = {
        name: [dtype_name(value.dtype), [*value.shape], [*value.stride()]]
        if isinstance(value, Tensor)
        else value
        for name, value in arguments_of(node).items()
    }
    form = json.dumps(call, sort_keys=True)
    return {"operator": op_name(node), "call": form, "torch": torch.__version__, **triton_fields()}
