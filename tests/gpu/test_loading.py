"""Code objects that were built elsewhere: found, refused, and bound to the steps of a device.

Needs Triton, compiling, not interpreting: `tests/run_triton.sh`. Nothing here runs a kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.plans import plan_of
from helpers.triton_here import COMPILES, NO_COMPILER
from torch._subclasses.fake_tensor import FakeTensorMode

from mtpc.plan import Plan

if not COMPILES:
    pytest.skip(NO_COMPILER, allow_module_level=True)

import torch
import triton
from helpers.places import HELPERS
from helpers.shipped_launches import write, write_for

from mtpc.backends.bindings import BindKernels, Configure, by_default
from mtpc.backends.cuda import CrossBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.measured import Table
from mtpc.backends.memory import live_memory, peak_bytes
from mtpc.backends.targets import TARGETS
from mtpc.backends.triton_kernels import crosscompile, load_kernels, triton_bindings
from mtpc.backends.triton_kernels.configs import Config, all_configured
from mtpc.backends.triton_kernels.crosscompile import (
    METADATA,
    Specialisation,
    compiler_fields,
    cross_compile,
)
from mtpc.backends.triton_kernels.loading import (
    CodeObjects,
    built_by_another,
    loaded_bindings,
)
from mtpc.backends.triton_kernels.plans import plan, step_launches
from mtpc.backends.triton_kernels.tuning import Call, Tuner
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.passes import Verifier
from mtpc.program.compiler import StepCompiler
from mtpc.store.entries import EntryStore
from mtpc.store.key import digest
from mtpc.store.lookup import KEY, key_bytes

pytestmark = pytest.mark.gpu_compile


def test_code_of_another_triton_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filed under its own key it is not found; filed under ours, by whatever mistake, refused."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    tmp_path.chmod(0o755)
    store, target = EntryStore(tmp_path / "store"), TARGETS["cuda:90"]
    with FakeTensorMode():
        launches = write(16)
    with monkeypatch.context() as patch:
        patch.setattr(crosscompile, "triton_key", lambda: "3.0.0 and its files")
        patch.setattr(triton.runtime.cache, "triton_key", lambda: "3.0.0 and its files")
        (theirs,) = cross_compile(launches, target, store)
    objects = CodeObjects(store, target)
    assert objects.has_any()
    reason = objects.seed(launches)
    assert reason == "write_cache_kernel was not built for cuda:90 at these sizes"
    said = built_by_another(store, target)
    assert said is not None
    assert said.startswith("the cache's code is another Triton's (triton.build: ")
    assert said.endswith("); build it with this one, of the same wheel and Python")

    def fill(directory: Path) -> None:
        for name in theirs.entry.files:
            (directory / name).write_bytes(theirs.entry.read(name))
        (directory / KEY).write_bytes(key_bytes(write_for(target).fields))

    store.write(digest(write_for(target).fields), fill)
    reason = objects.seed(launches)
    assert reason is not None
    assert "the code is another Triton's; remove the entry" in reason
    found = json.loads(theirs.entry.read(METADATA))["hash"]
    assert not (tmp_path / "triton" / found / "write_cache_kernel.cubin").is_file() or (
        triton.runtime.cache.get_cache_manager(write_for(target).triton_hash()).get_group(
            "write_cache_kernel.json"
        )
        is None
    )
    assert compiler_fields(target)["triton.build"] != "3.0.0 and its files"
    (ours,) = cross_compile(launches, target, store)
    assert ours.was_there, "cross_compile trusts a key: the record is looked at when it is loaded"


def _child(action: str, store: Path, target: str, triton_cache: Path) -> list[list[Any]]:
    """helpers/loaded_kernels.py with a cache of Triton's that it has for itself."""
    script = HELPERS / "loaded_kernels.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(triton_cache)}
    done = subprocess.run(
        [sys.executable, str(script), action, str(store), target],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if action == "load" else []


@pytest.mark.parametrize("target", ["hip:gfx942", pytest.param("cuda:90", marks=pytest.mark.slow)])
def test_a_device_finds_what_was_built_elsewhere(target: str, tmp_path: Path) -> None:
    """Triton's own launcher asks its cache for the very code; without ours it would compile.

    A damaged entry is refused with its reason, and compiled instead.
    """
    tmp_path.chmod(0o755)
    store = tmp_path / "store"
    _child("build", store, target, tmp_path / "elsewhere")
    found = _child("load", store, target, tmp_path / "here")
    assert len(found) == 53
    assert all(reason is None for _, reason, _ in found)
    assert all(was_there for _, _, was_there in found), found
    for code in store.glob("entries/*/triton.json"):
        if json.loads(code.read_bytes())["name"] == "sinkhorn_kernel":
            code.chmod(0o644)
            code.write_bytes(b"{}")
    *rest, (name, reason, was_there) = _child("load", store, target, tmp_path / "fresh")
    assert all(was_there for _, _, was_there in rest)
    assert name == "sinkhorn_kernel"
    assert not was_there
    assert "triton.json" in reason


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_code_that_was_built_and_launches_have_the_same_options(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Triton's defaults are about to change is said, and so is all that a key holds; a program
    has its threads, whatever the device's warps."""
    device = SimpleNamespace(warp_size=TARGETS[target].warp_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    load_kernels()
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda kernel, **options: seen.append(options))
    rows = torch.zeros(2, 2, 16)
    for namespace in ("mtpc_triton", "mtpc_loaded"):
        op = getattr(torch.ops, namespace).write_cache
        op(torch.zeros(3, 4, 2, 16), rows, torch.zeros(2, dtype=torch.int64), None)
    built = write_for(TARGETS[target]).triton_options()
    assert built["enable_fp_fusion"] is True
    for options in seen:
        assert {name: options.get(name) for name in built} == built
    assert len(seen) == 2


@pytest.mark.parametrize("target", ["hip:gfx942", "cuda:90"])
def test_keys_know_neither_how_many_pages_nor_what_triton_is_called(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is cut to what fits the device; ROCm's wheels are other distributions."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    int32, keys = torch.int32, list[list[dict[str, str]]]()
    for pages in (1, 31, 32):
        cache = torch.zeros(pages, 16, 16)
        indices = (torch.zeros(2, 4, dtype=int32), torch.zeros(2, dtype=int32),
                   torch.zeros(3, dtype=int32))  # fmt: skip
        launches, _ = plan("choose_slots", torch.zeros(8, 4, 16), torch.zeros(8, 4), cache,
                           *indices, 8)  # fmt: skip
        keys.append([Specialisation.of(x, TARGETS[target]).fields for x in launches])
    assert keys[0] == keys[1] == keys[2]
    assert keys[0][0]["version.triton"] == triton.__version__


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EntryStore:
    """An empty one; Triton's own cache is empty, too."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    tmp_path.chmod(0o755)
    return EntryStore(tmp_path / "store")


def _options(*passes: str) -> Plan:
    return plan_of(
        spec_tokens=1,
        batch_buckets=(2,),
        max_len=64,
        prefill_chunk=8,
        sampling=False,
        enabled_passes=passes,
    )


def test_steps_are_bound_to_what_was_built(
    checkpoint: Callable[..., Path], store: EntryStore
) -> None:
    """A step whose kernels are all in the cache takes them; what is not there is noted."""
    target = TARGETS["cuda:90"]
    objects = CodeObjects(store, target)
    assert loaded_bindings(objects) == loaded_bindings(None) == ()
    loaded = load(checkpoint("mimo"), "bfloat16", True)
    options = _options("fuse-cache-write")  # As the GPU's backends do, and eager does not.
    compiler = StepCompiler(loaded, options, CrossBackend())
    launches = step_launches(compiler.rewritten(StepKey.decode(2, 1)))
    attend = next(x for x in launches if x.name == "paged_attention_kernel")
    parts = [attend.arguments[name] for name in ("acc_ptr", "stats_ptr")]
    estimate = peak_bytes(live_memory(compiler.rewritten(StepKey.decode(2, 1))))
    assert estimate > sum(part.nbytes for part in parts) > 0, "scratch memory is counted"
    cross_compile([x for x in launches if x.name != "rotate_and_write_kernel"], target, store)

    def bind(configure: Configure = by_default) -> tuple[set[str], list[str]]:
        notes: list[str] = []
        compiler = StepCompiler(loaded, options, EagerBackend())
        graph = compiler.rewritten(StepKey.decode(2, 1))
        objects = CodeObjects(store, target)
        bindings = (*loaded_bindings(objects, configure), *triton_bindings(configure))
        BindKernels(bindings, notes.append).apply(graph)
        Verifier(propagate=True)(graph, "legalise-gpu")
        ours = {str(node.target) for node in graph.graph.nodes if ".default" in str(node.target)}
        return {name for name in ours if name.startswith("mtpc")}, notes

    names, notes = bind()
    others = {f"mtpc_loaded.{name}.default" for name in ("accept", "paged_attention")}
    assert names == {"mtpc_triton.rotate_and_write.default", *others}
    assert set(notes) == {
        "mtpc::rotate_and_write does not run on code built for cuda:90 (rotate_and_write_kernel "
        "was not built for cuda:90 at these sizes): triton instead"
    }
    cross_compile(launches, target, store)
    names, notes = bind()
    assert names == {"mtpc_loaded.rotate_and_write.default", *others}
    assert not notes
    other = loaded_bindings(CodeObjects(store, TARGETS["cuda:80"]))
    assert other == (), "nothing was built for it, and nobody is told"

    def last(call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        return [float(len(configs) - place) for place in range(len(configs))]

    tuner = Tuner(Table(store, "no device"), last)
    names, notes = bind(tuner)
    assert "mtpc_triton.paged_attention.default" in names, "its choice was not built"
    assert all("paged_attention_kernel was not built for cuda:90" in note for note in notes)
    cross_compile([launch for launch, _ in all_configured(launches, target.vendor)], target, store)
    names, notes = bind(tuner)
    assert names == {"mtpc_loaded.rotate_and_write.default", *others}
    assert not notes


def test_fused_norms_are_bound_to_what_was_built(
    checkpoint: Callable[..., Path], store: EntryStore
) -> None:
    """Operators of one result and of several; their values are as the verifier expects them."""
    target = TARGETS["hip:gfx942"]
    options = _options("fuse-cache-write", "fuse-elementwise", "fuse-draft-entry")
    loaded = load(checkpoint("mimo"), "bfloat16", True)
    key = StepKey.decode(2, 1)
    built = StepCompiler(loaded, options, CrossBackend()).rewritten(key)
    cross_compile(step_launches(built), target, store)
    graph = StepCompiler(loaded, options, EagerBackend()).rewritten(key)
    BindKernels(loaded_bindings(CodeObjects(store, target))).apply(graph)
    Verifier(propagate=True)(graph, "legalise-gpu")
    names = {str(node.target) for node in graph.graph.nodes if "mtpc_" in str(node.target)}
    norms = ("rms_norm", "add_rms_norm", "draft_entry")
    bound = {*norms, "rotate_and_write", "paged_attention", "accept"}
    assert names == {f"mtpc_loaded.{name}.default" for name in bound}
