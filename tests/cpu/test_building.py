"""Building the C++ kernels: found again, refused, and what a compiler's failure leaves."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from mtpc.backends.cpu_kernels import build_kernels
from mtpc.backends.cpu_kernels.compile import LONGEST, compile_for
from mtpc.backends.cpu_kernels.generate import SOURCE_DIR
from mtpc.backends.cpu_kernels.levels import X86, Level, chosen_level
from mtpc.errors import BackendError, CacheError
from mtpc.store.entries import EntryStore
from mtpc.store.machine import cpu_flags

_CHECK = """
case " $* " in
  *c++-header*) exec g++ "$@";;
  *runner.cpp*) ;;
  *" -c "*) g++ "$@" -fsyntax-only || exit 1;;
esac
while [ "$1" != -o ]; do shift; done; : > "$2"
"""
"""Compiles nothing, but reports what is wrong with a kernel's source. The runner has no levels."""
_TOUCH = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


def compiler_script(directory: Path, body: str) -> str:
    """A stand-in for the compiler that has a version, and does `body` when asked to compile."""
    script = directory / "c++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo stand-in 1 && exit 0\n{body}\n')
    script.chmod(0o755)
    return str(script)


def test_a_build_is_found_again() -> None:
    built, lines = build_kernels(), list[str]()
    assert build_kernels(report=lines.append) == built
    assert lines == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match=r"found no 'no-such-compiler'.*backend='eager'"):
        build_kernels(EntryStore(tmp_path))


def test_a_build_is_found_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may have the library and no compiler."""
    built = build_kernels()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_kernels(frozen=True) == built


def test_frozen_compiles_nothing(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"no cpu kernels of level \w+ for this machine; frozen"):
        build_kernels(EntryStore(tmp_path / "empty"), frozen=True)
    assert not (tmp_path / "empty").exists()


def test_a_failing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(BackendError, match=r"/bin/false failed with exit status 1"):
        build_kernels(EntryStore(tmp_path))


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels are built all the same, for this process, and it says so."""
    monkeypatch.setenv("CXX", compiler_script(tmp_path, _TOUCH))
    (tmp_path / "file").write_text("")
    told: list[tuple[str, float | None]] = []
    library = build_kernels(
        EntryStore(tmp_path / "file"), lambda line, fraction=None: told.append((line, fraction))
    )
    assert isinstance(library, Path)
    assert library.is_file()
    assert any("not kept: cannot write the graph cache" in line for line, _ in told)
    shares = [fraction for line, fraction in told if line.startswith("compiling the cpu kernels")]
    assert shares[0] is None
    assert shares[1:] == sorted(shares[1:])
    assert shares[-1] == 1.0
    assert len({line for line, fraction in told if fraction is not None}) == 1, "one stage"


def test_the_compilers_last_words_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = compiler_script(tmp_path, 'echo "x.cpp:1: no such thing" >&2; exit 3')
    monkeypatch.setenv("CXX", script)
    with pytest.raises(BackendError, match="no such thing"):
        build_kernels(EntryStore(tmp_path / "cache"))
    assert not list(tmp_path.glob("cache/entries/*"))
    assert not list(tmp_path.glob("cache/tmp/*"))


def test_the_longest_sources_are_there() -> None:
    """Their order is a list of names, which a renamed source would leave."""
    named = {path.stem for path in SOURCE_DIR.glob("*.cpp")} | {"operators"}
    assert set(LONGEST) <= named


RARE = ("avx512", "avx512_vnni", "portable")
"""Levels whose sources the other levels compile nearly all of."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels of x86")
@pytest.mark.parametrize(
    "level",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.name in RARE)) for each in X86],
    ids=lambda each: each.name,
)
def test_sources_compile_for_the_levels_of_other_machines(
    level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This machine's own level is compiled for all other tests."""
    if level != chosen_level(cpu_flags()):
        monkeypatch.setenv("CXX", compiler_script(tmp_path, _CHECK))
        compile_for([level], tmp_path / "out", lambda *_: None)
