"""Checks of the tensors that a host provides; one error lists all faults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import HostError
from mtpc.host.contract import HostBuffer
from mtpc.layout import StepKey, dtype_name

Wanted = Mapping[str, HostBuffer]
_SHOWN = 20


def check_tensors(
    shared: tuple[Wanted, Any], steps: tuple[Mapping[StepKey, Wanted], Any], device: str
) -> None:
    """Compare a host's tensors with the buffers of its program.

    Args:
        shared: buffers that all steps share, and the host's tensors for them, by name.
        steps: buffers of each step, and the host's tensors for them, by step and name.
        device: torch's name of the device where all tensors must be.

    Raises:
        HostError: tensors are missing or unknown; have another shape, dtype, strides or device;
            require gradients; or share memory. The message lists all faults.
    """
    problems = _check_names("", shared[0], shared[1], device)
    given = steps[1] if isinstance(steps[1], Mapping) else {}
    if not isinstance(steps[1], Mapping):
        problems.append(f"steps is {_kind(steps[1])}; expected a mapping from step keys")
    for key, wanted in steps[0].items():
        problems += _check_names(f"{key} ", wanted, given.get(key, {}), device)
    known = ", ".join(map(str, steps[0]))
    problems += [
        f"{key!s} is no step of this program; expected {known}"
        for key in given
        if key not in steps[0]
    ]
    if not problems:
        problems = _check_memory(shared[1], given)
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        listed = "".join(f"\n  {line}" for line in problems[:_SHOWN])
        raise HostError(f"the host's tensors have {len(problems)} problem(s):{listed}{more}")


def _check_names(prefix: str, wanted: Wanted, given: Any, device: str) -> list[str]:
    """Faults of one group of tensors, each message with a prefix."""
    if not isinstance(given, Mapping):
        return [f"{prefix or 'shared '}is {_kind(given)}; expected a mapping from names to tensors"]
    problems = []
    for name, buffer in wanted.items():
        if name not in given:
            problems.append(f"{prefix}{name} is missing; expected {_described(buffer)}")
            continue
        problems += [
            f"{prefix}{name} {line}" for line in _check_tensor(buffer, given[name], device)
        ]
    for name in given:
        if name not in wanted:
            near = difflib.get_close_matches(str(name), wanted, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            problems.append(f"{prefix}{name} is no buffer of this program; {hint}")
    return problems


def _check_tensor(buffer: HostBuffer, tensor: Any, device: str) -> list[str]:
    if not isinstance(tensor, Tensor):
        return [f"is {_kind(tensor)}; expected {_described(buffer)}"]
    problems = []
    if tensor.dtype != buffer.dtype:
        problems.append(f"is {dtype_name(tensor.dtype)}; expected {dtype_name(buffer.dtype)}")
    if tuple(tensor.shape) != buffer.shape:
        problems.append(f"has shape {list(tensor.shape)}; expected {list(buffer.shape)}")
    elif not tensor.is_contiguous():
        problems.append(
            f"has strides {tensor.stride()}; expected {buffer.strides}; pass whole pages of your "
            "pool, or a copy made by .contiguous()"
        )
    here = torch.empty(0, device=device).device  # "cuda" becomes the current GPU, "cuda:0".
    if tensor.device != here:
        problems.append(f"is on {tensor.device}; expected {here}")
    if tensor.requires_grad:
        problems.append("requires a gradient; expected a plain tensor; pass its .detach()")
    return problems


def _described(buffer: HostBuffer) -> str:
    return f"{dtype_name(buffer.dtype)} {list(buffer.shape)}"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _check_memory(
    shared: Mapping[str, Tensor], steps: Mapping[StepKey, Mapping[str, Tensor]]
) -> list[str]:
    """Faults of buffers that share memory: those of one step must not, those of two steps may."""
    problems: dict[str, None] = {}
    for key, own in steps.items():
        named = [*shared.items(), *((f"{key} {name}", tensor) for name, tensor in own.items())]
        ranges = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
            for name, tensor in named
            if tensor.nbytes
        )
        furthest, holder = 0, ""
        for start, end, name in ranges:
            if start < furthest:
                problems[f"{holder} and {name} share memory; each needs its own"] = None
            if end > furthest:
                furthest, holder = end, name
    return list(problems)
