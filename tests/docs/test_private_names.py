"""Private names of other projects: each that mtpc uses has a row and a reason in docs/extending.md.

A private name may change with any release of its project, so a new one is a decision.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers.places import ROOT
from torch import Tensor, nn

ALIASES = {"dist": "torch.distributed", "aten": "torch.ops.aten", "torch": "torch"}
"""Names that mtpc's files have for torch's modules, and for its operators."""
TORCHS = {*dir(Tensor), *vars(nn.Module()), *vars(torch.ops.aten.add.Tensor)}
"""Attributes of torch's objects. mtpc's own objects may have attributes of these names, too."""
OURS = ("mtpc", "__future__", *sys.stdlib_module_names)
TREES = [ast.parse(path.read_text()) for path in sorted((ROOT / "mtpc").rglob("*.py"))]


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to something: a function, a class, a variable, an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def used(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of others in a file: of modules with the module's name, else as `_name`."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and (root := _module(node)):
            names = [root] if id(node) not in inner else []
        elif isinstance(node, ast.Attribute) and not _is_own(node.value):
            names = [node.attr] if node.attr not in own or node.attr in TORCHS else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            given = node.args[1]
            if isinstance(given, ast.Constant) and given.value not in own - TORCHS:
                names = [given.value]
        yield from (n for n in names if is_private(n) and n.split(".")[0] not in OURS)


def _module(node: ast.expr) -> str:
    """`torch.distributed.x` of `dist.x`; "" of an attribute of anything but torch's modules."""
    if isinstance(node, ast.Name):
        return ALIASES.get(node.id, "")
    base = _module(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base else ""


def _is_own(node: ast.expr) -> bool:
    """Whether an attribute is of the object itself, or of a module of Python."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", *sys.stdlib_module_names)


def rows() -> list[str]:
    """Names of the first column of the table below its heading."""
    section = (ROOT / "docs/extending.md").read_text().split("\n## Private names", 1)[1]
    firsts = re.findall(r"^\| (`.*?) \|", section.split("\n## ", 1)[0], re.MULTILINE)
    return [name for first in firsts for name in re.findall(r"`([^`]+)`", first)]


def test_each_private_name_has_a_row() -> None:
    own = {name for tree in TREES for name in defined(tree)}
    found = {name for tree in TREES for name in used(tree, own)}
    listed = rows()
    assert len(listed) == len(set(listed))
    missing, gone = sorted(found - set(listed)), sorted(set(listed) - found)
    assert not missing, f"without a row in docs/extending.md, 'Private names': {missing}"
    assert not gone, f"in docs/extending.md, and used no more: {gone}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._dynamo import source", ["torch._dynamo.source"]),
        ("import torch._inductor", ["torch._inductor"]),
        ("torch._C._autograd.f(x)", ["torch._C._autograd.f"]),
        ("dist.distributed_c10d._world", ["torch.distributed.distributed_c10d._world"]),
        ("f(x)._base, self._base, x._ours, x.base", ["_base"]),
        ("getattr(x, '_base')", ["_base"]),
        ("import mtpc._a; from os import _exit", []),
    ],
)
def test_what_is_found(source: str, names: list[str]) -> None:
    assert list(used(ast.parse(source), {"_ours"})) == names
