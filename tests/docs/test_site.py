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
    home = (site / "index.html").read_text()
    assert "One Multi-Token-Prediction iteration, one graph" in home
    assert "<title>Overview - mtpc</title>" in home


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed


def test_code_is_not_clipped(site: Path) -> None:
    """Its lines wrap, by a style that every page loads."""
    assert "white-space: pre-wrap" in (site / "site.css").read_text()
    for page in site.glob("*/index.html"):
        assert "site.css" in page.read_text(), page


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_table_cells_are_short(page: Path) -> None:
    """At most 300 characters: what needs more is a paragraph or a list."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > 300] == []


def test_gpus_are_not_said_to_be_untried() -> None:
    """The cuda backend has run on an H100: the example names the page that says what has run."""
    example = (ROOT / "examples" / "gpu_decode.py").read_text()
    assert "never run" not in example
    assert "docs/gpu.md" in example


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
    """Every cell, in order, with steps of one request; what it says of itself is so."""
    cells = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            source = "".join(cell["source"])
            assert source.count("max_len=128)") == source.count("mtpc.compile(")
            exec(source.replace("max_len=128)", "max_len=128, batch_buckets=(1,))"), names)
    out = capsys.readouterr().out
    assert "tokens per step" in out
    assert "max_len is 128" in out
    assert names["done"].finish_reason == "length"
