"""Custom operators: the few operations that a step contains beyond ATen.

Each is a `torch.library` operator `mtpc::NAME`: a plain PyTorch function that is its specification.
The function is the only place where the operator's arguments, their defaults, what it writes and
its traits (`mtpc.ops.traits`) are declared. Backends derive their own operators from its schema
(`references`), and their kernels are tested against it. A fake gives the shapes and dtypes of the
results; an operator without results needs none. Importing this package registers every operator of
its modules. Operators that serve one backend are in `ops` of that backend's package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.library import CustomOpDef

from mtpc.ops.traits import declared

Kind = TypeVar("Kind")


def members(package: ModuleType, kind: type[Kind]) -> dict[str, Kind]:
    """All objects of a type that the modules of a package hold, by name and in its order."""
    found: dict[str, Kind] = {}
    for module in iter_modules(package.__path__):
        names = vars(import_module(f"{package.__name__}.{module.name}"))
        found |= {name: value for name, value in names.items() if isinstance(value, kind)}
    return dict(sorted(found.items()))


def references() -> dict[str, Any]:
    """The overload of every operator by name: those here, and those of the backends' packages of
    operators that were imported."""
    return {name: getattr(torch.ops.mtpc, name).default for name in declared()}


def __getattr__(name: str) -> Any:
    # Operators are attributes of this module, but type checkers do not see them.
    raise AttributeError(f"mtpc.ops has no operator {name!r}")


_DEFINITIONS = members(sys.modules[__name__], CustomOpDef)
globals().update(_DEFINITIONS)

__all__ = ["members", "references", *_DEFINITIONS]
