"""Session fixtures: checkpoints, oracles and compiled models are made once and shared."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Where an assert of a helper fails, pytest shows what it compared, as in a test.
pytest.register_assert_rewrite("helpers")
# For processes that tests start; see `_threads`.
os.environ["OMP_NUM_THREADS"] = "1"
# No test asks the hub; weights/test_download.py has one of its own.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from helpers import tiny, trained
from helpers.compiled import CpuBuilt, give_kernels
from helpers.families import CPU_OPTIONS, FEWER_BUCKETS, TINY
from helpers.oracles import Oracle
from helpers.places import TESTS
from helpers.plans import plan_of
from helpers.sampling_oracle import SamplingOracle
from helpers.word_model import compile_words, word_checkpoint
from torch import fx

import mtpc
from mtpc.api import SpecModel
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.config import CompileOptions
from mtpc.layout import graph_keys
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.program.open_cache import open_cache
from mtpc.program.program import bind_program
from mtpc.weights.checkpoint import Checkpoint

PARTS = (
    ("test_theorem.py", "models/test_drafts.py", *(f"models/test_{n}" for n in ("deep", "recur"))),
    ("engine/", "server/", "sampling/", "cli/", "cache/", "host/", "step/"),
    ("cpu/", "ops/", "fuzz/", "docs/", "test_"),
    ("models/", "ranks/", "gpu/", "integrations/", "program/", "tuning/"),
)
"""How names of files begin, in the order of the tests: those that share programs, then many small
ones, among which the first half of the tests ends; other rooms, and small ones at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cases N`."""
    said = "of each parametrised test, run N cases at most: the first, the last, some between"
    parser.addoption("--cases", type=int, metavar="N", help=said)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests into the order of `PARTS`, and choose from their cases.

    Of two processes each begins with half of the tests, and compiles what they share once. The one
    that ends first takes tests from the end of the other's, which share nothing.
    """

    def place(item: pytest.Item) -> tuple[list[bool], str]:
        file = item.path.relative_to(TESTS).as_posix()
        return [not file.startswith(begins) for begins in PARTS], file

    items.sort(key=place)
    most = config.getoption("cases")
    if most is not None:
        chosen = spread(items, most)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def spread(items: list[pytest.Item], most: int) -> set[pytest.Item]:
    """`most` cases of each test, or all that it has, with even gaps from the first to the last."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    gaps = max(most - 1, 1)
    return {
        each[place * (len(each) - 1) // gaps] for each in cases.values() for place in range(most)
    }


# Tracing makes many objects, few of them garbage, and nobody reads where each node was made.
gc.set_threshold(100_000, 20, 50)
fx.config.do_not_emit_stack_traces = True


def settle() -> None:
    """Take what is there out of the garbage collector's rounds: it lives to the end."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Imports are done."""
    settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file, what is left are models that later files share."""
    yield
    if nextitem is None or nextitem.path != item.path:
        settle()


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """Tiny graphs run faster on one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """checkpoint(family, kind): kind is "random", "trained", "plain" (no MTP) or "full"."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, kind: str = "trained") -> Path:
        if (family, kind) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{kind}")
            if kind == "trained":
                trained.make_trained_checkpoint(family, directory)
            elif kind == "full":
                trained.make_full_acceptance_checkpoint(directory)
            else:
                tiny.make_checkpoint(family, directory, mtp=kind == "random")
            made[family, kind] = directory
        return made[family, kind]

    return get


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[..., Path]) -> Callable[[str, str], Oracle]:
    """oracle(family, kind): plain float64 decoding of that checkpoint."""
    made: dict[tuple[str, str], Oracle] = {}

    def get(family: str, kind: str = "trained") -> Oracle:
        if (family, kind) not in made:
            made[family, kind] = Oracle(family, checkpoint(family, kind))
        return made[family, kind]

    return get


@pytest.fixture(scope="session")
def compiled(checkpoint: Callable[..., Path]) -> Callable[..., mtpc.SpecModel]:
    """compiled(family, K, kind, **options): a SpecModel, compiled once for the same options."""
    made: dict[Any, mtpc.SpecModel] = {}

    def get(family: str, spec_tokens: int, kind: str = "trained", **options: Any) -> mtpc.SpecModel:
        options = {
            "backend": "eager",
            "dtype": "float64",
            **TINY,
            **FEWER_BUCKETS.get(family, {}),
            **options,
        }
        directory = checkpoint(family, kind)
        options = {**tiny.drafter(directory), **options, "spec_tokens": spec_tokens}
        key = (directory, *CompileOptions.parse(options).settled().items())
        if key not in made:
            made[key] = mtpc.compile(directory, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def cpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph cache of this session; CPU_OPTIONS of every family is in it once asked for."""
    root = tmp_path_factory.mktemp("graph-cache")
    root.chmod(0o755)
    give_kernels(root)
    return root


@pytest.fixture(scope="session")
def cpu_built(checkpoint: Callable[..., Path], cpu_cache: Path) -> Callable[[str], CpuBuilt]:
    """cpu_built(family): CPU_OPTIONS, compiled into `cpu_cache` once."""
    made: dict[str, CpuBuilt] = {}

    def get(family: str) -> CpuBuilt:
        if family not in made:
            source = Checkpoint(checkpoint(family))
            options = plan_of(**CPU_OPTIONS, cache_dir=cpu_cache)
            cache, graphs = open_cache(source, options, print), graph_keys(options, "fused")
            backend = CpuBackend(print, cache.store)
            headers, loaded = (
                load(source, options.dtype, True, (), only) for only in (True, False)
            )
            StepCompiler(headers, options, backend, cache=cache).obtain_all(graphs)
            compiler = StepCompiler(loaded, options, backend, cache=cache)
            steps = compiler.obtain_all(graphs)
            program = bind_program(compiler.built(steps))
            spec = SpecModel(loaded.served(), compiler.plan, program, loaded)
            made[family] = CpuBuilt(spec, backend, compiler)
        return made[family]

    return get


@pytest.fixture(scope="session")
def sampling_oracle(oracle: Callable[..., Oracle]) -> Callable[[str], SamplingOracle]:
    """sampling_oracle(family): plain sampling of its trained checkpoint."""
    made: dict[str, SamplingOracle] = {}

    def get(family: str) -> SamplingOracle:
        return made.setdefault(family, SamplingOracle(oracle(family)))

    return get


@pytest.fixture
def warm(
    checkpoint: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt]
) -> Callable[..., mtpc.SpecModel]:
    """warm(family, directory): restored from what `cpu_built` left; building is an error."""

    def get(family: str, directory: Path | None = None, **changes: Any) -> mtpc.SpecModel:
        cpu_built(family)
        options = {**CPU_OPTIONS, "cache_dir": cpu_cache, "frozen": True, **changes}
        return mtpc.compile(directory or checkpoint(family), **options)

    return get


@pytest.fixture(scope="session")
def word_spec(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> mtpc.SpecModel:
    """A tiny model with tokenizer, chat template and sampling."""
    return compile_words(word_checkpoint(checkpoint("mimo"), tmp_path_factory.mktemp("words")))
