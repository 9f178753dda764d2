"""Devices that kernels can be compiled for, by name: `hip:gfx942`, `cuda:90`.

CUDA and HIP differ for us in what stands in this table, and in nothing else: torch and Triton
have one interface to both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtpc.errors import OptionError


@dataclass(frozen=True)
class Target:
    """A device's architecture.

    Attributes:
        vendor: "hip" or "cuda", as Triton names its backends.
        arch: "gfx942", "90".
        device: what has it, for people.
        warp_size: threads of a warp (wavefront).
        shared_bytes: shared memory (LDS) that one program may have.
        binary: ending of a code object.
    """

    vendor: str
    arch: str
    device: str
    warp_size: int
    shared_bytes: int
    binary: str

    @property
    def name(self) -> str:
        """As `parse_target` takes it."""
        return f"{self.vendor}:{self.arch}"


_KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("hip", "gfx942", "MI300X, MI325X", 64, 64 * _KIB, "hsaco"),
        Target("hip", "gfx950", "MI350X, MI355X", 64, 160 * _KIB, "hsaco"),
        Target("cuda", "80", "A100", 32, 163 * _KIB, "cubin"),
        Target("cuda", "90", "H100, H200", 32, 227 * _KIB, "cubin"),
        Target("cuda", "100", "B200", 32, 227 * _KIB, "cubin"),
    )
}


def parse_target(name: str) -> Target:
    """The row of a name.

    Raises:
        OptionError: it is none of the table.
    """
    found = TARGETS.get(re.sub(r"^cuda:sm_?", "cuda:", name.strip().lower()))
    if found is None:
        raise OptionError(f"unknown target {name!r}; targets: {', '.join(TARGETS)}")
    return found
