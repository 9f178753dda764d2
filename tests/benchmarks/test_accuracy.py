"""Right answers side by side: the questions of the model that adds, and the record's table."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import train_addition_model as addition

from benchmarks import accuracy
from mtpc.cli.demo import demo_checkpoint


def test_questions_are_sums_that_no_step_saw() -> None:
    assert (addition.question(23, 967), addition.answer(23, 967)) == ("023+967=", "0990")
    held_out = addition.draw(200, True, random.Random(1))
    seen = addition.draw(2000, False, random.Random(2))
    assert not set(held_out) & set(seen)
    for a, b in held_out[:20]:
        assert int(addition.answer(a, b)[::-1]) == a + b


@pytest.mark.slow
def test_a_record_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the demo model, eagerly: no K changes a text, and the table has a row for each engine."""
    task, out = tmp_path / "task.jsonl", tmp_path / "out.json"
    questions = ["The with statement", "If the class defines"]
    task.write_text("".join(json.dumps({"prompt": q, "answer": "x"}) + "\n" for q in questions))
    small = ["--backends", "eager", "--schemes", "--spec-tokens", "0", "2"]
    command = [str(demo_checkpoint()), "--task", str(task), "--out", str(out), *small]
    assert accuracy.main(command) == 0
    record = json.loads(out.read_text())
    table = accuracy.table(record)
    assert [row[:2] for row in table.cells] == [
        ["transformers, eager", "-"],
        ["mtpc, eager", "0"],
        ["mtpc, eager", "2"],
    ]
    assert [row["texts_changed_from_plain"] for row in record["rows"]] == [None, 0, 0]
    assert record["rows"][2]["acceptance_by_position"][0] > 0
    assert str(tmp_path) not in out.read_text()
