"""What holds of mtpc's SGLang package where SGLang is not installed; the rest is in tests/peers."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from helpers.places import ROOT, TESTS


def assigned(path: Path, name: str) -> Any:
    """What a module assigns to a name."""
    (found,) = (
        node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return found


def test_sglang_is_imported_by_its_own_package_only() -> None:
    importers = set()
    for path in (ROOT / "mtpc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if any(name.split(".")[0] == "sglang" for name in names):
                importers.add(path.relative_to(ROOT).parts[:3])
    assert importers == {("mtpc", "integrations", "sglang")}


def test_the_entry_point_is_there_and_light() -> None:
    """The host loads it in every process; nothing of the host is imported before it is called."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["mtpc"].partition(":")
    code = (
        f"import sys, {module} as m; assert callable(m.{name}); "
        "assert not {'sglang', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)


def test_the_contract_with_the_host_knows_each_class() -> None:
    """The script needs the host, and runs seldom: a class that it lacks would go unnoticed."""
    package = ROOT / "mtpc/integrations/sglang/models/drafts.py"
    known = ast.literal_eval(assigned(TESTS / "peers/sglang_contract.py", "HOSTS_OWN"))
    body = ast.parse(package.read_text()).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    assert {name for _, name in known.values()} == classes
