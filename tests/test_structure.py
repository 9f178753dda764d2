"""The architecture, held by a test: direction of imports, sizes, and what must stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.places import ROOT

PACKAGE = ROOT / "mtpc"
ORDER = (
    ("errors",),
    ("config", "sampling_params"),
    ("weights",),
    ("layout",),
    ("store",),
    ("ops",),
    ("step",),
    ("capture.graph", "capture.effects", "capture.inline"),
    ("capture.trace", "capture.split", "passes", "models"),
    ("backends",),
    ("program",),
    ("engine",),
    ("api",),
    ("host",),
    ("integrations",),
    ("server",),
    ("cli", "__main__"),
)
"""Left never imports right; the docs' table (docs/design.md) in code."""
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def rank(name: str) -> int:
    for index, group in enumerate(ORDER):
        if any(name == item or name.startswith(item + ".") for item in group):
            return index
    raise AssertionError(f"mtpc.{name} has no place in the table of imports")


def imports(path: Path) -> set[str]:
    """mtpc modules that a file imports at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mtpc."):
            names.add((node.module or "").removeprefix("mtpc."))
        elif isinstance(node, ast.ImportFrom) and node.module == "mtpc":
            names |= {alias.name for alias in node.names if (PACKAGE / alias.name).exists()}
    return names


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_left_never_imports_right(path: Path) -> None:
    name = module_name(path)
    if name in ("", "capture"):
        return
    for imported in imports(path):
        if imported in ("", "capture", "__version__"):
            continue
        assert rank(imported) <= rank(name), f"mtpc.{name} imports mtpc.{imported}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes(path: Path) -> None:
    """Files of about 400 lines; no utils; the environment is read in config.py only."""
    source = path.read_text()
    assert len(source.splitlines()) <= 480
    assert path.stem not in ("utils", "helpers", "common", "misc")
    if path.name != "config.py":
        assert "os.environ" not in source
        assert "getenv" not in source


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_short(path: Path) -> None:
    """Bodies of at most 45 lines, docstrings not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        length = (node.end_lineno or 0) - first.lineno + 1
        assert length <= 45, f"{path.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_silent_excepts(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in (
                "Exception",
                "BaseException",
            )
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            # An error may also be handed on as a value, to whom it concerns.
            kept = any(isinstance(n, ast.Name) and n.id == node.name for n in ast.walk(node))
            assert not broad or raises or kept, f"{path.name}:{node.lineno} swallows every error"


def test_passes_name_no_model_and_no_backend() -> None:
    for path in (PACKAGE / "passes").glob("*.py"):
        names = imports(path)
        assert not {n for n in names if n.startswith(("models", "backends"))}, path.name


def test_a_pass_is_named_once() -> None:
    """In its class: backends take the name from there, commands ask for passes by policy."""
    from mtpc.passes import pass_names

    found = Counter(
        node.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in pass_names()
    )
    assert found == Counter(pass_names())


def test_backends_choose_passes_that_leave_it_to_them() -> None:
    """A pass of the policy `backend` is some backend's, and no backend names another."""
    from mtpc.backends.cpu import CpuBackend
    from mtpc.backends.cuda import CudaBackend
    from mtpc.passes import pass_names

    chosen = {*CpuBackend.enables, *CudaBackend.enables}
    assert chosen == {*pass_names("backend")}


def test_import_is_light() -> None:
    """`import mtpc` must not import torch."""
    code = "import sys, mtpc; assert 'torch' not in sys.modules; print(mtpc.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_family_is_in_the_tables() -> None:
    """Of README.md, and of docs/models.md with every architecture that it serves."""
    from mtpc.models import FAMILIES

    pages = [(PACKAGE.parent / page).read_text() for page in ("README.md", "docs/models.md")]
    for family in FAMILIES:
        rows = [re.search(rf"^\| \[?{family.name}\b.*$", page, re.MULTILINE) for page in pages]
        (brief, full) = (row.group() if row else "" for row in rows)
        assert f"`{family.architectures[0]}`" in brief, family.name
        assert [name for name in family.architectures if f"`{name}`" not in full] == []
