"""What Inductor makes of a cuda step, kept in the graph cache; lowered on the CPU.

There, torch's caches keep no compiled C++, so a second start runs the C++ compiler again; what
Inductor and AOTAutograd make is loaded. Of a GPU's kernels they keep the machine code, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lower_kept import MACHINE, SMALL, small_step
from helpers.places import HELPERS, ROOT
from helpers.plans import plan_of
from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
from torch.compiler._cache import CacheArtifactRecorder

from mtpc.backends.base import Run
from mtpc.backends.kept_steps import FIRST_RUN, KIND, LOWERING, KeptSteps, step_fields
from mtpc.capture.graph import StepGraph, set_tensor
from mtpc.cli.main import main
from mtpc.errors import CacheError, OptionError
from mtpc.program.open_cache import kernel_store, open_cache
from mtpc.store.entries import SUMS, Entry, EntryStore
from mtpc.store.key import digest
from mtpc.store.lookup import KEY, key_bytes, key_of

STEP = "decode[R=1,Q=1,K=0]"
"""The name of each of the small steps."""


def _started(cache: Path, inductor: Path, *steps: str, **variables: str) -> dict[str, Any]:
    """What a process of its own says; Inductor's cache is where the second argument says."""
    paths = os.pathsep.join((str(ROOT), str(HELPERS.parent)))
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": paths,
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        # The C++ compiler is quicker so.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    words = [sys.executable, str(HELPERS / "lower_kept.py"), str(cache), *steps]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _pins(cache: Path) -> dict[str, str]:
    """The digests of all entries' contents, by name."""
    store = EntryStore(cache)
    entries = (store.read(name) for name in store.digests())
    return {entry.digest: entry.pin for entry in entries if entry}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory with the cache and Inductor's cache, "one", of a first start; what it said."""
    root = tmp_path_factory.mktemp("begun")
    return root, _started(root / "cache", root / "one", "doubled")


def test_a_second_start_compiles_nothing(begun: tuple[Path, dict[str, Any]]) -> None:
    """In another process with an empty cache of Inductor's."""
    root, first = begun
    cache, second = root / "cache", _started(root / "cache", root / "two", "doubled")
    expected = {"doubled": [2.0 * n for n in range(8)]}
    assert first["results"] == second["results"] == expected
    assert first["counted"] == {
        "fxgraph_cache_hit": 0,
        "fxgraph_cache_miss": 1,
        "autograd_cache_hit": 0,
        "autograd_cache_miss": 1,
    }
    assert second["counted"] == {
        "fxgraph_cache_hit": 1,
        "fxgraph_cache_miss": 0,
        "autograd_cache_hit": 1,
        "autograd_cache_miss": 0,
    }
    assert first["notes"] == second["notes"] == {}
    assert len(_pins(cache)) == 1


def test_other_sources_are_compiled_again(begun: tuple[Path, dict[str, Any]]) -> None:
    """Also where torch's own cache has the step, whose key has the names of operators alone."""
    root, before = begun[0], _pins(begun[0] / "cache")
    changed = {"MTPC_TEST_SOURCES": "other"}
    again = _started(root / "cache", root / "one", "doubled", **changed)
    missed = {name: count for name, count in again["counted"].items() if count}
    assert missed == {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1}
    assert _pins(root / "cache").keys() > before.keys()
    assert len(_pins(root / "cache")) == len(before) + 1


