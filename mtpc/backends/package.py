"""Running a compiled package: open its library, bind tensors to its constants, call it.

This is all of the cpu backend that a warm start needs: no Inductor, no export, no compiler. The
runner is AOTInductor's, in an object of our own (`cpu_kernels/runner.cpp`) that lets go of Python's
lock while a package runs: other threads go on, an event loop that serves its results for one.
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
"""The generated library, and the list of operators that it calls through torch's dispatcher, if
any. AOTInductor's runner looks for the list beside the library, under the same name."""


DEVICE = "cpu"
"""Where packages run, as torch names it."""


@dataclass(frozen=True)
class Package:
    """How a package is called.

    Attributes:
        inputs: tensors passed at each call, in order, by name.
        tensors: what the code takes for granted of every input and constant, by name:
            dtype, shape and strides.
    """

    inputs: tuple[str, ...]
    tensors: Mapping[str, str]

    @property
    def constants(self) -> frozenset[str]:
        """Tensors bound once."""
        return frozenset(self.tensors) - set(self.inputs)


def open_package(directory: Path, package: Package, tensor_of: Callable[[str], Tensor]) -> Run:
    """Load a package and bind it to tensors, which it uses in place from then on.

    The kernels must be loaded (`cpu_kernels.load_kernels`). What is returned runs without Python's
    lock, and is for one thread at a time.

    Args:
        directory: holds LIBRARY and, if there are any, CALLS.
        package: how it is called.
        tensor_of: the tensor of each name.

    Raises:
        BackendError: the library cannot be loaded here, or a tensor is not what it was made for.
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
            f" and refers to unknown {sorted(internal.keys() - package.constants)}: a tensor was "
            "copied into the code and later writes to it would be lost"
        )
    constants = {internal[name]: tensors[name] for name in package.constants}
    runner.bind(constants, [tensors[name] for name in package.inputs])
    run: Run = runner.run
    return run


def _check_signatures(package: Package, tensors: Mapping[str, Tensor]) -> None:
    """The code reads memory by the strides it was compiled for, and checks nothing."""
    for name, wanted in package.tensors.items():
        found = signature(tensors[name])
        if found != wanted:
            raise BackendError(
                f"{name} is {found}, the package was compiled for {wanted}: "
                "the tensors are not those of the model that it was built for"
            )


def signature(tensor: Tensor) -> str:
    """What generated code takes for granted of a tensor: `bfloat16[64,32](32,1)`."""
    shape, stride = ",".join(map(str, tensor.shape)), ",".join(map(str, tensor.stride()))
    return f"{dtype_name(tensor.dtype)}[{shape}]({stride})"
