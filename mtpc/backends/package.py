"""Opening a compiled package: a tape, and the tensors that it is bound to.

A warm start needs no other part of the cpu backend: no tracing and no compiler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mtpc.backends.base import Begin, OpenStep, TensorOf
from mtpc.backends.tape import open_tape
from mtpc.errors import BackendError
from mtpc.layout import dtype_name
from mtpc.layout.open_sizes import NO_SIZES, Size, size_of

TAPE = "step.tape.json"
"""File of a package: see `mtpc.backends.tape`."""
DEVICE = "cpu"
"""Where packages run, as torch names it."""


@dataclass(frozen=True)
class Package:
    """What a package is bound to.

    Attributes:
        tensors: name -> `signature` (dtype, shape, strides) of each tensor; the tape relies on it.
            Open sizes are text.
        fixed: sizes that could be open, and are not -> the only number that it is right for.
        least: open sizes -> the least number that it is right for.
    """

    tensors: Mapping[str, str]
    fixed: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)

    def refusal(self, sizes: Mapping[str, int]) -> str | None:
        """Why the package is not right for sizes; None if it is."""
        for name, number in self.fixed.items():
            if sizes.get(name) != number:
                return f"{name} is {sizes.get(name)}, and it was compiled for {number} alone"
        for name, number in self.least.items():
            if sizes.get(name, -1) < number:
                return f"{name} is {sizes.get(name)}, and it was compiled for {number} or more"
        return None


@dataclass(frozen=True)
class TapeArtifact:
    """The artifact of the cpu backend: what `write_tape` wrote, or the file that holds it."""

    package: Package
    tape: bytes | Path

    @property
    def files(self) -> Mapping[str, bytes]:
        return {TAPE: self.tape if isinstance(self.tape, bytes) else self.tape.read_bytes()}

    def open(
        self,
        tensor_of: TensorOf,
        sizes: Mapping[str, int] = NO_SIZES,
        begin: Begin = lambda stage: None,
    ) -> OpenStep:
        """Load the tape and bind it; see `Artifact.open`.

        The kernels must be loaded before (`cpu_kernels.load_kernels`). The run releases Python's
        lock. It must not run in two threads at the same time.

        Raises:
            BackendError: the tape is damaged, or a tensor or a size does not fit the package.
        """
        refusal = self.package.refusal(sizes)
        if refusal is not None:
            raise BackendError(f"a step does not fit: {refusal}; build it for these options")
        tensors = {name: tensor_of(name).detach() for name in self.package.tensors}
        for name, form in self.package.tensors.items():
            found, wanted = signature(tensors[name]), sized(form, sizes)
            if found != wanted:
                raise BackendError(
                    f"{name} is {found}; the package was compiled for {wanted}; pass the tensors "
                    "of the model that it was built for"
                )

        def named(name: str) -> Tensor:
            if name not in tensors:
                raise BackendError(
                    f"a tape reads {name}, which its record does not name; run `mtpc cache "
                    "verify`, and build the step again"
                )
            return tensors[name]

        return OpenStep(open_tape(self.files[TAPE], named, sizes))


def signature(tensor: Tensor) -> str:
    """A tensor's dtype, shape and strides as text: `bfloat16[64,32](32,1)`."""
    return signature_text(tensor.dtype, tensor.shape, tensor.stride())


def signature_text(dtype: torch.dtype, shape: Sequence[Size], strides: Sequence[Size]) -> str:
    """A `signature`, which may have open sizes: `int32[1*S,1*M](1*M,1)`."""
    listed = (",".join(map(str, row)) for row in (shape, strides))
    return "{}[{}]({})".format(dtype_name(dtype), *listed)


def signature_bytes(signature: str) -> int:
    """Bytes of a dense tensor by its `signature`, which has no open sizes."""
    dtype, _, rest = signature.partition("[")
    sizes = rest.partition("]")[0]
    count = prod(int(size) for size in sizes.split(",") if size)
    return count * getattr(torch, dtype).itemsize


def sized(form: str, sizes: Mapping[str, int]) -> str:
    """A signature with numbers for its open sizes.

    Raises:
        BackendError: it is no signature.
    """
    found = re.fullmatch(r"(\w+)\[([^\]]*)\]\(([^)]*)\)", form)
    if found is None:
        raise BackendError(f"{form[:60]!r} is no signature of a tensor; run `mtpc cache verify`")
    dtype, *rows = found.groups()
    numbers = (
        ",".join(n if n.isdigit() else str(size_of(n, sizes)) for n in row.split(",") if n)
        for row in rows
    )
    return "{}[{}]({})".format(dtype, *numbers)