@pytest.mark.slow
def test_a_models_step_is_not_compiled_again(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    cache, step = tmp_path / "cache", str(checkpoint("mimo"))
    first = _started(cache, tmp_path / "one", step)
    pins = _pins(cache)
    second = _started(cache, tmp_path / "two", step)
    graphs = first["counted"]["fxgraph_cache_miss"]
    assert graphs > 0
    assert second["counted"]["fxgraph_cache_hit"] == graphs
    assert second["counted"]["fxgraph_cache_miss"] == second["counted"]["autograd_cache_miss"] == 0
    assert _pins(cache) == pins != {}
    # That operators run as their references is noted by both.
    assert first["notes"] == second["notes"]
    assert not [note for note in second["notes"] if "graph cache" in note or "entry" in note]


@dataclass
class _Torch:
    """A lowering that puts a file into Inductor's cache unless it is there, and records it.

    Attributes:
        inductor: Inductor's cache.
        compiled: steps that were not in Inductor's cache.
        tunes: whether the first run of a step adds a file, too.
        version: part of the files' names.
    """

    inductor: Path
    compiled: list[str] = field(default_factory=list)
    tunes: bool = False
    version: str = "0"

    def lower(self, graph: StepGraph) -> Run:
        name = "add" if "aten.add" in graph.text() else "mul"
        self._use(f"{name}-{self.version}")
        return lambda: self._use(f"tuned-{name}") if self.tunes else None

    def _use(self, name: str) -> None:
        path = self.inductor / "made" / f"{name}.best_config"
        if not path.exists():
            self.compiled.append(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        key = f"made/{path.name}"
        CacheArtifactRecorder(AutotuneCacheArtifact.type(), key).record({"name": name})


@dataclass
class _Start:
    """A process that starts with an empty cache of Inductor's."""

    kept: KeptSteps
    torch: _Torch
    notes: Counter[str]

    def step(self, name: str = "added") -> None:
        """Lower a step, and run it twice."""
        run = self.kept(small_step(name))
        run()
        run()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Start]:
    """start(store=, **fields of _Torch): each has an empty cache of Inductor's."""
    numbers = iter(range(9))

    def begin(store: EntryStore | None = None, **given: Any) -> _Start:
        inductor = tmp_path / f"inductor-{next(numbers)}"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
        stub, notes = _Torch(inductor, **given), Counter[str]()

        def note(line: str) -> None:
            notes[line] += 1

        kept = KeptSteps(store or EntryStore(tmp_path / "cache"), MACHINE, stub.lower, note)
        return _Start(kept, stub, notes)

    return begin


def _entry(store: EntryStore, name: str = "added") -> Entry:
    found = store.read(digest({**step_fields(small_step(name)), **MACHINE}))
    assert found is not None
    assert key_of(found)["kind"] == KIND
    return found


def test_an_entry_is_of_one_step_and_of_its_first_run(start: Callable[..., _Start]) -> None:
    one, two = start(tunes=True), None
    for name in SMALL:
        one.step(name)
    assert one.torch.compiled == ["add-0", "tuned-add", "mul-0", "tuned-mul"]
    store = one.kept.store
    entry = _entry(store)
    assert {*entry.files} == {KEY, LOWERING, FIRST_RUN}
    assert b"mul" not in (entry.directory / LOWERING).read_bytes()
    pins = _pins(store.root)
    two = start(tunes=True)
    for name in SMALL:
        two.step(name)
    assert two.torch.compiled == []
    assert one.notes == two.notes == {}
    assert _pins(store.root) == pins


def test_an_entry_that_lacks_a_part_is_replaced(start: Callable[..., _Start]) -> None:
    """As where a variable of Inductor's has another value, which is in Inductor's keys alone."""
    start().step()
    other = start(version="1")
    other.step()
    assert other.torch.compiled == ["add-1"]
    assert [*other.notes] == [
        f"{STEP} was compiled again: its entry in the graph cache lacks a part"
    ]
    again = start(version="1")
    again.step()
    assert (again.torch.compiled, again.notes) == ([], {})


def test_a_frozen_cache_serves_what_it_has_and_compiles_nothing(
    tmp_path: Path, start: Callable[..., _Start]
) -> None:
    """A start that found it empty would compile; then one that has all; one that lacks a part; and
    one whose directory others could have written."""
    root = tmp_path / "cache"
    empty = start(EntryStore(root, frozen=True), tunes=True)
    with pytest.raises(
        CacheError, match=rf"^frozen, and the graph cache .* lacks {re.escape(STEP)}"
    ):
        empty.step()
    assert (empty.torch.compiled, _pins(root)) == ([], {})
    start(tunes=True).step()
    pins = _pins(root)
    second = start(EntryStore(root, frozen=True), tunes=True)
    second.step()
    assert (second.torch.compiled, second.notes) == ([], {})
    other = start(EntryStore(root, frozen=True), version="1")
    with pytest.raises(CacheError, match="or a part of it"):
        other.step()
    foreign = start(EntryStore(root, frozen=True))
    foreign.torch.inductor.mkdir()
    (foreign.torch.inductor / "foreign").touch()
    foreign.torch.inductor.chmod(0o777)
    with pytest.raises(CacheError, match="chmod go-w"):
        foreign.step()
    assert _pins(root) == pins


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "cuda", "frozen": True}, None),
        ({"backend": "cuda", "require_sha256": "0" * 64}, "require_sha256 with backend 'cuda'"),
        ({"backend": "eager", "frozen": True}, "frozen with backend 'eager'"),
    ],
)
def test_what_may_be_frozen(options: dict[str, Any], said: str | None) -> None:
    """What a digest names is a cpu backend's entry."""
    plan = plan_of(**options)
    if said is None:
        assert open_cache(None, plan, print) is None
        kept = kernel_store(plan, None)
        assert kept is not None
        assert kept.frozen
        return
    with pytest.raises(OptionError, match=said):
        open_cache(None, plan, print)


@pytest.mark.parametrize("file", [LOWERING, KEY, SUMS])
def test_a_damaged_entry_is_refused_and_written_anew(
    file: str, start: Callable[..., _Start]
) -> None:
    one = start()
    one.step()
    entry = _entry(one.kept.store)
    path = entry.directory / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    two = start()
    two.step()
    assert two.torch.compiled == ["add-0"]
    (note,) = two.notes
    assert note.startswith(f"{STEP} is compiled again, its cache entry was refused: ")
    assert file in note
    assert _entry(one.kept.store).pin == entry.pin


