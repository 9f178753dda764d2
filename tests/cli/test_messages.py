"""What commands and errors say to a newcomer: names and places, not the insides of Python."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.schedules import PRESSED

from mtpc.cli import doctor
from mtpc.cli.arguments import parse
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import demo_checkpoint
from mtpc.cli.main import main
from mtpc.config import CompileOptions
from mtpc.program.processes import WORKER, how_it_ended
from mtpc.server.chat import load_chat_template
from mtpc.store.entries import Entry


def test_doctor_says_where_the_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("0" * 32, Path("/cache/entries") / ("0" * 32), {}, "", 1)
    monkeypatch.setattr(
        "mtpc.backends.cpu_kernels.build.build_kernels", lambda *args, **options: entry
    )
    found = doctor._check_kernels().found
    assert found.endswith(f"built: /cache/entries/{'0' * 32}")
    assert "Entry(" not in found


def test_inspect_shows_what_runs(
    word_model: Path,
    cpu_cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the backend of `mtpc run`; the heading has its name."""
    monkeypatch.setenv("MTPC_CACHE_DIR", str(cpu_cache))
    for command in ("inspect", "run"):
        assert CompileOptions.parse(compile_options(parse([command]))).backend == "auto"
    assert main(["inspect", str(word_model), "--max-len", "64", "--spec-tokens", "1"]) == 0
    assert " nodes, for backend cpu" in capsys.readouterr().out


def test_the_demo_model_has_a_chat_template() -> None:
    """A conversation is its texts, one after the other."""
    template = load_chat_template(demo_checkpoint(), None)
    assert template is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A list"}]
    assert template.render(messages, {}) == "Be brief.\nA list"


def test_a_compiled_model_says_what_it_is(compiled: Callable[..., Any], checkpoint: Any) -> None:
    spec, name = compiled("mimo", 2, **PRESSED), checkpoint("mimo").name
    assert repr(spec).startswith(f"<SpecModel '{name}': spec_tokens 2, batch_buckets ")
    assert f"backend eager, {len(spec.program.steps)} steps, vocabulary of 96>" in repr(spec)


def test_a_build_that_the_system_killed() -> None:
    """Only then memory is named, with how much is needed and what to do."""
    killed = how_it_ended(-signal.SIGKILL)
    assert f"needs some {WORKER / 2**30:.1f} GiB" in killed
    assert "--jobs 1" in killed
    assert how_it_ended(1) == "status 1; what it said is on stderr"


@pytest.mark.parametrize("command", ["run", "serve", "bench", "build", "inspect"])
def test_hub_ids_on_the_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ids", "1 2"] if command in ("run", "bench") else []
    assert main([command, "tiny/NotHere", *words]) == 2
    err = capsys.readouterr().err
    assert "run: hf download tiny/NotHere" in err
    assert err.count("error:") == 1


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The system's own words, in one line."""
    (tmp_path / "text").write_text("w5 w6")
    assert main(["vocab", str(tmp_path / "text"), "--out", str(tmp_path / ("x" * 300))]) == 2
    assert "error: [Errno 36] File name too long" in capsys.readouterr().err
