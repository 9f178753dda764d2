"""Launches that begin before the one before them has ended.

NVIDIA calls it programmatic dependent launch, and has it from Hopper on. Kernels with a parameter
EARLY can do it: `await_launches` lets the next launch begin, and waits until all launches before
have ended. What comes before it in a kernel may use weights alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mtpc.backends.targets import Target

if TYPE_CHECKING:
    from mtpc.backends.triton_kernels.launch import Launch

EARLY = "early"
"""The word in a call's `configs` by which its launches may begin early."""
_PARAMETER, _OPTION = "EARLY", "launch_pdl"


@triton.jit
def await_launches(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every program calls it, before it reads or writes anything but weights: a launch has ended
    when all its programs have, so the launches before it have ended, too."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_constants(launch: Launch, device: Target | None) -> dict[str, bool]:
    """The constant EARLY of a kernel that has it.

    Args:
        launch: may begin early or not.
        device: where Triton launches it; None: not Triton does, or on a device without a row.
    """
    if _PARAMETER not in launch.kernel.arg_names:
        return {}
    return {_PARAMETER: launch.early and device is not None and device.begins_early}


def early_options(constants: dict[str, Any]) -> dict[str, Any]:
    """Triton's option of a launch with these constants."""
    return {_OPTION: True} if constants.get(_PARAMETER) else {}