def test_the_entry_of_another_step_is_refused(start: Callable[..., _Start]) -> None:
    one = start()
    for name in SMALL:
        one.step(name)
    added, doubled = (_entry(one.kept.store, name) for name in SMALL)
    shutil.rmtree(added.directory)
    shutil.copytree(doubled.directory, added.directory)
    two = start()
    two.step()
    assert two.torch.compiled == ["add-0"]
    (note,) = two.notes
    assert note.endswith("holds the key of another entry")
    assert _entry(one.kept.store).pin == added.pin


def test_whole_entries_that_torch_cannot_read_are_refused(start: Callable[..., _Start]) -> None:
    one, fields = start(), {**step_fields(small_step("added")), **MACHINE}

    def fill(directory: Path) -> None:
        (directory / LOWERING).write_bytes(b"nothing of torch's")
        (directory / KEY).write_bytes(key_bytes(fields))

    one.kept.store.write(digest(fields), fill)
    one.step()
    (note,) = one.notes
    assert "is nothing that this torch can read" in note
    two = start()
    two.step()
    assert (two.torch.compiled, two.notes) == ([], {})


def test_a_directory_that_others_may_write_is_neither_read_nor_kept(
    start: Callable[..., _Start],
) -> None:
    """torch runs what it finds in its own cache, whoever put it there."""
    start().step()
    two = start()
    two.torch.inductor.mkdir()
    (two.torch.inductor / "foreign").touch()
    two.torch.inductor.chmod(0o777)
    pins = _pins(two.kept.store.root)
    for name in SMALL:
        two.step(name)
    assert two.torch.compiled == ["add-0", "mul-0"]
    (note,) = two.notes
    assert note.startswith(f"{STEP} is compiled without the graph cache: ")
    assert f"chmod go-w {two.torch.inductor}" in note
    assert _pins(two.kept.store.root) == pins


def test_torchs_new_directory_is_made_safe(start: Callable[..., _Start]) -> None:
    """With the umask of some systems, its group may write what torch has just made."""
    one, before = start(), os.umask(0o002)
    try:
        one.step()
    finally:
        os.umask(before)
    assert one.notes == {}
    assert one.torch.inductor.stat().st_mode & 0o777 == 0o755


def test_a_cache_that_cannot_be_written_is_noted(
    tmp_path: Path, start: Callable[..., _Start]
) -> None:
    (tmp_path / "file").touch()
    one = start(EntryStore(tmp_path / "file" / "cache"))
    one.step()
    assert one.torch.compiled == ["add-0"]
    (note,) = one.notes
    assert note.startswith(f"{STEP} is not kept in the graph cache: cannot write")


def test_a_process_waits_for_another_that_lowers_the_step(
    tmp_path: Path, start: Callable[..., _Start]
) -> None:
    """And then takes its entry."""
    start().step()
    store = EntryStore(tmp_path / "cache")
    entry = _entry(store)
    kept = shutil.move(entry.directory, tmp_path / "made meanwhile")
    two = start()
    waiter = threading.Thread(target=two.step)
    with store.lock(entry.digest, print):
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive()
        assert two.torch.compiled == []
        shutil.move(kept, entry.directory)
    waiter.join(60)
    assert not waiter.is_alive()
    assert (two.torch.compiled, two.notes) == ([], {})


def test_the_key_has_calls_forms_and_machine() -> None:
    def key(name: str, change: Callable[[StepGraph], object] = lambda graph: None) -> str:
        graph = small_step(name)
        change(graph)
        return step_fields(graph)["graph"]

    assert key("added") == key("added")
    assert key("added") != key("doubled")

    def widen(graph: StepGraph) -> None:
        set_tensor(graph.module, "weight", graph.module.get_buffer("weight").double())

    def shift(graph: StepGraph) -> None:
        """The same form, but not at a multiple of 16 bytes, which Inductor's code relies on."""
        set_tensor(graph.module, "weight", torch.empty(9)[1:])

    assert len({key("added"), key("added", widen), key("added", shift)}) == 3
    assert {"device", "version.torch", "version.mtpc", "source"} <= {
        *step_fields(small_step("added")),
        *MACHINE,
    }


def test_the_commands_know_these_entries(
    start: Callable[..., _Start], capsys: pytest.CaptureFixture[str]
) -> None:
    """They list and check them, and prune those of another torch."""
    one = start()
    one.step()
    store = one.kept.store
    entry = _entry(store)
    where = ("--cache-dir", str(store.root))
    assert main(["cache", "ls", *where]) == 0
    listed = capsys.readouterr().out
    assert KIND in listed
    assert "fits this machine" in listed
    assert main(["cache", "verify", *where]) == 0
    assert main(["cache", "prune", *where]) == 0
    assert store.digests() == [entry.digest]
    fields = {**key_of(entry), "version.torch": "2.0.0 of long ago"}

    def fill(directory: Path) -> None:
        shutil.copyfile(entry.directory / LOWERING, directory / LOWERING)
        (directory / KEY).write_bytes(key_bytes(fields))

    store.write(digest(fields), fill)
    assert len(store.digests()) == 2
    assert main(["cache", "prune", *where]) == 0
    assert store.digests() == [entry.digest]
