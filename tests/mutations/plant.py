"""Plant faults in copies of mtpc, one at a time: the test that each names must fail.

    python tests/mutations/plant.py [--draw N] [--only WORDS] [--jobs 2] [--out FILE]
        [--objects DIRECTORY] [--build]

--out keeps the rows of faults that are not planted this time, if their tests are the same.
--objects keeps what was compiled of the kernels: a fault in one compiles the files that have it.
--build plants nothing. It compiles the kernels into the graph cache, where all tests find them, and
keeps the objects.

Each fault has a process of its own, a fork of one that has torch imported. Exit status 1 means that
a test missed its fault, or fails without any.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutations.faults import FAULTS, Fault  # noqa: E402

KEPT = Path(__file__).with_name("kept_objects.py")
LIMIT_S = 600.0
"""For each test. A fault that makes its test run longer is seen, too: the run hangs."""
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True)
class Run:
    """How a test ended.

    Attributes:
        status: pytest's exit status; None where it was stopped after `LIMIT_S`.
        seconds: how long it ran.
        output: what it printed.
    """

    status: int | None
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        """Whether the test has seen the fault."""
        return self.status in (_FAILED, None)

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        if self.status is None:
            return "seen by a hang"
        return "seen" if self.failed else f"MISSED (pytest's status {self.status})"


def plant(fault: Fault, tree: Path) -> None:
    """Write a fault into a copy of the repository.

    Raises:
        ValueError: what is to be replaced does not stand in its file exactly once.
        SyntaxError: the file is no Python with it.
    """
    path = tree / "mtpc" / fault.file
    text = path.read_text()
    found = [match.span() for match in fault.anchor.finditer(text)]
    if len(found) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has its text {len(found)} times")
    start, end = found[0]
    text = text[:start] + fault.wrong + text[end:]
    if path.suffix == ".py":
        compile(text, fault.file, "exec")
    path.write_text(text)


class Trial:
    """Tests that run in a fork of this process, on a copy of the repository.

    Args:
        tests: names below tests/.
        fault: what to plant in the copy; None leaves it right.
        objects: what is compiled of kernels.

    Raises:
        ValueError: the fault cannot be planted.
        CalledProcessError: the kernels with the fault do not compile.
    """

    def __init__(self, tests: Sequence[str], fault: Fault | None, objects: Path):
        self.fault, self._limit_s = fault, LIMIT_S * len(tests)
        self._tree = Path(tempfile.mkdtemp(prefix="mtpc-fault-"))
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("mtpc", "tests", "examples"):
            shutil.copytree(ROOT / part, self._tree / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self._tree)
        if fault is not None:
            plant(fault, self._tree)
        env = dict[str, str]()
        if fault is not None and fault.is_compiled:
            env = _compile(self._tree, objects, self._tree / "cache")
        self._start, self._child = time.monotonic(), os.fork()
        if self._child == 0:
            _test(tests, self._tree, env)

    def poll(self) -> Run | None:
        """How the tests ended, or None while they run. Removes the copy."""
        seconds = time.monotonic() - self._start
        done, status = os.waitpid(self._child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if not done:
            if seconds < self._limit_s:
                return None
            os.killpg(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        output = (self._tree / "log.txt").read_text()
        shutil.rmtree(self._tree, ignore_errors=True)
        return Run(code, seconds, output)


def _compile(tree: Path, objects: Path, cache: Path | None) -> dict[str, str]:
    """Compile the kernels of a tree, into a graph cache or the default one; returns the variables
    by which tests find them."""
    compiler = objects / "compiler"
    compiler.write_text(f"#!{sys.executable}\n{KEPT.read_text()}")
    compiler.chmod(0o700)
    env = {"KEPT_CXX": os.environ.get("CXX", "g++"), "KEPT_OBJECTS": str(objects)}
    env |= {"CXX": str(compiler), "PYTHONPATH": str(tree)}
    if cache is not None:
        env["MTPC_CACHE_DIR"] = str(cache)
    build = "from mtpc.backends.cpu_kernels import build_kernels; build_kernels()"
    subprocess.run([sys.executable, "-c", build], cwd=tree, env={**os.environ, **env}, check=True)
    return env


def _test(tests: Sequence[str], tree: Path, env: Mapping[str, str]) -> None:
    """The child: run pytest on the copy, and end."""
    status = 3
    try:
        os.setpgrp()
        with (tree / "log.txt").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), **env}
        ours = {str(ROOT / part) for part in ("", "tests", "examples", "tests/mutations")}
        sys.path[:] = [str(tree), *(place for place in sys.path if place not in ours)]
        for name in [name for name in sys.modules if name.split(".")[0] == "mutations"]:
            del sys.modules[name]
        import pytest

        options = ["-n", "0", "-x", "-p", "no:cacheprovider", "--tb=short"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Imported by transformers.
        status = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def check_all(faults: Sequence[Fault], jobs: int, out: Path | None, objects: Path) -> bool:
    """Check faults, `jobs` at a time; says how each ended, and writes each row as it is known.

    Returns:
        Whether every fault was seen.
    """
    waiting, running, all_seen = list(faults), list[Trial](), True
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            running.append(Trial([fault.test], fault, objects))
        for trial in list(running):
            result = trial.poll()
            if result is None or trial.fault is None:
                continue
            running.remove(trial)
            all_seen &= result.failed
            if out is not None:
                out.write_text(report({**read_rows(out), row(trial.fault): result.verdict}))
            print(f"{result.verdict}: {trial.fault.name} ({result.seconds:.0f} s)", flush=True)
            if not result.failed:
                print(result.output[-2000:], flush=True)
        time.sleep(0.1)
    return all_seen


def row(fault: Fault) -> str:
    """A fault's row of the results, without what came of it."""
    return f"| {fault.name} | `{fault.file}` | `{fault.test}` |"


