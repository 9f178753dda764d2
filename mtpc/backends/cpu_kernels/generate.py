"""C++ that follows from the schemas of the operators: declarations, registration and C functions.

`mtpc.ops` declares the operators. One that has a kernel here is defined in a source of this folder,
behind the word `MTPC_OPERATOR`. From the schemas of these operators a build generates two files:

- `operators.h` declares every kernel.
- `operators.cpp` registers the kernels as `mtpc_cpu::NAME`, and defines the C functions by which
  tapes call them past torch's dispatcher (`shims.h`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtpc.errors import BackendError
from mtpc.store.sources import PACKAGE

SOURCE_DIR = Path(__file__).parent
_DEFINITION = re.compile(r"^MTPC_OPERATOR\s[^;(]*?(\w+)\(", re.MULTILINE)
_DECLARED = re.compile(r"^@operator\(.*?^(?:def [^\n]*|\) ->[^\n]*):\n", re.MULTILINE | re.DOTALL)
"""The declaration of an operator, from its traits to the end of its signature."""

_TYPES = {
    "Tensor": "const Tensor&",
    "Optional[Tensor]": "const std::optional<Tensor>&",
    "List[Tensor]": "const std::vector<Tensor>&",
    "int": "int64_t",
    "float": "double",
    "bool": "bool",
    "str": "const std::string&",
}
"""How C++ names a type of a schema, as a kernel's parameter."""
_HEADER = """\
// Generated from the schemas of mtpc::*; mtpc/ops says what the operators mean.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

/// Stands before the definition of an operator's kernel.
#define MTPC_OPERATOR

namespace mtpc {{

using torch::stable::Tensor;

{declarations}

}}  // namespace mtpc
"""
_SOURCE = """\
// Generated from the schemas of mtpc::*: registers the kernels, and makes C functions of them.
#include <torch/csrc/stable/library.h>

#include "operators.h"
#include "shims.h"

STABLE_TORCH_LIBRARY(mtpc_cpu, library) {{
{definitions}
}}

STABLE_TORCH_LIBRARY_IMPL(mtpc_cpu, CPU, library) {{
{kernels}
}}

extern "C" {{

{functions}

}}  // extern "C"
"""


def generate() -> dict[str, str]:
    """The text of the generated files, by name.

    Raises:
        BackendError: a kernel's operator has no reference, or a type that C++ has no name for.
    """
    schemas = _schemas(SOURCE_DIR.glob("*.cpp"))
    header = _HEADER.format(declarations="\n".join(map(_declaration, schemas)))
    # Kernels take sizes as they are, never symbols.
    local = [str(schema).partition("::")[2].replace("SymInt", "int") for schema in schemas]
    source = _SOURCE.format(
        definitions="\n".join(f'  library.def("{each}");' for each in local),
        kernels="\n".join(
            f'  library.impl("{name}", TORCH_BOX(&mtpc::{name}));' for name in map(_name, schemas)
        ),
        functions="\n\n".join(map(_function, schemas)),
    )
    return {"operators.h": header, "operators.cpp": source}


def declarations() -> str:
    """What the generated files follow from: this module, and how operators are declared."""
    folders = (PACKAGE / "ops", PACKAGE / "backends" / "cpu" / "ops")
    paths = [Path(__file__), *(p for folder in folders for p in sorted(folder.glob("*.py")))]
    texts = [path.read_text() for path in paths]
    return texts[0] + "".join(found for text in texts[1:] for found in _DECLARED.findall(text))


def _schemas(sources: Iterable[Path]) -> list[Any]:
    """The schemas of the operators that are defined in some sources, by name."""
    names = sorted(name for path in sources for name in _DEFINITION.findall(path.read_text()))
    # Not above: a start that finds its kernels needs no operator.
    import mtpc.backends.cpu.ops  # noqa: F401  (declares those of the backend)
    from mtpc.ops import references

    known = references()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BackendError(f"kernels without a reference: {', '.join(unknown)}")
    return [known[name]._schema for name in names]


def _name(schema: Any) -> str:
    return str(schema.name).partition("::")[2]


def _type(argument: Any) -> str:
    kind = str(argument.type)
    if kind not in _TYPES:
        raise BackendError(f"{argument.name} is {kind}; kernels take {', '.join(_TYPES)}")
    return _TYPES[kind]


def _declaration(schema: Any) -> str:
    parameters = ", ".join(f"{_type(a)} {a.name}" for a in schema.arguments)
    tensors = ["Tensor"] * len(schema.returns)
    result = f"std::tuple<{', '.join(tensors)}>" if len(tensors) > 1 else "".join(tensors) or "void"
    return f"{result} {_name(schema)}({parameters});"


def _function(schema: Any) -> str:
    name = _name(schema)
    return (
        f"AOTI_TORCH_EXPORT mtpc::BoundKernel mtpc_bind_{name}(\n"
        "    const mtpc::Argument* arguments) {\n"
        f"  return mtpc::bind<&mtpc::{name}>(arguments);\n"
        "}"
    )
