"""Keys of the graph cache: every difference is a miss in its own field; equal graphs are reused."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import CpuBuilt
from helpers.families import CPU_OPTIONS
from helpers.plans import plan_of
from helpers.warm_starts import DECODE, edit_weights

import mtpc
from mtpc.config import CompileOptions
from mtpc.errors import CacheError
from mtpc.layout import StepKey
from mtpc.program.forecast import reasons
from mtpc.program.open_cache import open_cache
from mtpc.program.step_cache import ANY, StepCache
from mtpc.store.machine import modelling_field, own_modelling
from mtpc.store.sources import (
    ENTRIES,
    imports,
    kernels_field,
    own_sources,
    source_fields,
    source_files,
)
from mtpc.weights.checkpoint import Checkpoint


def fields_of(directory: Path, **changes: Any) -> dict[str, str]:
    """The key of the decode step of a checkpoint."""
    options = plan_of(**{**CPU_OPTIONS, **changes})
    cache = open_cache(Checkpoint(directory), options, print)
    assert cache is not None
    return cache.fields(StepKey.decode(2, options.spec_tokens))


def changed_fields(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


IN_THE_KEY: list[tuple[dict[str, Any], set[str]]] = [
    ({"spec_tokens": 2}, {"options.spec_tokens", "step.spec_tokens", "step.query_len"}),
    ({"page_size": 8}, {"options.page_size"}),
    ({"dtype": "float32"}, {"options.dtype"}),
    ({"sampling": True, "token_mask": False}, {"options.sampling", "options.max_logprobs"}),
    (
        {"token_mask": True, "sampling": True, "max_logprobs": 9},
        {"options.sampling", "options.max_logprobs", "options.token_mask"},
    ),
    (
        {"hidden_state_layers": (1,), "spec_tokens": 0},
        {
            "options.hidden_state_layers",
            "options.spec_tokens",
            "step.spec_tokens",
            "step.query_len",
        },
    ),
    ({"draft_vocab": 24}, {"options.draft_vocab"}),
    ({"draft": "copy"}, {"options.draft"}),
    ({"quantize": "int8"}, {"options.quantize"}),
    ({"kv_cache_dtype": "int8"}, {"options.kv_cache_dtype"}),
    ({"batch_invariant": True}, {"options.batch_invariant"}),
    ({"images": True}, {"options.images", "options.rows_in_rings"}),
    ({"tensor_parallel_size": 2}, {"options.tensor_parallel_size"}),
    ({"wiring": {"first_features": "after"}}, {"options.wiring"}),
    ({"row_budgets": (2,)}, {"options.row_budgets"}),
    ({"synthetic_acceptance_rates": (0.5, 0.2, 0.1)}, {"options.synthetic_acceptance_rates"}),
    ({"synthetic_acceptance_length": 2.0}, {"options.synthetic_acceptance_rates"}),
    ({"disabled_passes": ("hoist-shared",)}, {"options.disabled_passes"}),
    ({"enabled_passes": ("merge-projections",)}, {"options.enabled_passes"}),
]
NOT_IN_THE_KEY: list[dict[str, Any]] = [
    {"verify_passes": True},
    {"strict": True},
    {"frozen": True},
    {"backend": "auto"},
    {"cache_dir": Path("/elsewhere")},
    {"require_sha256": "0" * 64},
    {"max_logprobs": 9},  # It sizes what only sampling has.
    {"prefill_chunk": 16},  # These two are in the key of prefill steps only, but for rings.
    {"prefill_rows": 2},
    {"batch_buckets": (1, 2)},
    {"max_len": 48},  # This and the next two size what steps leave open.
    {"num_pages": 64},
    {"batch_buckets": (2, 4)},
    {"spec_tiers": (0, 3)},  # Each has a step of its own.
    {"prefix_caching": False},  # And these are the engine's.
    {"snapshot_bytes": 0},
    {"snapshot_distance": 64},
    {"kv_offload_dir": Path("/elsewhere")},
    {"kv_offload_bytes": 1},
    {"busy_prefill_chunk": 2},
    {"async_scheduling": True},
    {"build_in_background": True},
    {"draft": Path("/elsewhere")},  # Its config and headers are: models/test_eagle3.py.
]


@pytest.mark.parametrize(("change", "fields"), IN_THE_KEY, ids=min)
def test_options_in_the_key(
    change: dict[str, Any], fields: set[str], checkpoint: Callable[..., Path]
) -> None:
    directory = checkpoint("mimo")
    assert changed_fields(fields_of(directory), fields_of(directory, **change)) == fields


@pytest.mark.parametrize("change", NOT_IN_THE_KEY, ids=lambda change: next(iter(change)))
def test_options_not_in_the_key(change: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("mimo")
    assert fields_of(directory) == fields_of(directory, **change)


def test_sizes_that_a_step_fixes_are_in_its_key(checkpoint: Callable[..., Path]) -> None:
    """The number of pages follows from all three options; that of blocks from one."""
    source = Checkpoint(checkpoint("mimo"))
    cache = open_cache(source, plan_of(**CPU_OPTIONS), print)
    assert cache is not None
    names = ("options.max_len", "options.num_pages", "options.largest_bucket")
    said = {
        fixed: [cache.fields(DECODE, fixed=fixed)[name] for name in names]
        for fixed in ("", "M", "MN", "S")
    }
    assert said[""] == [ANY, ANY, ANY]
    assert said["M"] == ["64", ANY, ANY]
    assert said["MN"] == ["64", "89", "2"]
    assert said["S"] == [ANY, ANY, "2"]


def test_a_prefill_chunk_sizes_rings(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Decode steps of a model with sliding windows are bound to rings of that size."""
    directory, field = tmp_path / "copy", {"options.rows_in_rings"}
    shutil.copytree(checkpoint("mimo_v2", "random"), directory)
    assert changed_fields(fields_of(directory), fields_of(directory, prefill_chunk=16)) == field
    _config(use_sliding_window=False)(directory)
    assert not changed_fields(fields_of(directory), fields_of(directory, prefill_chunk=16))


