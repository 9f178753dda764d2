"""docs/tour.md names files and functions that exist, in the order in which a run passes them."""

from __future__ import annotations

import ast
import re

from helpers.places import ROOT

TOUR = (ROOT / "docs" / "tour.md").read_text()
NAMED = re.findall(r"\]\(\.\./(mtpc/[\w/]+\.py)\)\s+`(\w+)`(?:\.(\w+))?", TOUR)


def test_what_the_tour_names_exists() -> None:
    assert len(NAMED) > 20
    for path, name, method in NAMED:
        defined = {
            node.name: node
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        assert name in defined, f"{path} has no {name}"
        if method:
            found = {n.name for n in ast.walk(defined[name]) if isinstance(n, ast.FunctionDef)}
            assert method in found, f"{path}: {name} has no {method}"
