"""Devices that kernels can be compiled for, by name: `hip:gfx942`, `cuda:90`.

torch and Triton have one interface to CUDA and HIP; mtpc distinguishes them only by this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtpc.errors import OptionError


@dataclass(frozen=True)
class Target:
    """A device's architecture.

    Attributes:
        vendor: Triton's name of its backend, "hip" or "cuda".
        arch: name of the architecture: "gfx942", "90".
        device: products that have it, for messages.
        warp_size: threads of a warp (wavefront).
        shared_bytes: bytes of shared memory (LDS) that one program may use.
        binary: file name extension of a code object.
    """

    vendor: str
    arch: str
    device: str
    warp_size: int
    shared_bytes: int
    binary: str

    @property
    def name(self) -> str:
        """Name of the target, for `parse_target`."""
        return f"{self.vendor}:{self.arch}"

    @property
    def begins_early(self) -> bool:
        """Whether a launch may begin before the previous one ends: on NVIDIA GPUs since Hopper."""
        return self.vendor == "cuda" and int(self.arch) >= 90


_KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("hip", "gfx942", "MI300X, MI325X", 64, 64 * _KIB, "hsaco"),
        Target("hip", "gfx950", "MI350X, MI355X", 64, 160 * _KIB, "hsaco"),
        Target("hip", "gfx1201", "RX 9070, R9700", 32, 64 * _KIB, "hsaco"),
        Target("cuda", "80", "A100", 32, 163 * _KIB, "cubin"),
        Target("cuda", "90", "H100, H200", 32, 227 * _KIB, "cubin"),
        Target("cuda", "100", "B200", 32, 227 * _KIB, "cubin"),
    )
}


def parse_target(name: str) -> Target:
    """The target of a name.

    Raises:
        OptionError: the name is unknown.
    """
    found = TARGETS.get(re.sub(r"^cuda:sm_?", "cuda:", name.strip().lower()))
    if found is None:
        raise OptionError(f"unknown target {name!r}; expected one of {', '.join(TARGETS)}")
    return found