def test_every_option_is_known_to_be_in_the_key_or_not() -> None:
    known = {next(iter(change)) for change in (*(c for c, _ in IN_THE_KEY), *NOT_IN_THE_KEY)}
    without_a_cache = {"use_cache"}
    assert known | without_a_cache == {field.name for field in dataclasses.fields(CompileOptions)}


def _config(**entries: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda directory: edit_weights(directory, change)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (_config(rms_norm_eps=1e-5), {"model.config.rms_norm_eps"}),
        (_config(architectures=["Qwen2ForCausalLM"]), {"model.config.architectures"}),
        (_config(unheard_of=1), {"model.config.unheard_of"}),
        (
            _tensors(lambda t: t.update({"extra": torch.ones(2)})),
            {"model.weights", "model.weights.extra"},
        ),
        (
            _tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()})),
            {"model.weights", "model.weights.model.norm.weight"},
        ),
        (_config(_name_or_path="elsewhere", transformers_version="5.17"), set()),
        (_tensors(lambda t: t["model.norm.weight"].mul_(2)), set()),
        (
            _tensors(lambda t: t["lm_head.weight"].copy_(t["model.embed_tokens.weight"])),
            set(),
        ),
        (lambda d: (d / "generation_config.json").write_text('{"eos_token_id": 3}'), set()),
        (lambda d: (d / "tokenizer.json").write_text("{}"), set()),
        (lambda d: os.utime(d / "model.safetensors", (1, 1)), set()),
    ],
    ids=["eps", "architecture", "unknown", "extra-tensor", "dtype", "provenance", "values",
         "copies", "eos", "tokenizer", "mtime"],
)  # fmt: skip
def test_models_in_the_key(
    change: Callable[[Path], Any],
    fields: set[str],
    checkpoint: Callable[..., Path],
    copied: Callable[..., Path],
) -> None:
    """What shapes the graph is in the key; values, names of places and tokenizers are not."""
    directory = copied("mimo")
    change(directory)
    assert changed_fields(fields_of(checkpoint("mimo")), fields_of(directory)) == fields


