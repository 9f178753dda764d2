"""Models without MTP layers, in every command: with default options, on the backend of users."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.compiled import run_on
from helpers.families import ASSISTED, DRAFTED, EVERY_FAMILY, TINY
from helpers.places import TESTS
from helpers.tiny import build_target, with_entries
from helpers.word_model import word_checkpoint
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.cli.main import main
from mtpc.cli.opening import SMALL_BYTES, set_threads
from mtpc.errors import CheckpointError
from mtpc.weights.checkpoint_files import CheckpointFiles

pytestmark = pytest.mark.usefixtures("shared_cache")

Captured = pytest.CaptureFixture[str]
NOTE = r"note: no drafts, K = 0: .*--draft DIR"
QUICK: dict[str, Any] = {**TINY, "batch_buckets": (1,)}
SLOW_RUNS = [DRAFTED[0], *(pytest.param(f, marks=pytest.mark.slow) for f in DRAFTED[1:])]
EAGER = ["--repeats", "1", "--backend", "eager", "--max-len", "64"]
GIVEN = ["run", "chat", "bench", "build", "inspect", "serve"]


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """plain(family): its random checkpoint without MTP layers, with a vocabulary of words."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            source = checkpoint(family, "plain")
            made[family] = word_checkpoint(source, tmp_path_factory.mktemp(f"plain-{family}"))
        return made[family]

    return get


def lost(directory: Path, source: Path) -> Path:
    """A copy that announces an MTP layer and has none, as transformers saves a fine-tune."""
    return with_entries(source, directory, (), num_nextn_predict_layers=1)


