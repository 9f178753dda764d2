"""What stands in documents is what the records say: made by `benchmarks.render`, never typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ROOT, render

NAME = "xeon-amx/decode-0.5b"


def test_everything_rendered_is_what_the_records_say() -> None:
    assert not render.stale().keys(), "run python -m benchmarks.render"


def test_documents_have_blocks() -> None:
    made = render.rendered()
    assert {ROOT / "README.md", ROOT / "docs" / "performance.md"} <= made.keys()


def test_every_figure_has_a_record() -> None:
    """A table or picture without its record could not be made again."""
    files = [path for path in render.RESULTS.rglob("*") if path.is_file()]
    for path in files:
        assert path.parent.parent == render.RESULTS, "results are MACHINE/QUESTION.json"
        assert path.suffix in {".json", ".md", ".png"}
        assert path.with_suffix(".json").is_file(), f"{path} has no record"


def test_a_block() -> None:
    """Rows and columns by name, links from where the document is."""
    wanted = f"{NAME} where engine=mtpc, batch=1 by ms/step show K, ms/step"
    _, link, _, head, _, *rows = render.block(wanted, ROOT / "docs").splitlines()
    assert f"(../benchmarks/results/{NAME}.md)" in link
    assert head == "| K | ms/step |"
    record = json.loads((render.RESULTS / f"{NAME}.json").read_text())
    steps = {
        row["spec_tokens"]: row["ms_per_step"]
        for row in record["rows"]
        if (row["engine"], row["batch"]) == ("mtpc", 1)
    }
    expected = sorted(steps.items(), key=lambda pair: pair[1])
    assert rows == [f"| {k} | {ms:.2f} |" for k, ms in expected]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("nowhere/decode-0.5b", "name of a record"),
        (f"{NAME} show speed", "no column 'speed'"),
        (f"{NAME} where engine=none", "no row is left"),
    ],
)
def test_what_a_block_cannot_have(wanted: str, message: str) -> None:
    with pytest.raises(render.RenderError, match=message):
        render.block(wanted, ROOT)


def test_check_names_what_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With --check nothing is written; without it, the file is as it should be."""
    path = tmp_path / "README.md"
    path.write_text("old")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "rendered", lambda: {path: "new"})
    assert render.main(["--check"]) == 1
    assert path.read_text() == "old"
    assert render.main([]) == 0
    assert path.read_text() == "new"
    assert render.main(["--check"]) == 0
    assert capsys.readouterr().out.splitlines() == ["README.md differs", "README.md written"]
