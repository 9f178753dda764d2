"""One kernel launch as a value: what an op runs, and what is compiled ahead of time for it.

Every op here is a list of launches derived from its tensors' shapes, dtypes and strides alone, so
the same function serves real tensors, fake tensors of a traced graph, and the cross-compiler.

A launch may begin before the one before it has ended. NVIDIA calls it programmatic dependent
launch, and has it from Hopper on. Kernels with a parameter EARLY can do it: `await_launches` lets
the next launch begin, and waits until all launches before have ended. What comes before it in a
kernel may use weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import wrap_triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mtpc.backends.targets import TARGETS, Target
from mtpc.errors import BackendError

ALIGNMENT = 16
"""Where its key says so (`crosscompile`), compiled code assumes that a tensor begins at a multiple
of this number of bytes, and that an integer is a multiple of this number."""
FUSION: Mapping[str, Any] = {"enable_fp_fusion": True}
"""Products and sums may be one instruction. It is explicit because Triton's default will change."""
EARLY = "early"
"""The word in a call's `configs` by which its launches may begin early."""
_PARAMETER, _OPTION = "EARLY", "launch_pdl"
_TRACED = (FakeTensor, FunctionalTensor)


@triton.jit
def await_launches(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every program calls it before it reads or writes anything but weights. It waits for the end
    of the launch before, which has waited in the same way, so all earlier launches have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@dataclass(frozen=True)
class Change:
    """A difference from the default configuration.

    Attributes:
        threads: another number of threads, or None.
        num_stages: another number of stages, or None.
        factors: factors of tile sizes, by name.
        amd: options of Triton's compiler for AMD, which alone has such a change: `waves_per_eu`,
            the waves that share a unit, and `matrix_instr_nonkdim`, the sides of a product.
    """

    threads: int | None = None
    num_stages: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    amd: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """How a kernel's launches can be changed. Changes are chosen on paper, and kept if they fit and
    hardly spill on every target (tests/gpu/test_crosscompile.py).

    Attributes:
        changes: changes of the default; few, because each is compiled for each target and measured.
        axes: tile size -> the axis of the grid that it cuts, and the constant with the extent.
    """

    changes: tuple[Change, ...] = ()
    axes: Mapping[str, tuple[int, str]] = field(default_factory=dict)


NO_CHOICE = Choice()
"""For a kernel that always runs by default."""


@dataclass(frozen=True)
class Launch:
    """One kernel over one grid.

    Attributes:
        kernel: the `triton.jit` function.
        grid: programs along x, y and z: sizes of the bucket, never lengths of its requests.
        values: tensors and integers by name and, in capitals, constants. They may be those of
            all launches of an operator: the kernel gets what its parameters name.
        threads: in a program: whole warps (`warp_size`), at least one.
        num_stages: depth of software pipelining.
        amd: further options of Triton's compiler for AMD; {} for another vendor.
        choice: how else it may be run.
        early: whether it may begin before the launch before it has ended, if its kernel and the
            device can do that (`await_launches`).
    """

    kernel: Any
    grid: tuple[int, int, int]
    values: Mapping[str, Any]
    threads: int = 256
    num_stages: int = 2
    amd: Mapping[str, int] = field(default_factory=dict)
    choice: Choice = NO_CHOICE
    early: bool = False

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Tensors and integers by parameter name."""
        return {name: value for name, value in self._given.items() if not name.isupper()}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """`tl.constexpr` parameters."""
        return {name: value for name, value in self._given.items() if name.isupper()}

    @cached_property
    def _given(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.kernel.arg_names if name in self.values}


def warp_size() -> int:
    """Threads of a warp on this process's device: 64 on AMD's Instinct, 32 on its Radeon and on
    NVIDIA's; 32 where there is no GPU."""
    return torch.cuda.get_device_properties().warp_size if torch.cuda.is_available() else 32


def vendor_here() -> str:
    """Triton's name of the backend of this process's torch: "hip" or "cuda"."""
    return "hip" if torch.version.hip else "cuda"


def run(launches: Iterable[Launch]) -> None:
    """Launch in order on the current stream; under tracing, leave the kernels in the graph."""
    for launch in launches:
        options: dict[str, Any] = dict(
            num_warps=max(1, launch.threads // warp_size()),
            num_stages=launch.num_stages,
            **launch.amd,
        )
        kernel, device = launch.kernel, None
        if not any(isinstance(value, _TRACED) for value in launch.values.values()):
            options |= FUSION
            device = device_target() if launch.early and not is_interpreted(kernel) else None
        elif is_interpreted(kernel):
            continue  # The interpreter would read the fake tensors.
        else:
            # Without FUSION and early launches: Inductor compiles kernels with its own options.
            kernel = wrap_triton(kernel)
        values = {**launch.arguments, **launch.constants, **early_constants(launch, device)}
        kernel[launch.grid](**values, **options, **early_options(values))


def early_constants(launch: Launch, device: Target | None) -> dict[str, bool]:
    """The constant EARLY of a kernel that has it.

    Args:
        launch: may begin early or not.
        device: where Triton launches it; None: another library launches it, or `TARGETS` lacks the
            device.
    """
    if _PARAMETER not in launch.kernel.arg_names:
        return {}
    return {_PARAMETER: launch.early and device is not None and device.begins_early}


def early_options(values: dict[str, Any]) -> dict[str, Any]:
    """Triton's option of a launch with these values."""
    return {_OPTION: True} if values.get(_PARAMETER) else {}


def device_target() -> Target | None:
    """The row of `TARGETS` for this process's device; None where there is none."""
    found = driver.active.get_current_target()
    return TARGETS.get(f"{found.backend}:{found.arch}")


def widen(kernel: Any, *tensors: Tensor) -> bool:
    """Whether dot products must take float32 operands: Triton's interpreter multiplies bfloat16
    by its bit patterns (triton-lang/triton#11584). Never where a kernel is compiled."""
    return is_interpreted(kernel) and any(tensor.dtype == torch.bfloat16 for tensor in tensors)


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter runs a kernel."""
    return not isinstance(kernel, JITFunction)


def adjacent(tensor: Tensor, what: str) -> Tensor:
    """A cache or weight as it is, which must not be copied.

    Raises:
        BackendError: its last dimension is not adjacent in memory.
    """
    if tensor.stride(-1) != 1:
        raise BackendError(
            f"{what} has strides {tuple(tensor.stride())}; Triton kernels expect elements of the "
            "last dimension side by side"
        )
    return tensor


def flat_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N], copied only if rows have no common stride or are not adjacent."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that holds `size`, and is at least `least`."""
    return max(least, int(triton.next_power_of_2(size)))