@pytest.mark.parametrize("family", SLOW_RUNS)
def test_run(family: str, plain: Any, capsys: Captured) -> None:
    """Plain decoding's tokens, and one line that says how to get drafts."""
    prompt = ["--ids", "3 4 5", "-n", "8", "--ignore-eos"]
    assert main(["run", str(plain(family)), *prompt, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    model = mtpc.compile(plain(family), backend="eager", spec_tokens=0, **QUICK)
    assert found["results"][0]["ids"] == model.generate([3, 4, 5], 8, ignore_eos=True)
    assert found["stats"]["acceptance_rate"] is None
    assert len(re.findall(NOTE, err)) == 1
    assert len(re.findall("note|warning|no drafts", err)) == 2, "said once"
    assert main(["run", str(plain(family)), *prompt, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("family", DRAFTED)
def test_check(family: str, plain: Any, capsys: Captured) -> None:
    """An empty prefix once took every tensor for one of an MTP layer."""
    assert main(["check", str(plain(family)), "-p", "w7"]) == 1
    said = capsys.readouterr().out
    assert "absent: config.json announces no MTP layers" in said
    assert "give a drafter's checkpoint (--draft DIR), or use --spec-tokens 0" in said
    assert "set num_nextn_predict_layers" not in said


def words(command: str, directory: Path, tmp_path: Path) -> list[str]:
    """A command's arguments."""
    (tmp_path / "task.jsonl").write_text('{"prompt": "w3 w4", "answer": "w0"}\n')
    (tmp_path / "text.txt").write_text("w3 w4 w5 w6 w7 w8 w9 w10 w11 w12")
    out, text = str(tmp_path / "out"), str(tmp_path / "text.txt")
    short = {
        "run": ["-p", "w7 w8", "-n", "4"],
        "chat": ["--max-new-tokens", "4"],
        "bench": ["-p", "w7 w8", "-n", "4", "--repeats", "1", "--json"],
        "build": ["--batch-buckets", "1"],
        "inspect": ["--svg", str(tmp_path / "step.svg")],
        "eval": ["--task", str(tmp_path / "task.jsonl"), "-n", "4", "--no-transformers", "--json"],
        "quantize": [out, "--scheme", "int8"],
        "graft": [str(directory), out],
        "tune-head": [text, "--out", out, "--steps", "1"],
        "vocab": [text, "--out", out, "--checkpoint", str(directory)],
    }
    start = {"cache": ["cache", "why", str(directory)], "vocab": ["vocab"], "doctor": ["doctor"]}
    return [*start.get(command, [command, str(directory)]), *short.get(command, [])]


@pytest.mark.parametrize(
    ("command", "code", "is_noted", "expected"),
    [
        ("chat", 0, True, r"^w\d+"),
        ("bench", 0, True, r'"spec_tokens": 0,(?!.*"spec_tokens": [1-9])'),
        ("plan", 0, True, r"(?m)^  0  +1  .* 1\.00 "),
        ("inspect", 0, True, r"decode\[R=1,Q=1,K=0\] after legalise-cpu"),
        ("build", 0, True, r"K=0: to load only these entries"),
        pytest.param(
            *("eval", 0, True, r'"spec_tokens": 0,(?!.*"spec_tokens": [1-9])'),
            marks=pytest.mark.slow,
        ),
        ("cache", None, True, r"decode\[R=8,Q=1,K=0\]"),
        ("quantize", 0, False, "weights in int8"),
        ("vocab", 0, False, "10 of 1. tokens seen|100.0% of the texts"),
        ("graft", 2, False, "error: .*absent: config.json announces no MTP layers"),
        ("tune-head", 2, False, "error: .*absent: config.json announces no MTP layers"),
        ("doctor", 0, False, "can run here"),
    ],
)
def test_every_other_command(
    command: str,
    code: int | None,
    is_noted: bool,
    expected: str,
    plain: Any,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sensible result, or one clear error; and at most one note."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\n"))
    assert main(words(command, plain("llama"), tmp_path)) in ((0, 1) if code is None else (code,))
    out, err = capsys.readouterr()
    assert re.search(expected, err if code == 2 else out)
    assert len(re.findall("note: no drafts, K = 0", err)) == is_noted
    assert len(re.findall("error:", err)) == (code == 2)
    assert "no drafts" not in err or is_noted


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        (["run", "--ids", "5 6", "-n", "4", "--json"], 0, r'"finish_reason": "length"'),
        pytest.param(
            ["bench", "--ids", "5 6", "-n", "4", *EAGER, "--json"],
            0,
            r'"spec_tokens": 0,',
            marks=pytest.mark.slow,
        ),
        (["run", "-p", "AB"], 2, "the tokenizer of .*qwen2.gguf cannot be read"),  # It has 1 merge.
        (["plan"], 0, r"weights in all +\d"),
        (["inspect"], 0, r"decode\[R=1,Q=1,K=0\] after legalise-cpu"),
        (["check", "-p", "AB"], 1, "absent: .* announces no MTP layers"),
        (["chat"], 2, "has no chat template"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_gguf_file(
    command: list[str], code: int, expected: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vocabulary and config are in the file; each line names the file, never a config.json."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("AB\n"))
    path = TESTS / "weights/gguf/qwen2.gguf"
    assert main([command[0], str(path), *command[1:]]) == code
    out, err = capsys.readouterr()
    assert re.search(expected, err if code == 2 else out)
    assert len(re.findall("error:", err)) == (code == 2)
    assert "config.json" not in out + err


@pytest.mark.parametrize(
    "files",
    [
        ["model.safetensors"],
        ["model.gguf"],
        ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    ],
    ids=lambda files: files[0],
)
@pytest.mark.parametrize("is_file", [False, True], ids=["directory", "file"])
def test_only_a_small_model_runs_on_one_thread(
    files: list[str], is_file: bool, tmp_path: Path
) -> None:
    if is_file and not files[0].endswith(".gguf"):
        pytest.skip("the path of a checkpoint is a directory or a GGUF file")
    given = tmp_path / files[0] if is_file else tmp_path
    for total, threads in ((SMALL_BYTES, 3), (SMALL_BYTES // 2, 1)):
        for name in files:
            with (tmp_path / name).open("wb") as file:
                file.truncate(total // len(files))
        with run_on(3):
            set_threads(None, given)
            assert torch.get_num_threads() == threads


def test_serve(plain: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Its own default of K is no wish of the user's, either."""
    served: list[mtpc.SpecModel] = []
    monkeypatch.setattr("mtpc.server.run.run_server", lambda model, *others: served.append(model))
    assert main(["serve", str(plain("llama")), "--port", "0", "--max-num-seqs", "1"]) == 0
    assert served[0].options.tiers == (0,)
    assert len(re.findall(NOTE, capsys.readouterr().err)) == 1


@pytest.mark.parametrize(
    ("command", "number"), [*product(GIVEN, ("3", "auto")), ("eval", "3"), ("eval", "0,3")]
)
def test_a_given_k_stays_an_error(
    command: str, number: str, plain: Any, tmp_path: Path, capsys: Captured
) -> None:
    """It comes early, and names the option as it is typed."""
    given = [*words(command, plain("llama"), tmp_path), "--spec-tokens", number]
    assert main([*given, *(["--port", "0"] if command == "serve" else [])]) == 2
    err = capsys.readouterr().err
    assert re.search(r"error: .* announces no MTP layers; .*\(--draft DIR\); or use --spec-to", err)
    assert "spec_tokens" not in err
    assert not re.search("load |compil|trace|lower", err)


def test_plan_takes_zero(plain: Any, tmp_path: Path, capsys: Captured) -> None:
    """A given K is an error, of headers and of config.json alone."""
    shutil.copy(plain("llama") / "config.json", tmp_path)
    for directory in (plain("llama"), tmp_path):
        assert main(["plan", str(directory), "--spec-tokens", "1"]) == 2
        assert "use --spec-tokens 0 " in capsys.readouterr().err
        assert main(["plan", str(directory)]) == 0
        assert "note: no drafts, K = 0" in capsys.readouterr().err


def test_layers_that_a_fine_tune_lost(plain: Any, tmp_path: Path, capsys: Captured) -> None:
    """The line says where to get them back."""
    directory = lost(tmp_path / "tuned", plain("mimo"))
    assert main(["run", str(directory), "-p", "w7", "-n", "3"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"note: no drafts, K = 0: .* has lost the MTP layers .*: mtpc graft BASE", err)


def test_from_python(plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A directory and a model object; what `strict` forbids, and what is given."""
    directory = plain("qwen3")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    made = build_target("llama")  # From a config: of no directory.
    for model in (directory, loaded, made):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mtpc"):
            spec = mtpc.compile(model, backend="eager", **QUICK)
        assert spec.options.spec_tokens == 0
        (note,) = caplog.messages
        assert re.match(r"no drafts, K = 0: .* announces no MTP layers; .*\(draft=DIR\)", note)
        assert spec.stats.fallbacks[note] == 1
        assert len(spec.generate([3, 4], 4, ignore_eos=True)) == 4
        for wish in ({"spec_tokens": 3}, {"num_speculative_tokens": 1}, {"strict": True}):
            with pytest.raises(CheckpointError, match="or use spec_tokens=0 to decode without"):
                mtpc.compile(model, backend="eager", **QUICK, **wish)
    with pytest.raises(CheckpointError, match="or use spec_tokens=0 to decode without"):
        mtpc.compile_host(directory, backend="eager")


def test_layers_that_are_there_still_draft(checkpoint: Callable[..., Path]) -> None:
    spec = mtpc.compile(checkpoint("mimo"), backend="eager", **QUICK)
    assert (spec.options.spec_tokens, dict(spec.stats.fallbacks)) == (3, {})


@pytest.mark.parametrize("family", [*EVERY_FAMILY, *DRAFTED, *ASSISTED])
def test_every_family_is_told_apart(family: str, checkpoint: Callable[..., Path]) -> None:
    """By the names of tensors, without the family table."""
    assert CheckpointFiles(checkpoint(family, "plain")).without_drafts
    drafts = not CheckpointFiles(checkpoint(family, "random")).without_drafts
    assert drafts == (family not in (*DRAFTED, *ASSISTED))


def test_bench_shows_what_it_measured_before_an_error(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: Captured
) -> None:
    """Its MTP layer lacks a tensor, so K = 0 runs and K = 1 does not."""
    directory = word_checkpoint(checkpoint("mimo", "random"), tmp_path / "broken")
    path = directory / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if not n.endswith("input_proj.weight")}
    save_file(kept, path, metadata={"format": "pt"})
    command = ["bench", str(directory), "-p", "w7", "-n", "4", "--max-len", "64"]
    command += ["--repeats", "1", "--backend", "eager", "--spec-tokens"]
    assert main([*command, "0,1"]) == 2
    out, err = capsys.readouterr()
    assert re.search(r"(?m)^  0 +- +\d", out)
    assert len(re.findall("error: ", err)) == 1
    assert "missing projection.weight" in err
    assert main([*command, "0,1", "--json"]) == 2
    assert [row["spec_tokens"] for row in json.loads(capsys.readouterr().out)["rows"]] == [0]
    assert main([*command, "1"]) == 2
    assert capsys.readouterr().out == ""