def read_rows(path: Path) -> dict[str, str]:
    """Rows of a file of results, and what came of each fault."""
    lines = path.read_text().splitlines() if path.exists() else []
    cells = [line.rpartition(" | ") for line in lines if line.count(" | ") == 3]
    return {f"{known} |": verdict.removesuffix(" |") for known, _, verdict in cells}


def report(verdicts: Mapping[str, str]) -> str:
    """What was planted, and what saw it, as Markdown: the faults of this file's table only."""
    found = [fault for fault in FAULTS if row(fault) in verdicts]
    known = [row(fault) for fault in found]
    kernels = [fault for fault in found if "kernels/" in fault.file]
    seen = [text for text in known if verdicts[text].startswith("seen")]
    lines = [
        "# Planted faults",
        "",
        "`python tests/mutations/plant.py --out tests/mutations/results.md` writes this file. It",
        "plants each fault in a copy of mtpc, and runs the test, which has to fail.",
        "",
        f"{len(known)} faults, {len(kernels)} of them in kernels; {len(seen)} are seen.",
        "",
        "| fault | file | test | verdict |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"{text} {verdicts[text]} |" for text in known)]) + "\n"


def _pass_without_faults(tests: set[str], objects: Path) -> bool:
    """Whether all tests pass on a copy that is right; else says how they end."""
    trial, right = Trial(sorted(tests), None, objects), None
    while right is None:
        time.sleep(0.1)
        right = trial.poll()
    if right.status != _PASSED:
        print(f"without a fault, the tests end with {right.status}:\n{right.output[-3000:]}")
        return False
    print(f"the tests pass without a fault ({right.seconds:.0f} s)", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", type=int, help="plant so many, drawn at random")
    parser.add_argument("--only", default="", help="plant those with these words in the name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the results as Markdown")
    parser.add_argument("--objects", type=Path, help="keep what was compiled of the kernels")
    parser.add_argument("--build", action="store_true", help="compile the right kernels only")
    options = parser.parse_args()
    wanted = [fault for fault in FAULTS if options.only in fault.name]
    if options.draw:
        wanted = random.sample(wanted, options.draw)
    import torch  # noqa: F401  (each fork has them)
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mtpc-objects-") as fresh:
        objects = (options.objects or Path(fresh)).resolve()
        objects.mkdir(parents=True, exist_ok=True)
        if options.build:
            _compile(ROOT, objects, None)
            return 0
        # After the default run it is known of all tests.
        if not options.draw and not _pass_without_faults({f.test for f in wanted}, objects):
            return 1
        return int(not check_all(wanted, options.jobs, options.out, objects))


if __name__ == "__main__":
    sys.exit(main())
