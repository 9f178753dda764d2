"""Opening a compiled package: a tape, and the tensors that it is bound to.

A warm start needs no other part of the cpu backend: no tracing and no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mtpc.backends.base import Run
from mtpc.backends.tape import open_tape
from mtpc.errors import BackendError
from mtpc.layout import dtype_name

TAPE = "step.tape.json"
"""File of a package: see `mtpc.backends.tape`."""
DEVICE = "cpu"
"""Where packages run, as torch names it."""


@dataclass(frozen=True)
class Package:
    """What a package is bound to.

    Attributes:
        tensors: name -> `signature` (dtype, shape, strides) of each tensor; the tape relies on it.
    """

    tensors: Mapping[str, str]


def open_package(directory: Path, package: Package, tensor_of: Callable[[str], Tensor]) -> Run:
    """Load a package and bind it to tensors, which it uses in place.

    The kernels must be loaded before (`cpu_kernels.load_kernels`). The returned callable releases
    Python's lock. It must not run in two threads at the same time.

    Args:
        directory: holds TAPE.
        package: what it is bound to.
        tensor_of: name -> tensor.

    Raises:
        BackendError: the tape is damaged, or a tensor does not fit the package.
    """
    tensors = {name: tensor_of(name).detach() for name in package.tensors}
    _check_signatures(package, tensors)

    def named(name: str) -> Tensor:
        if name not in tensors:
            raise BackendError(
                f"{directory / TAPE} reads {name}, which its record does not name; run `mtpc cache "
                "verify`, and build the step again"
            )
        return tensors[name]

    return open_tape((directory / TAPE).read_bytes(), named)


def _check_signatures(package: Package, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with what the package was compiled for."""
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


def signature_bytes(signature: str) -> int:
    """Bytes of a dense tensor by its `signature`."""
    dtype, _, rest = signature.partition("[")
    sizes = rest.partition("]")[0]
    count = prod(int(size) for size in sizes.split(",") if size)
    return count * getattr(torch, dtype).itemsize
