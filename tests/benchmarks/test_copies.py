"""The benchmark of copies: what llama.cpp says, what a table counts, what a run goes on behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import copies, plot
from benchmarks.copies import FREE, LLAMA, MTPC, batches, gain, prompts, repeated, table
from benchmarks.harness.bench import Run, new_record
from benchmarks.harness.tables import Row
from benchmarks.peers.llama_decoder import Counts, LlamaError, read_counts

LOG = """
0.52.019 I encoded   46 tokens in    0.164 seconds, speed:  280.488 t/s
0.52.020 I decoded  202 tokens in    4.208 seconds, speed:   48.004 t/s
0.52.021 I n_draft   = 16
0.52.022 I n_predict = 202
0.52.023 I n_drafted = 240
0.52.024 I n_accept  = 131
0.52.025 I accept    = 54.583%
"""
"""As llama-speculative-simple of llama.cpp 0.5.0 has them in its source."""


def test_what_llama_cpp_says() -> None:
    assert read_counts(b"ab", LOG) == Counts(202, 71, 4.208, [97, 98])
    with pytest.raises(LlamaError, match="does not say how long it decoded:\nno model"):
        read_counts(b"", "no model")


def test_kinds_take_turns() -> None:
    """Alone, or some of each at once."""
    assert [kind for kind, *_ in prompts(2)] == ["edits", "prose", "edits", "prose"]
    assert [kind for kind, *_ in batches(prompts(2), 1)] == ["edits", "prose", "edits", "prose"]
    ((kind, names, wordings),) = batches(prompts(2), 4)
    assert (kind, len(names.split("+")), len(wordings)) == ("mixed", 4, 4)


def sample(name: str, engine: str, setting: str, steps: int, *seconds: float) -> Row:
    draft = "none" if setting == "0" else "copy"
    case = dict(text="edits", prompt=name, engine=engine, weights="bfloat16", draft=draft)
    counts = dict(tokens=100, steps=steps, seconds=[*seconds], answer=[1])
    return {**case, "setting": setting, **counts}


def test_gains_are_over_the_same_engine() -> None:
    rows = [
        *(sample(name, MTPC, "0", 100, 4.0) for name in "ab"),
        *(sample("a", MTPC, "7", 50, 2.0), sample("b", MTPC, "7", 25, 1.0)),
        *(sample("a", LLAMA, "0", 100, 3.0), sample("a", LLAMA, "own", 50, 1.5)),
    ]
    found = {tuple(cells[1:5]): cells[5:] for cells in table({"rows": rows}).cells}
    own = found[MTPC, "bfloat16", "copy", "7"]
    assert own == ["2.67", "66.7", "2.83x", "2.00x", "2 of 2", "2"]
    assert found[LLAMA, "bfloat16", "copy", "own"][2:4] == ["2.00x", "2.00x"]


def test_repeats_are_compared_in_their_turn() -> None:
    """A disturbed repeat changes nothing, nor a slow turn; another text is an error."""
    once = [{**sample("a", MTPC, "0", 100), "seconds": seconds} for seconds in (2.0, 1.0, 1.0)]
    plain = repeated(once)
    assert plain["seconds"] == [2.0, 1.0, 1.0]
    assert gain(sample("a", MTPC, "7", 50, 1.0, 0.5, 9.0), plain) == 2.0
    with pytest.raises(AssertionError, match="another text"):
        repeated([plain, {**plain, "answer": [2]}])


def test_a_run_goes_on_behind_its_results(tmp_path: Path) -> None:
    """With the same arguments, but for the cap on time and the number of prompts."""
    out = tmp_path / "results.json"
    given = ["model", "--out", str(out), "--settings", "0", "3"]

    def earlier(*more: str) -> list[dict[str, Any]]:
        args = copies.BENCHMARK.parse([*given, *more])
        return Run(copies.BENCHMARK, args, print, tmp_path).earlier_rows(FREE)

    assert earlier() == []
    rows = [sample("a", MTPC, "0", 1, 1.0)]
    out.write_text(json.dumps(new_record("copies", copies.BENCHMARK.parse(given), {"rows": rows})))
    assert earlier("--minutes", "3", "--prompts", "9") == rows
    with pytest.raises(SystemExit, match="results of other arguments"):
        earlier("--new-tokens", "9")


def test_a_drafter_has_no_path_in_a_record() -> None:
    names = ["copy", "copy+own", "/somewhere/drafts", "copy+/somewhere/drafts"]
    assert [*map(copies.name_of, names)] == ["copy", "copy+own", "drafts", "copy+drafts"]


def test_a_picture_of_what_drafts_gain(tmp_path: Path) -> None:
    """Speeds are of all tokens of a setting; a training's record adds its curve."""
    rows = [sample("a", MTPC, "0", 100, 4.0), sample("b", MTPC, "0", 100, 1.0)]
    record = {"rows": [*rows, sample("a", LLAMA, "own", 50, 1.0)]}
    assert plot.speeds(record) == {
        "mtpc plain": {"edits": 40.0},
        "llama.cpp copy": {"edits": 100.0},
    }
    says: dict[str, Any] = {"machine": {"cpu": "a", "threads": 2}, "benchmark": "copies"}
    says["versions"] = {"commit": "c", "torch": "2"}
    point = {"step": 1, "seconds": 60, "right": [0.5, 0.2]}
    for name, more in (("copies", record), ("tune", {"progress": {"held_out": [point]}})):
        (tmp_path / name).write_text(json.dumps({**says, **more}))
    picture = tmp_path / "picture.png"
    given = [str(tmp_path / "copies"), str(picture), "--training", str(tmp_path / "tune")]
    assert plot.main(given) == 0
    assert picture.stat().st_size > 5000