@pytest.mark.parametrize(
    ("target", "value", "field"),
    [
        ("mtpc.__version__", "9.9", "version.mtpc"),
        ("torch.version.git_version", "9" * 40, "version.torch"),
        ("mtpc.store.machine.metadata.version", lambda name: "9.9", "version.transformers"),
        ("torch.get_default_dtype", lambda: torch.float64, "torch.default_dtype"),
    ],
)
def test_the_machine_in_the_key(
    target: str,
    value: Any,
    field: str,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = fields_of(checkpoint("mimo"))
    monkeypatch.setattr(target, value)
    assert changed_fields(before, fields_of(checkpoint("mimo"))) == {field}


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("torch.get_num_threads", lambda: 7),
        ("platform.machine", lambda: "vax"),
        ("mtpc.store.machine.compiler_version", lambda: "g++ 99"),
        ("mtpc.store.machine._cpu", lambda: ("Zen 9", frozenset({"avx2"}))),
    ],
)
def test_what_kernels_and_threads_there_are_is_not_in_the_key(
    target: str, value: Any, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is no code: any machine of any thread count runs it on kernels of its own."""
    before = fields_of(checkpoint("mimo"))
    monkeypatch.setattr(target, value)
    assert fields_of(checkpoint("mimo")) == before


def copied_package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(mtpc.__file__).parent, tmp_path / "mtpc"))


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_every_part_of_the_source_is_in_the_key(step: int, tmp_path: Path) -> None:
    """Of every file that has a say in a graph, one changed byte is a miss, in its own field.

    The fast part changes every tenth file of a part.
    """
    package = copied_package(tmp_path)
    before = source_fields(package)
    assert before == source_fields()
    for part, paths in source_files(package).items():
        for path in paths[::step]:
            with path.open("a") as handle:
                handle.write("\n")
            after = source_fields(package)
            assert changed_fields(before, after) == {f"source.{part}"}, path
            before = after


@pytest.mark.parametrize(
    "file",
    [
        "config.py",
        "sampling_params.py",
        "passes/hoist_shared.py",
        "backends/cpu/passes/pack_weights.py",
        "backends/cpu/ops/packed.py",
        "models/families/mimo.py",
        "ops/attention.py",
        "backends/cpu/backend.py",
        "backends/cpu_kernels/simd.h",
    ],
)
def test_what_decides_a_package_is_in_the_key(file: str, tmp_path: Path) -> None:
    package = copied_package(tmp_path)
    before = source_fields(package)
    assert (package / file).is_file()
    with (package / file).open("a") as handle:
        handle.write("\n")
    assert source_fields(package) != before


@pytest.mark.parametrize("file", ["engine/engine.py", "server/app.py", "backends/cuda.py"])
def test_what_runs_packages_is_not_in_the_key(file: str, tmp_path: Path) -> None:
    package = copied_package(tmp_path)
    before = source_fields(package)
    assert (package / file).is_file()
    with (package / file).open("a") as handle:
        handle.write("\n")
    assert source_fields(package) == before


def test_sources_that_are_not_found_are_refused(tmp_path: Path) -> None:
    """A digest of nothing would be the same for ever."""
    with pytest.raises(CacheError, match="has no module"):
        source_fields(tmp_path)
    package = copied_package(tmp_path)
    for path in (package / "backends" / "cpu_kernels").iterdir():
        if path.suffix in (".cpp", ".h"):
            path.unlink()
    with pytest.raises(CacheError, match="no files of the part 'kernels'"):
        source_fields(package)


def test_what_a_process_keeps_of_the_sources_is_what_they_are() -> None:
    assert own_sources() == source_fields()
    assert kernels_field().items() <= source_fields().items()
    assert own_modelling() == modelling_field()


def test_modelling_code_that_is_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpc.store import machine

    monkeypatch.setattr(machine, "_MODELLING", ("models/*/modelling_*.py",))
    with pytest.raises(CacheError, match=r"transformers has no models"):
        machine.modelling_field()


@pytest.mark.parametrize(
    "path", sorted(Path(mtpc.__file__).parent.rglob("*.py")), ids=lambda path: path.stem
)
def test_imports_are_those_that_python_sees(path: Path) -> None:
    """Sources are found by the text of import statements; here it is compared with the syntax."""
    source = path.read_text()
    tree = ast.parse(source)
    expected = set()
    for_types = {
        id(node)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        at_top = node in tree.body
        if isinstance(node, ast.Import):
            expected |= {(alias.name, at_top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "sources are found by whole names"
            expected.add((node.module or "", at_top))
            expected |= {(f"{node.module}.{alias.name}", at_top) for alias in node.names}
    missing = {found for found in expected if found[0].startswith("mtpc")} - set(imports(source))
    assert not missing


def test_what_the_entry_loads_is_in_the_key() -> None:
    """Of a fresh process that imports the entry, every module of mtpc."""
    ours = "(m.__file__ for n, m in sys.modules.items() if n.startswith('mtpc.'))"
    code = f"import {', '.join(ENTRIES)}, sys; print(*{ours})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    package = Path(mtpc.__file__).parent
    loaded = {Path(file) for file in done.stdout.split()} - {package / "__init__.py"}
    known = {path for paths in source_files().values() for path in paths}
    assert len(loaded) > 50
    assert loaded <= known


def test_every_field_is_said_where_it_differs(
    cpu_built: Callable[..., CpuBuilt], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A change of any one field is a miss, and the reason names that field with both values."""
    entry = cpu_built("mimo").compiler.obtain(DECODE).entry
    assert entry is not None
    shutil.copytree(entry.directory, tmp_path / "entries" / entry.digest)
    cache = open_cache(
        Checkpoint(checkpoint("mimo")), plan_of(**CPU_OPTIONS, cache_dir=tmp_path), print
    )
    assert cache is not None
    assert cache.find(DECODE) is not None
    for name in cache.program:
        if name == "kind":
            continue
        program = {**cache.program, name: "something else"}
        other = StepCache(cache.store, program, cache.plan)
        assert other.find(DECODE) is None, name
        (difference,) = reasons(other, DECODE)
        assert (difference.field, difference.wanted) == (name, "something else")
        assert difference.cached == cache.program[name]
