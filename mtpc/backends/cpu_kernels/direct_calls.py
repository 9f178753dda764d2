"""Which kernels generated code calls as functions of C, past torch's dispatcher (`shims.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mtpc.backends.cpu_kernels.build import LIBRARY

_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "int": "int64_t",
    "float": "double",
    "bool": "int32_t",
    "str": "const char*",
}


def function_of(name: str) -> str:
    """The C function of an op, as AOTInductor derives it from the op's name."""
    return f"aoti_torch_cpu_{name}"


def open_to_packages(directory: Path) -> None:
    """Let packages that are loaded later find the kernels' functions by name."""
    ctypes.CDLL(str(directory / LIBRARY), mode=ctypes.RTLD_GLOBAL)


def declarations(names: Iterable[str]) -> dict[Any, list[str]]:
    """AOTInductor's setting `custom_ops_to_c_shims`: an op's functions, by its overload."""
    overloads = (getattr(torch.ops.mtpc_cpu, name).default for name in names)
    return {overload: [_declaration(overload)] for overload in overloads}


def _declaration(overload: Any) -> str:
    """The C function that takes an op's arguments, then a place for each result."""
    schema = overload._schema
    arguments = [_parameters(str(argument.type), argument.name) for argument in schema.arguments]
    results = [f"AtenTensorHandle* result{i}" for i in range(max(len(schema.returns), 1))]
    function = function_of(schema.name.removeprefix("mtpc_cpu::"))
    return f"AOTITorchError {function}({', '.join([*arguments, *results])})"


def _parameters(kind: str, name: str) -> str:
    """The C function's for one argument; a list comes with its length."""
    if kind == "List[Tensor]":
        return f"const AtenTensorHandle* {name}, int64_t num_{name}"
    return f"{_C_TYPES[kind]} {name}"
