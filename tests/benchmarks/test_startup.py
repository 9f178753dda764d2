"""The startup benchmark at a tiny size: its rows, its tokens, its arithmetic. Never a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.compiled import give_kernels

from benchmarks import startup
from benchmarks.harness import startup_child
from benchmarks.harness.rounds import Case
from benchmarks.harness.tables import Row

NEW_TOKENS = 5
SMALL = (
    *("--shape", "tiny", "--workloads", "random", "--batch-buckets", "1", "--spec-tokens", "1"),
    *("--max-len", "64", "--prompt-tokens", "8", "--new-tokens", str(NEW_TOKENS)),
    *("--repeats", "1", "--max-foreign", "1"),
)
"""One bucket, and no sample counts as disturbed: two steps to compile."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one tiny run writes; its empty caches are given the C++ kernels, which take longest."""
    out = tmp_path_factory.mktemp("startup")
    files = ("--out", str(out / "results.json"))
    make_empty = startup_child.make_empty

    def make_nearly_empty(directory: Path) -> None:
        make_empty(directory)
        if directory.name == "mtpc":
            give_kernels(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_child, "make_empty", make_nearly_empty)
        assert startup.main([*SMALL, "--engines", "floor", "mtpc", *files]) == 0
    record: dict[str, Any] = json.loads((out / "results.json").read_text())
    return record


@pytest.mark.slow
def test_every_start_has_its_row(results: dict[str, Any]) -> None:
    rows = {row["engine"]: row for row in results["rows"]}
    assert list(rows) == ["floor", "mtpc cold", "mtpc warm"]
    for row in rows.values():
        assert "not_run" not in row
        assert set(row["stages"]) == set(startup_child.STAGES)
        assert sum(row["stages"].values()) == pytest.approx(row["median_s"])
    assert len(startup.table(results).cells) == len(rows)
    assert rows["floor"]["cache_bytes"] == 0
    assert rows["mtpc warm"]["cache_bytes"] == rows["mtpc cold"]["cache_bytes"] > 0


@pytest.mark.slow
def test_a_warm_start_says_what_a_cold_one_said(results: dict[str, Any]) -> None:
    cold, warm = (_report(results, name)["continuation"] for name in ("mtpc cold", "mtpc warm"))
    assert len(cold) == NEW_TOKENS
    assert warm == cold
    assert results["same_tokens"] == {"mimo-tiny, mtpc": True}


@pytest.mark.slow
def test_a_warm_start_compiles_nothing(results: dict[str, Any]) -> None:
    (sample,) = _row(results, "mtpc warm")["taken"]
    assert sample["scratch_bytes"] == 0
    assert sample["report"]["imported"] == []
    assert sample["report"]["fallbacks"] == {}
    assert "transformers" in _report(results, "mtpc cold")["imported"]


def _row(results: dict[str, Any], engine: str) -> dict[str, Any]:
    return next(row for row in results["rows"] if row["engine"] == engine)


def _report(results: dict[str, Any], engine: str) -> dict[str, Any]:
    return _row(results, engine)["taken"][0]["report"]


def test_what_cannot_run_is_a_row_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    python = ("--vllm-python", str(tmp_path / "no-python"))
    assert startup.main([*SMALL, "--engines", "vllm", *python, "--out", str(out)]) == 0
    rows = {row["engine"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(row["median_s"] is None for row in rows.values())
    assert "no-python" in rows["vLLM cold"]["not_run"]
    assert "no cold start" in rows["vLLM warm"]["not_run"]
    assert capsys.readouterr().out.count("not run: ") == len(rows) == 3


def _sample(load_s: float, foreign_share: float = 0.0, tokens: tuple[int, ...] = (1, 2)) -> Row:
    """A start that takes a second, and `load_s` to load."""
    stages = {"python": 0.25, "import": 0.5, "load": load_s, "token": 0.25}
    report = {"continuation": list(tokens), "compiled_again": False}
    figures = dict(seconds=sum(stages.values()), stages=stages, cache_bytes=2_000_000)
    return dict(**figures, foreign_share=foreign_share, scratch_bytes=0, report=report)


def _summary(name: str, *samples: Row) -> Row:
    case = Case(dict(workload="made up", engine=name), dict, summary=startup.summary)
    case.samples = list(samples)
    return case.result(max_foreign=0.1)


def _cells(rows: list[Row]) -> Any:
    return startup.table({"rows": rows, "ratios": (), "same_tokens": {}}).cells


def test_disturbed_samples_are_dropped() -> None:
    row = _summary("mtpc warm", _sample(1.0), _sample(9.0, 0.5), _sample(3.0, 0.1))
    assert (row["samples"], row["discarded"], row["disturbed"]) == (2, 1, False)
    assert (row["best_s"], row["median_s"], row["stages"]["load"]) == (2.0, 3.0, 2.0)


def test_a_row_says_when_all_was_disturbed() -> None:
    row = _summary("mtpc cold", _sample(1.0, 0.5))
    assert (row["samples"], row["discarded"], row["disturbed"]) == (1, 0, True)
    assert _cells([row])[0][-1] == "1+0*"


def test_ratios_are_of_medians_and_of_best() -> None:
    rows = [
        _summary("floor", _sample(0.0), _sample(1.0), _sample(1.0)),
        _summary("mtpc warm", _sample(1.0), _sample(2.0), _sample(2.0)),
        _summary("mtpc cold", _sample(29.0)),
        _summary("vLLM warm"),
    ]
    assert startup.ratios(rows) == [
        "made up: mtpc warm / floor: 1.50 (best: 2.00)",
        "made up: mtpc cold / mtpc warm: 10.00 (best: 15.00)",
        "made up: vLLM warm / mtpc warm: not measured",
    ]
    assert [line[4] for line in _cells(rows)] == ["1.00x", "1.50x", "15.00x", "-"]


def test_different_tokens_are_noticed() -> None:
    cold, warm = (_summary(name, _sample(1.0)) for name in ("mtpc cold", "mtpc warm"))
    assert startup.same_tokens([cold, warm]) == {"made up, mtpc": True}
    warm["taken"].append(_sample(1.0, tokens=(1, 3)))
    assert startup.same_tokens([cold, warm]) == {"made up, mtpc": False}
