"""`mtpc chat`: by pipe and in a terminal; and the script that completes commands."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.places import ROOT
from helpers.word_model import SMALL_MODEL, word_checkpoint

import mtpc
from mtpc.cli.main import main

pytestmark = pytest.mark.usefixtures("shared_cache")

OPTIONS = [*SMALL_MODEL[2:], "--spec-tokens", "1"]


@pytest.fixture(scope="module")
def chatty(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_checkpoint(checkpoint("mimo"), tmp_path_factory.mktemp("chatty"))


def expected(spec: mtpc.SpecModel, prompt: str, count: int) -> str:
    ids = spec.served.encode(prompt, special_tokens=False)
    return spec.served.decode(list(spec.generate(ids, count)))


def test_by_pipe(
    chatty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message a line, an answer a line; the second prompt holds the first answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\n\nw9\n"))
    assert main(["chat", str(chatty), *OPTIONS, "--system", "w3", "--max-new-tokens", "4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    spec = mtpc.compile(chatty, backend="eager", max_len=64, spec_tokens=0, batch_buckets=(1,))
    start = "w5 w11 w3 w12 w7 w8 "
    assert first == expected(spec, start + "w91", 4)
    assert second == expected(spec, f"{start}w13 {first} w14 w9 w91", 4)


def test_commands_are_typed(
    chatty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/reset` forgets all but the system message, so the same question has the same answer."""
    monkeypatch.setattr(sys, "stdin", StandIn("w7 w8\n/reset\nw7 w8\nw7 w8\n/help\n/nope\n"))
    assert main(["chat", str(chatty), *OPTIONS, "--system", "w3", "--max-new-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    first, second, third = re.findall(r"(?m)^(?:> )*(w.*)$", out)
    assert first == second != third
    assert "the conversation is forgotten" in err
    assert err.count("/reset forgets the conversation, /help shows this") == 3
    assert "there is no command /nope" in err


class StandIn(io.StringIO):
    """Input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("change", "text", "message"),
    [
        ({"chat_template.jinja": None}, "w7", "has no chat template; give one: --chat-template"),
        ({"chat_template.jinja": "{% for %}"}, "w7", "the chat template is broken: line 1"),
        ({"chat_template.jinja": "{{ 1 / 0 }}"}, "w7", "refuses these messages: division by zero"),
        ({"tokenizer.json": None}, "w7", "has no tokenizer.json; a chat needs one"),
        ({}, "w7 " * 70, "prompt of 73"),
    ],
)
def test_what_cannot_be_answered(
    chatty: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str | None],
    text: str,
    message: str,
) -> None:
    """From a pipe, it is one error, and the end."""
    for path in chatty.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name, source in change.items():
        (tmp_path / name).unlink()
        if source is not None:
            (tmp_path / name).write_text(source)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
    assert main(["chat", str(tmp_path), *OPTIONS]) == 2
    assert message in capsys.readouterr().err


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str):
        self._ours, theirs = pty.openpty()
        line = [sys.executable, "-m", "mtpc", *words]
        self.process = subprocess.Popen(
            line, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Read until the pattern comes; what came up to it is read no more."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end, self.text
            self.text += os.read(self._ours, 4096).decode()
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        os.close(self._ours)


@pytest.mark.slow
def test_in_a_terminal(chatty: Path) -> None:
    """Ctrl-C ends an answer and empties a line, an error does not end it, Ctrl-D leaves."""
    terminal = Terminal(
        *("chat", str(chatty), "--backend", "eager", "--max-len", "512", "--spec-tokens", "1")
    )
    try:
        terminal.until("> $")
        terminal.type("w7 w8\n")
        terminal.until(r"w\d+ w\d+ w\d+ w\d+ w\d+ w\d+ ")
        os.kill(terminal.process.pid, signal.SIGINT)
        count = int(re.findall(r"\[(\d+) tokens", terminal.until("tokens/s\\]\r\n> $"))[0])
        assert 4 < count < 480
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until("> $")
        terminal.type("w7 " * 600 + "\n")
        terminal.until("error: prompt of .*\r\n> $")
        terminal.type("/help\n")
        terminal.until(r"/reset forgets the conversation.*\r\n> $")
        terminal.type("/rest\n")
        terminal.until(r"there is no command /rest\..*\r\n> $")
        terminal.type("\x1b[A\x1b[A\n")  # Twice the upper arrow key: what was typed before.
        terminal.until(r"/reset forgets the conversation.*\r\n> $")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "--spec-tokens", "prune"):
        assert word in script


def test_completion_in_bash(capsys: pytest.CaptureFixture[str]) -> None:
    """What bash offers after `mtpc s`, and after `mtpc run --spec`."""
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    function = re.findall(r"^complete .*-F (\w+) mtpc$", script, re.MULTILINE)[0]

    def offered(*words: str) -> list[str]:
        given = " ".join(f"'{word}'" for word in words)
        tail = f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; {function}; "
        tail += 'echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script + tail], capture_output=True, text=True)
        return done.stdout.split()

    assert offered("mtpc", "ser") == ["serve"]
    assert offered("mtpc", "run", "--spec-to") == ["--spec-tokens"]
