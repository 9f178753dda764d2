"""How commands speak: stages on a terminal and elsewhere, `--quiet`, and `--json`."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.places import ROOT
from helpers.word_model import SMALL_MODEL
from safetensors.torch import load_file, save_file

from mtpc.cli.main import main

pytestmark = pytest.mark.usefixtures("shared_cache")

SMALL = [*SMALL_MODEL, "--spec-tokens", "2", "--dtype", "float32"]
CACHED = SMALL[2:]
"""On the backend of users, whose steps the commands of this file share."""
PROMPTS = ["-p", "w5 w6 w7", "--ids", "8 9", "-n", "6", "--ignore-eos"]
Captured = pytest.CaptureFixture[str]


def result(capsys: Captured, command: list[str], code: int = 0) -> Any:
    """The one object that a command prints with `--json`."""
    assert main(command) == code
    return json.loads(capsys.readouterr().out)


def test_run_as_json(word_model: Path, capsys: Captured) -> None:
    """The same texts and ids as for people, and numbers in place of a table."""
    command = ["run", str(word_model), *CACHED, *PROMPTS]
    assert main(command) == 0
    for_people = capsys.readouterr().out
    found = result(capsys, [*command, "--json"])
    text, ids = re.search(r"\[1\] .*\n(.*)\n\n\[2\] .*\n(.*)\n", for_people).groups()
    assert [row["prompt"] for row in found["results"]] == ["w5 w6 w7", [8, 9]]
    assert [row["text"] for row in found["results"]] == [text, None]
    assert found["results"][1]["ids"] == [int(each) for each in ids.split()]
    assert [len(row["ids"]) for row in found["results"]] == [6, 6]
    assert [row["finish_reason"] for row in found["results"]] == ["length", "length"]
    stats = found["stats"]
    assert (stats["new_tokens"], stats["decode_tokens"]) == (12, 10)
    assert len(stats["acceptance_by_position"]) == 2
    assert stats["fallbacks"] == {}
    assert set(stats["replays"]) == {"prefill[R=2,Q=32,K=2]", "decode[R=2,Q=3,K=2]"}


def test_run_quietly(word_model: Path, capsys: Captured) -> None:
    command = ["run", str(word_model), *CACHED, *PROMPTS]
    found = result(capsys, [*command, "--json"])["results"]
    assert main([*command, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [found[0]["text"], " ".join(map(str, found[1]["ids"]))]
    assert err == ""


@pytest.mark.slow
def test_bench_and_eval_as_json(word_model: Path, capsys: Captured, tmp_path: Path) -> None:
    """Rows of numbers; `--out` of eval writes the same object."""
    short = [*SMALL_MODEL, "--dtype", "float32", "-n", "4", "--spec-tokens", "0,2"]
    command = ["bench", str(word_model), *short, "--repeats", "1", "-p", "w5 w6", "--json", "-q"]
    found = result(capsys, command)
    assert [row["spec_tokens"] for row in found["rows"]] == [0, 2]
    assert [row["acceptance_rate"] is None for row in found["rows"]] == [True, False]
    assert all(row["ms_per_step"] > 0 and row["same_text"] for row in found["rows"])
    assert not found["synthetic"]

    (tmp_path / "task.jsonl").write_text('{"prompt": "w3 w4", "answer": "w0"}\n')
    task = ["--task", str(tmp_path / "task.jsonl"), "--out", str(tmp_path / "out.json")]
    command = ["eval", str(word_model), *short, *task, "--no-transformers", "--json"]
    found = result(capsys, command)
    assert [row["spec_tokens"] for row in found["rows"]] == [0, 2]
    assert json.loads((tmp_path / "out.json").read_text()) == found


def test_faults_as_json(word_model: Path, capsys: Captured, tmp_path: Path) -> None:
    """`check` says the same of tensors that are wrong, and ends with the same code."""
    directory = Path(shutil.copytree(word_model, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    own = {name for name in tensors if ".mtp_layers." in name}
    zero = {name: tensors[name] * (name not in own) for name in tensors}
    save_file(zero, directory / "model.safetensors", metadata={"format": "pt"})
    found = result(capsys, ["check", str(directory), *SMALL[:4], "--json", "--quiet"], 1)
    assert [fault["kind"] for fault in found["faults"]] == ["all zero"]
    assert found["faults"][0]["remedy"]
    assert (found["wirings"], found["better"]) == ([], None)


def test_a_drafter_says_what_it_is(word_model: Path, capsys: Captured, tmp_path: Path) -> None:
    """`check` and `inspect` show what copies read and keep; no wiring is measured."""
    small = [*SMALL[:4], "--spec-tokens", "1", "--draft", "copy"]
    command = ["check", str(word_model), *small, "--ids", "3 4 5", "-n", "6"]
    found = result(capsys, [*command, "--json", "--quiet"], 0)
    assert found["drafter"]["reads"] == "the request's own text"
    assert [row["wiring"] for row in found["wirings"]] == [""]
    assert main(["inspect", str(word_model), *small, "--after", "fuse-draft-chain"]) == 0
    assert "the tokens of the text" in capsys.readouterr().out
    (tmp_path / "vocab.txt").write_text("3\n4\n5\n")
    chosen = ["--draft-vocab", str(tmp_path / "vocab.txt"), "--after", "fuse-draft-chain"]
    assert main(["inspect", str(word_model), *SMALL[:4], "--spec-tokens", "1", *chosen]) == 0
    assert "3 tokens of the vocabulary" in capsys.readouterr().out


@pytest.mark.slow
def test_check_as_json(word_model: Path, capsys: Captured) -> None:
    """The exit code is that of the same command without it."""
    command = ["check", str(word_model), *SMALL[:4], "--ids", "3 4 5", "-n", "6", "--floor", "0"]
    code = main(command)
    capsys.readouterr()
    found = result(capsys, [*command, "--json", "--quiet"], code)
    assert found["faults"] == []
    assert (found["better"] is not None) == bool(code)
    assert found["wirings"][0]["wiring"] == ""
    assert all(row["same_text"] for row in found["wirings"])
    found = result(capsys, [*command, "--json", "--floor", "1.1"], 1)
    assert [fault["kind"] for fault in found["faults"]] == ["other base"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "/nonexistent", "--json"], 2),
        (["run", "--json", "--max-len", "-1"], 2),
        (["run", "--json", "--quiet", "--ids", "3", "--spec-tokens", "-1"], 2),
        (["bench", "--json", "--spec-tokens", ""], 2),
        (["eval", "--json", "--task", "/nonexistent.jsonl"], 2),
        (["build", "--json", "--backend", "eager"], 2),
        (["check", "--json", "--spec-tokens", "0"], 2),
    ],
)
def test_an_error_is_a_line_on_stderr(words: list[str], code: int, capsys: Captured) -> None:
    """Under `--json`, too: nothing on stdout, and the code of the same command without it."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(re.findall(r"^error: ", err, re.M)) == 1
    assert main([word for word in words if word != "--json"]) == code


