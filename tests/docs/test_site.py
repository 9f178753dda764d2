"""The documentation as a site, and the tutorial: built without a warning, run without an error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.places import ROOT

import mtpc


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("mkdocs is not installed")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"tutorial", "changelog"}
    assert pages <= {path.name for path in site.iterdir()}
    assert "One Multi-Token-Prediction iteration, one graph" in (site / "index.html").read_text()


def test_reading_needs_no_network(site: Path) -> None:
    """No script, style, font or picture comes from elsewhere."""
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//"""
        r"""|<link[^>]+rel=["']?(?:stylesheet|preload|icon)[^>]+href=["']?(?:https?:)?//"""
    )
    for page in site.rglob("*.html"):
        assert loads.search(page.read_text()) is None, page
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style


def test_links_lead_to_files(site: Path) -> None:
    """Also those to files that are not pages."""
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#:?]+)[#"?]', page.read_text()):
            if page.name != "404.html":  # Its links begin at the root of the site.
                assert (page.parent / target).exists(), (page, target)


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference" / "index.html").read_text()
    names = set(mtpc.__all__) - {"__version__", "transformers"}
    assert [name for name in sorted(names) if f".{name}" not in text] == []


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell, in order; what it says of itself is so."""
    cells = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert "tokens per step" in out
    assert "max_len is 128" in out
    assert names["done"].finish_reason == "length"
