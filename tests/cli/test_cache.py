"""`mtpc build` and `mtpc cache`: what they print, what they leave, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.compiled import CpuBuilt
from helpers.families import CPU_OPTIONS
from helpers.theorem import PROMPTS
from helpers.warm_starts import damage, option_words

import mtpc
from mtpc.cli.main import main
from mtpc.layout import StepKey
from mtpc.store.entries import EntryStore
from mtpc.store.lookup import KERNELS, KEY
from mtpc.store.tokenizers import KeptTokenizers

DECODE = StepKey.decode(2, 3)


@pytest.fixture
def mine(cpu_cache: Path, cpu_built: Callable[..., CpuBuilt], tmp_path: Path) -> Path:
    """A copy of the session's cache, with steps of mimo in it."""
    cpu_built("mimo")
    return Path(shutil.copytree(cpu_cache, tmp_path / "cache"))


def run(*words: object) -> int:
    return main([str(word) for word in words])


# ---------------------------------------------------------------------------------- build


def test_build_fills_a_cache_that_compile_uses(
    checkpoint: Callable[..., Path], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes build two K; the pin that is printed loads exactly this."""
    out = ["--out", mine, "--jobs", 2]
    assert run("build", checkpoint("mimo"), *option_words(spec_tokens="0,3"), *out, "-v") == 0
    printed, told = capsys.readouterr()
    rows = [line for line in printed.splitlines() if "[R=" in line]
    assert [row.split()[0] for row in rows] == [
        "prefill[R=2,Q=4,K=0]",
        "decode[R=2,Q=1,K=0]",
        "decode[R=2,Q=4,K=3]",
        "prefill[R=2,Q=4,K=3]",
    ]
    assert [row.split()[-1] for row in rows] == ["built", "built", "cached", "cached"]
    assert all(
        re.search(r" \d+ +\d+ +\d+\.\d s +\d+\.\d s +\d+\.\d s +\d+\.\d [MK]iB ", r) for r in rows
    )
    assert re.search(r"/2 lower (decode|prefill)\[R=.,Q=.,K=0\]", told)
    pins = dict(re.findall(r"K=(\d): .* --require-sha256 ([0-9a-f]{64})", printed))
    words = [*option_words(spec_tokens="0,3"), *out, "--json", "--quiet"]
    assert run("build", checkpoint("mimo"), *words) == 0
    printed, told = capsys.readouterr()
    again = json.loads(printed)
    assert again["require_sha256"] == pins
    assert [step["step"] for step in again["steps"]] == [row.split()[0] for row in rows]
    assert all(step["was_there"] and step["seconds"]["lower"] > 0 for step in again["steps"])
    assert told == ""
    for k in (0, 3):
        options = {**CPU_OPTIONS, "spec_tokens": k, "cache_dir": mine}
        spec = mtpc.compile(checkpoint("mimo"), **options, require_sha256=pins[str(k)])
        assert spec.loaded is None
        assert spec.generate(PROMPTS[4], 8)


def test_run_uses_the_cache(
    checkpoint: Callable[..., Path], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ids", "5 6 7", "-n", 4, "--frozen", "--cache-dir", mine]
    assert run("run", checkpoint("mimo"), *option_words(), *words) == 0
    printed, told = capsys.readouterr()
    assert re.search(r"fallbacks +none", printed)
    assert "lower" not in told


def test_commands_share_what_is_built(
    word_model: Path, cpu_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy or not: no command builds what another one has, nor makes its tokenizer."""
    where = ["--cache-dir", cpu_cache]
    options = [word for word in option_words() if word != "--no-sampling"]
    assert run("build", word_model, *options, "--out", cpu_cache) == 0
    assert KeptTokenizers(EntryStore(cpu_cache)).read(word_model / "tokenizer.json")
    texts = []
    for more in ([], ["--temperature", 0.7, "--top-k", 1]):
        words = ["--ids", "5 6 7", "-n", 4, "--frozen", "--quiet", *where]
        assert run("run", word_model, *options, *words, *more) == 0
        texts.append(capsys.readouterr().out.splitlines()[-1])
    assert texts[0] == texts[1]
    assert run("cache", "why", word_model, *options, *where) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "eager"], "backend 'eager' compiles nothing ahead of time; expected cpu"),
        (["--spec-tokens", "1,99"], "spec_tokens is 99; expected an integer in 0..16"),
        (["--out", "/proc/nowhere"], "cannot write the graph cache /proc/nowhere"),
        (["--target", "hip:gfx1"], "unknown target 'hip:gfx1'; expected one of hip:gfx942, "),
        (["--target", "hip:gfx942", "--jobs", "2"], "in one process; drop --split, --jobs"),
    ],
    ids=["backend", "k", "out", "target", "jobs"],
)
def test_build_refuses(
    words: list[str],
    message: str,
    checkpoint: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = option_words(spec_tokens="1") if "--out" in words else []
    assert run("build", checkpoint("mimo"), *options, *words) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------- cache


def test_ls_and_inspect(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "ls", "--cache-dir", mine) == 0
    listed = capsys.readouterr().out
    found = re.search(r"([0-9a-f]{8}) +decode\[R=2,Q=4,K=3\] +mimo-trained0 .* fits this m", listed)
    assert found
    assert re.search(r"[0-9a-f]{8} +kernels +.* fits this machine", listed)
    assert run("cache", "inspect", found[1], "--cache-dir", mine) == 0
    shown = capsys.readouterr().out
    assert re.search(r"options\.page_size +4 ", shown)
    assert re.search(r"fuse-draft-chain +\d+ +\d+ +\d+ +\d\.\d\d s", shown)
    assert re.search(r"lower +\d+\.\d s", shown)
    assert re.search(r"step\.tape\.json +\d+\.\d [MK]iB +[0-9a-f]{64}", shown)
    for name, wanted in (("traced", "call_module"), ("legalise-cpu", "mtpc_cpu.paged_attention")):
        assert run("cache", "inspect", found[1], "--graph", name, "--cache-dir", mine) == 0
        assert wanted.removeprefix("call_") in capsys.readouterr().out
    assert run("cache", "inspect", found[1], "--graph", "no", "--cache-dir", mine) == 2
    assert "expected one of: traced, resize-metadata," in capsys.readouterr().err


def test_why(
    checkpoint: Callable[..., Path], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each step, that it is there, or which field differs from what to what."""
    where = ["--cache-dir", mine]
    assert run("cache", "why", checkpoint("mimo"), *option_words(), *where) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"yes: [0-9a-f]{8}", printed)) == 2
    assert run("cache", "why", checkpoint("mimo"), *option_words(page_size=8), *where) == 1
    assert "no: options.page_size: 4 -> 8" in capsys.readouterr().out


def test_verify_and_prune(
    mine: Path, cpu_built: Callable[..., CpuBuilt], capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage is found by name; what is damaged, stale or left over goes, the rest stays."""
    where = ["--cache-dir", mine]
    assert run("cache", "verify", *where) == 0
    whole = int(re.search(r"(\d+) of \1 entries are whole", capsys.readouterr().out)[1])
    damage(mine, cpu_built("mimo").compiler.obtain(DECODE), "step.tape.json")
    (mine / "tmp" / ("0" * 32 + "-killed")).mkdir(parents=True)
    assert run("cache", "verify", *where) == 1
    assert "step.tape.json does not have the SHA-256" in capsys.readouterr().out
    assert run("cache", "ls", *where) == 0
    assert re.search(r"damaged: .*\n(.*\n)*left by a killed build: ", capsys.readouterr().out)
    assert run("cache", "prune", "--dry-run", *where) == 0
    assert "would free" in capsys.readouterr().out
    assert len(EntryStore(mine).digests()) == whole
    assert run("cache", "prune", *where) == 0
    assert "damaged: " in capsys.readouterr().out
    kept, built = EntryStore(mine).digests(), cpu_built("mimo").compiler
    assert built.obtain(DECODE).entry.digest not in kept
    assert built.obtain(StepKey.prefill(2, 4, 3)).entry.digest in kept
    assert not list((mine / "tmp").iterdir())
    assert run("cache", "prune", "--all", *where) == 0
    assert EntryStore(mine).digests() == []


def test_stale_entries_are_named(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an upgrade, what was built before it says so, and may go."""
    monkeypatch.setattr(mtpc, "__version__", "9.9")
    assert run("cache", "ls", "--cache-dir", mine) == 0
    assert "stale: version.mtpc: 0.1.0 -> 9.9" in capsys.readouterr().out
    assert run("cache", "prune", "--cache-dir", mine) == 0
    store = EntryStore(mine)
    kept = [(store.directory(name) / KEY).read_text() for name in store.digests()]
    assert any(KERNELS in key for key in kept)
    assert not any("version.mtpc" in key for key in kept)


def test_prune_by_age(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = EntryStore(mine)
    old = store.digests()[0]
    os.utime(store.directory(old), (1, 1))
    assert run("cache", "prune", "--older-than", 30, "--cache-dir", mine) == 0
    assert old not in store.digests()
    assert re.search(r"freed \d+\.\d ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "zz"], "'zz' fits none of the entries in"),
        (["inspect", ""], r"'' fits [0-9a-f]{8}, "),
        (["why", "/nowhere"], "'/nowhere' is not a directory"),
    ],
    ids=["unknown", "ambiguous", "checkpoint"],
)
def test_cache_refuses(
    words: list[str], message: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cache", *words, "--cache-dir", mine) == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there is no error, and nothing is created by looking."""
    where = ["--cache-dir", tmp_path / "nothing"]
    for action in ("ls", "verify", "prune"):
        assert run("cache", action, *where) == 0
    assert "0 entries" in capsys.readouterr().out
    assert not (tmp_path / "nothing").exists()
