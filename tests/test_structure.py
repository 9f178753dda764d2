"""The architecture, held by a test: direction of imports, sizes, and what must stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.places import ROOT, TESTS

PACKAGE = ROOT / "mtpc"
ORDER = (
    ("errors", "certificate"),
    ("option_checks", "declaration", "environment"),
    ("config", "sampling_params", "arguments", "wiring", "acceptance"),
    ("plan",),
    ("weights",),
    ("layout",),
    ("store",),
    ("ops",),
    ("step",),
    ("models",),
    ("capture",),
    ("passes",),
    ("backends",),
    ("ranks",),
    ("program",),
    ("scale",),
    ("engine",),
    ("api",),
    ("host",),
    ("integrations",),
    ("server",),
    ("evaluation", "tuning"),
    ("cli", "__main__"),
)
"""One rank a room. A room imports rooms above it, never below: the table of docs/design.md."""
KNOWN_BACKWARD: dict[str, list[str]] = {}
"""Imports in functions, or for types alone, that go backward; a comment gives each its reason."""
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def rank(name: str) -> int:
    for index, group in enumerate(ORDER):
        if any(name == item or name.startswith(item + ".") for item in group):
            return index
    raise AssertionError(f"mtpc.{name} has no place in the table of imports")


@dataclass(frozen=True)
class Imports:
    """mtpc modules that a file imports: when it is loaded, and later or for types alone."""

    at_top: set[str]
    inside: set[str]


def imports(path: Path) -> Imports:
    """`import mtpc.x`, `from mtpc.x import y` and `from mtpc import x`, wherever they stand.

    What stands in a function or below `if TYPE_CHECKING` is `inside`.
    """
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in ast.walk(tree)} - {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_for_types(block)
        for node in ast.walk(block)
    }
    found = Imports(set(), set())
    for node in ast.walk(tree):
        (found.at_top if id(node) in at_top else found.inside).update(_imported(node))
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imported(node: ast.AST) -> set[str]:
    """Names of mtpc's modules below mtpc that one statement imports."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = {node.module}
        for alias in node.names:
            place = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
            if node.module.startswith("mtpc") and (
                place.is_dir() or place.with_suffix(".py").exists()
            ):
                names.add(f"{node.module}.{alias.name}")
    else:
        return set()
    return {name.removeprefix("mtpc.") for name in names if name.startswith("mtpc.")}


PACKAGES = ("",)
"""The package itself names the public modules of every rank."""


def backward(name: str, imported: set[str]) -> list[str]:
    """What a module imports of later ranks."""
    return sorted(other for other in imported if other not in PACKAGES and rank(other) > rank(name))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_left_never_imports_right(path: Path) -> None:
    name = module_name(path)
    if name in PACKAGES:
        return
    found = imports(path)
    assert backward(name, found.at_top) == [], f"mtpc.{name} imports backward at its top"
    assert backward(name, found.inside) == KNOWN_BACKWARD.get(name, []), name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes(path: Path) -> None:
    """Files of about 400 lines; no utils; the environment is read in environment.py only."""
    source = path.read_text()
    assert len(source.splitlines()) <= 480
    assert path.stem not in ("utils", "helpers", "common", "misc")
    if path.name != "environment.py":
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
        found = imports(path)
        names = found.at_top | found.inside
        assert not {n for n in names if n.startswith(("models", "backends"))}, path.name