def test_options_that_are_none(capsys: Captured) -> None:
    for words in (["run", "--json", "x", "y"], ["serve", "--json"], ["run", "--jsn"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert capsys.readouterr().out == ""


RUN = "import sys; from mtpc.cli.main import main; sys.exit(main(sys.argv[1:]))"


def test_what_others_print_is_not_in_the_json(
    word_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A library that prints while a command works goes to stderr."""

    def loud(directory: Path, prompts: Any) -> None:
        print("a library says hello")

    monkeypatch.setattr("mtpc.cli.run.check_tokenizer", loud)
    command = ["run", str(word_model), *CACHED, *PROMPTS, "--json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "hello" in err
    assert len(json.loads(out)["results"]) == 2


def test_stages_on_a_terminal(word_model: Path) -> None:
    """A real one: stderr is a pseudo-terminal, and stdout a pipe that holds JSON alone."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, "run", str(word_model), *SMALL, *PROMPTS, "--json", "-v"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    pipes = {"stdout": subprocess.PIPE, "stderr": theirs, "cwd": ROOT, "env": environment}
    with subprocess.Popen(command, **pipes) as process:
        os.close(theirs)
        shown = _all_of(ours)
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert len(json.loads(out)["results"]) == 2
    assert "\x1b[" in shown, "a live line"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"\d\.\d s  2/2 lower decode\[R=2,Q=3,K=2\]", plain)
    assert "done in " in plain


def _all_of(terminal: int) -> str:
    """What was written to a pseudo-terminal until its other end was closed."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux's way to say that nobody writes any more.
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()
