"""`mtpc eval`: right answers by transformers and by mtpc; what is no task gets one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mtpc.cli.main import main
from mtpc.evaluation.compare import Outcome, compare
from mtpc.evaluation.tasks import Question, read_task

pytestmark = pytest.mark.usefixtures("shared_cache")

SMALL = ["--max-len", "64", "--dtype", "float64", "--batch-buckets", "4", "--no-sampling"]
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n"
                            for line in lines))  # fmt: skip
    return path


def test_engines_side_by_side(
    word_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' own texts are the answers of two questions in three; K changes no text."""
    prompts = ["w3 w4 w5", "w40 w41 w42", "w7"]
    out, first = tmp_path / "out.json", write(
        tmp_path / "blank.jsonl", *({"prompt": p, "answer": "w0"} for p in prompts)
    )  # fmt: skip
    common = [str(word_model), "-n", "6", *SMALL, "--out", str(out)]
    assert main(["eval", *common, "--task", str(first), "--spec-tokens", "0"]) == 0
    texts = json.loads(out.read_text())["outcomes"][0]["texts"]
    answers = [[texts[0], "w1"], texts[1], "w95 w95"]
    task = write(
        tmp_path / "task.jsonl",
        *({"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)),
    )
    assert main(["eval", *common, "--task", str(task), "--spec-tokens", "0,2"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["engine"], row["spec_tokens"]) for row in rows] == [
        ("transformers, eager", None),
        ("mtpc, auto", 0),
        ("mtpc, auto", 2),
    ]
    assert [row["score"] for row in rows] == [pytest.approx(2 / 3)] * 3
    assert [row["texts_changed"] for row in rows] == [0, 0, 0]
    assert rows[2]["texts_changed_from_plain"] == 0
    assert len(rows[2]["acceptance_by_position"]) == 2
    assert "66.7%" in capsys.readouterr().out


def test_a_stop_string_ends_every_engine_s_text(word_model: Path, tmp_path: Path) -> None:
    out, question = tmp_path / "out.json", {"prompt": "w3 w4 w5", "answer": "w0"}
    command = ["eval", str(word_model), "-n", "6", *SMALL, "--spec-tokens", "2", "--out", str(out)]
    assert main([*command, "--task", str(write(tmp_path / "a.jsonl", question))]) == 0
    whole = json.loads(out.read_text())["outcomes"][0]["texts"][0]
    stop = whole.split()[2]
    question["stop"] = [stop]
    assert main([*command, "--task", str(write(tmp_path / "b.jsonl", question))]) == 0
    found = [outcome["texts"][0] for outcome in json.loads(out.read_text())["outcomes"]]
    assert found == [whole[: whole.index(stop)]] * 2


def test_differences_are_paired() -> None:
    """Two gained and one lost of four: +0.25, with the error of the four differences."""
    plain = Outcome("a", 0, ["x", "y", "z", "u"], [0, 0, 1, 1], accepted=[], drafted=[])
    other = Outcome("a", 1, ["X", "Y", "z", "v"], [1, 1, 1, 0], accepted=[3], drafted=[4])
    row = compare([plain, other])[1]
    assert (row.gained, row.lost, row.difference) == (2, 1, 0.25)
    assert row.difference_error == pytest.approx(0.9574271 / 2)
    assert (row.texts_changed, row.texts_changed_from_plain) == (3, 3)
    assert row.acceptance_by_position == [0.75]


def test_exact_match() -> None:
    question = Question("p", ("12", "twelve"))
    assert question.is_right(" 12\n")
    assert question.is_right("twelve")
    assert not question.is_right("12.")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 has list; expected an object of prompt, messages, answer, stop, id"),
        ({"prompt": "a", "answer": "b", "stops": []}, "line 2 has prompt, answer, stops; expected"),
        ({"answer": "b"}, "line 2: expected one of prompt and messages"),
        ({"prompt": "a", "messages": [], "answer": "b"}, "expected one of prompt and messages"),
        ({"prompt": 3, "answer": "b"}, "line 2: prompt is 3; expected text"),
        ({"messages": [{"role": "user"}], "answer": "b"}, "expected objects of role and content"),
        ({"prompt": "a"}, "line 2: answer is missing; expected a text, or several"),
        ({"prompt": "a", "answer": []}, "line 2: answer is missing"),
        ({"prompt": "a", "answer": "b", "stop": [""]}, "line 2: stop is ['']; expected"),
    ],
)
def test_lines_that_are_no_questions(
    line: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write(tmp_path / "task.jsonl", {"prompt": "a", "answer": "b"}, line)
    assert main(["eval", "--task", str(task)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error:") == 1


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("nowhere.jsonl", "cannot read the task nowhere.jsonl"),
        ("empty.jsonl", "has no questions; expected one in each line"),
        pytest.param(
            "gsm8k",
            "install mtpc[eval], or give a file",
            marks=pytest.mark.skipif(HAS_HARNESS, reason="the harness is installed"),
        ),
    ],
)
def test_what_is_no_task(
    task: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty.jsonl")
    assert main(["eval", "--task", task]) == 2
    assert message in capsys.readouterr().err


def test_a_conversation_becomes_a_prompt(word_model: Path, tmp_path: Path) -> None:
    """By the checkpoint's template; without one the message says so."""
    from mtpc.errors import OptionError
    from mtpc.evaluation.tasks import encode_all
    from mtpc.server.chat import ChatTemplate
    from mtpc.weights.served_model import ServedModel

    messages = [{"role": "user", "content": "w7 w8"}]
    questions = read_task(write(tmp_path / "t.jsonl", {"messages": messages, "answer": "w1"}))
    served = ServedModel(str(word_model), 96, (1,), word_model)
    template = ChatTemplate("{{ messages[0].content }} w9", {})
    assert encode_all(questions, served, template) == [[7, 8, 9]]
    with pytest.raises(OptionError, match="has no chat template; give prompts"):
        encode_all(questions, served, None)