@pytest.mark.parametrize(("backend", "other"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_operators_of_a_backend_are_its_own(backend: str, other: str) -> None:
    """Neither the core nor another backend calls them."""
    from importlib import import_module

    from torch.library import CustomOpDef

    from mtpc import ops

    dialect = import_module(f"mtpc.backends.{backend}.ops")
    own = set(ops.members(dialect, CustomOpDef)) - set(ops.members(ops, CustomOpDef))
    assert len(own) > 9
    for room in ("ops", "step", "models", "passes", f"backends/{other}"):
        for path in (PACKAGE / room).rglob("*.py"):
            called = set(re.findall(r"(?:mtpc|ours|ops)\.(\w+)", path.read_text()))
            assert called.isdisjoint(own), path


def test_a_pass_is_named_once() -> None:
    """By its class: backends take the name from there, commands ask for passes by policy.

    Two have other names than their classes, of which the plan reads one. Two are named for
    backends that do not open them.
    """
    from mtpc.backends.pipeline import pass_names

    names = pass_names()
    found = Counter(
        node.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    )
    apart, unopened = {"shard": 1, "skip-idle-rows": 1}, ("batch-invariant", "fuse-skinny-linears")
    assert found == apart | dict.fromkeys(unopened, 1)


def test_backends_choose_passes_that_leave_it_to_them() -> None:
    """A pass of the policy `backend` is some backend's, and no backend names another."""
    from mtpc.backends.cpu.backend import CpuBackend
    from mtpc.backends.cuda import CudaBackend
    from mtpc.backends.pipeline import pass_names

    chosen = {*CpuBackend.enables, *CudaBackend.enables}
    assert chosen == {*pass_names("backend")}


def test_the_engine_has_few_methods() -> None:
    """Properties count; what a step does is in `StepRunner`."""
    from mtpc.engine.engine import Engine

    assert (
        len(
            [
                name
                for name, value in vars(Engine).items()
                if callable(value) or isinstance(value, property)
            ]
        )
        <= 20
    )


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


LINES = {
    ".": 2530,
    "backends": 14760,
    "capture": 1240,
    "certificate": 1510,
    "cli": 4360,
    "engine": 5690,
    "evaluation": 560,
    "host": 540,
    "integrations": 6160,
    "layout": 1170,
    "models": 9010,
    "ops": 2540,
    "passes": 2420,
    "program": 4290,
    "ranks": 870,
    "server": 4070,
    "step": 2010,
    "store": 1160,
    "tuning": 1660,
    "weights": 8850,
}
"""Most lines of Python in each room. Lower a number when a room shrinks."""


def test_folders_do_not_grow() -> None:
    """Every file counts for its folder of mtpc; prints the table to paste where one is over."""
    found = Counter[str]()
    for path in FILES:
        folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."
        found[folder] += len(path.read_text().splitlines())
    over = {name: count for name, count in found.items() if count > LINES.get(name, 0)}
    table = "".join(
        f'    "{name}": {-(-count // 50) * 50},\n' for name, count in sorted(found.items())
    )
    assert not over, f"{over}\n\nLINES = {{\n{table}}}"
    assert LINES.keys() == found.keys(), f"LINES = {{\n{table}}}"


BENCHMARK_LINES = 13_150
"""Most lines of Python below benchmarks. Lower it when they shrink."""


def test_benchmarks_do_not_grow() -> None:
    files = (ROOT / "benchmarks").rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= BENCHMARK_LINES


TEST_FILES = sorted(TESTS.rglob("*.py"))
TOP = {
    "conftest.py",
    "test_no_machine_paths.py",
    "test_public_api.py",
    "test_recipes.py",
    "test_structure.py",
    "test_theorem.py",
}


def test_tests_have_rooms() -> None:
    assert {path.name for path in TESTS.glob("*.py")} == TOP


def test_nothing_imports_from_a_test_module() -> None:
    pattern = re.compile(r"^\s*(from|import) (\S*\.)?(test_\w+|conftest)\b", re.MULTILINE)
    assert [str(path) for path in TEST_FILES if pattern.search(path.read_text())] == []


def test_what_needs_triton_is_marked() -> None:
    """Where a module is skipped without Triton, tests/run_triton.sh finds it by its marker."""
    for path in TEST_FILES:
        source = path.read_text()
        for skip, marker in (("INTERPRETS", "triton"), ("COMPILES", "gpu_compile")):
            if f"if not {skip}:" in source and path != Path(__file__):
                assert f"pytestmark = pytest.mark.{marker}\n" in source, path.name


def test_lines_of_documents_wrap() -> None:
    """At 120 characters; tables, pictures and the renderer's comments do not."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 10
    long = [
        f"{page.name}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 120 and not re.search(r"^\||^!\[|<!--|-->", line)
    ]
    assert long == []
