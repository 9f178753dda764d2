"""Hooks of `mkdocs build`: pages from elsewhere in the repository, and links that leave docs/."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "tutorial.md": "examples/tutorial.ipynb",
}
"""Pages of the site that no file in docs/ holds."""
IMAGES = (".png", ".svg")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from elsewhere, and the pictures that pages show."""
    for name, source in ELSEWHERE.items():
        files.append(File.generated(config, name, content=_text(ROOT / source)))
    pages = [ROOT / source for source in ELSEWHERE.values()]
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        for _, _, target in _LINK.findall(_text(page)):
            path = _path(page, target)
            outside = path is not None and ROOT / "docs" not in path.parents
            if outside and path.suffix in IMAGES and files.get_file_from_path(_name(path)) is None:
                files.append(File.generated(config, _name(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between pages stay links. A file of the repository is named instead."""
    source = ROOT / ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda match: _rewritten(source, match), markdown)


def _rewritten(source: Path, match: re.Match[str]) -> str:
    mark, text, target = match.groups()
    path = _path(source, target)
    if path is None:
        return match[0]
    anchor = f"#{target.partition('#')[2]}" if "#" in target else ""
    for name, place in ELSEWHERE.items():
        if path == ROOT / place:
            return f"{mark}[{text}]({name}{anchor})"
    if ROOT / "docs" in path.parents:
        return f"{mark}[{text}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
    if path.suffix in IMAGES:
        return f"{mark}[{text}]({_name(path)})"
    place = path.relative_to(ROOT).as_posix()
    return f"`{place}`" if place.endswith(text.strip("`")) else f"{text} (`{place}`)"


def _path(source: Path, target: str) -> Path | None:
    """The file of the repository that a link leads to, or None."""
    name = target.partition("#")[0]
    if not name or ":" in name:
        return None
    path = Path(os.path.normpath(source.parent / name))
    return path if path.exists() and ROOT in path.parents else None


def _name(path: Path) -> str:
    """Where the site has a file that is outside of docs/."""
    return path.relative_to(ROOT).as_posix()


def _text(path: Path) -> str:
    """A page in Markdown, also of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [
        (cell["cell_type"], "".join(cell["source"]))
        for cell in json.loads(path.read_text())["cells"]
    ]
    return "\n\n".join(
        f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells
    )
