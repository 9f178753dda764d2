"""Running a compiled package: open its library, bind tensors to its constants, call it.

A warm start needs no other part of the cpu backend: no Inductor, no export, no compiler. The class
in `cpu_kernels/runner.cpp` wraps AOTInductor's runner and releases Python's lock while a package
runs. So other threads go on, such as an event loop that serves the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtpc.backends.base import Run
from mtpc.errors import BackendError
from mtpc.layout import dtype_name

LIBRARY, CALLS = "step.so", "step.json"
"""Files of a package: the generated library, and the list of operators that it calls through
torch's dispatcher. A package without such operators has no list. AOTInductor's runner expects the
list beside the library, under the same name."""


DEVICE = "cpu"
"""Where packages run, as torch names it."""


@dataclass(frozen=True)
class Package:
    """How to call a package.

    Attributes:
        inputs: names of the tensors that are passed at each call, in order.
        tensors: name -> `signature` (dtype, shape, strides) of each input and constant; the code
            relies on it.
    """

    inputs: tuple[str, ...]
    tensors: Mapping[str, str]

    @property
    def constants(self) -> frozenset[str]:
        """Names of the tensors that are bound once."""
        return frozenset(self.tensors) - set(self.inputs)


def open_package(directory: Path, package: Package, tensor_of: Callable[[str], Tensor]) -> Run:
    """Load a package and bind it to tensors, which it uses in place.

    The kernels must be loaded before (`cpu_kernels.load_kernels`). The returned callable releases
    Python's lock. It must not run in two threads at the same time.

    Args:
        directory: holds LIBRARY and, if the package needs it, CALLS.
        package: how to call the package.
        tensor_of: name -> tensor.

    Raises:
        BackendError: the library cannot be loaded here, or a tensor does not fit the package.
    """
    try:
        runner = torch.classes.mtpc_runner.Runner(str(directory / LIBRARY))
    except RuntimeError as error:
        raise BackendError(f"{directory / LIBRARY} cannot be loaded: {error}") from error
    tensors = {name: tensor_of(name).detach() for name in package.tensors}
    _check_signatures(package, tensors)
    internal = dict(runner.constants())
    if internal.keys() != package.constants:
        raise BackendError(
            f"{directory / LIBRARY} does not refer to {sorted(package.constants - internal.keys())}"
            f" and refers to unknown {sorted(internal.keys() - package.constants)}; expected the "
            "constants of its record: Inductor copied a tensor into the code, where later writes "
            "to it would be lost"
        )
    constants = {internal[name]: tensors[name] for name in package.constants}
    runner.bind(constants, [tensors[name] for name in package.inputs])
    run: Run = runner.run
    return run


def _check_signatures(package: Package, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with what the package was compiled for; its code checks nothing itself."""
    for name, wanted in package.tensors.items():
        found = signature(tensors[name])
        if found != wanted:
            raise BackendError(
                f"{name} is {found}; the package was compiled for {wanted}; pass the tensors of "
                "the model that it was built for"
            )


def signature(tensor: Tensor) -> str:
    """A tensor's dtype, shape and strides as text: `bfloat16[64,32](32,1)`."""
    shape, stride = ",".join(map(str, tensor.shape)), ",".join(map(str, tensor.stride()))
    return f"{dtype_name(tensor.dtype)}[{shape}]({stride})"
