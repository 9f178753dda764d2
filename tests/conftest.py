"""Session fixtures: checkpoints, oracles and compiled models are made once and shared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from oracles import Oracle
from store_writer import DIGEST, filled
from word_model import word_checkpoint

import mtpc
from mtpc.api import SpecModel
from mtpc.backends.cpu import CpuBackend
from mtpc.backends.cpu_kernels import build_kernels
from mtpc.config import CompileOptions
from mtpc.models.hf import model_class
from mtpc.models.load import load
from mtpc.program.caching_compiler import CachingCompiler
from mtpc.program.compiler import StepCompiler
from mtpc.program.opening import open_cache
from mtpc.program.program import CapturedStep
from mtpc.store.entries import Entry, EntryStore
from mtpc.weights.checkpoint import Checkpoint

# Where an assert of theirs fails, what it compared is shown, as in a test.
pytest.register_assert_rewrite("side_by_side", "turns", "watched_host")

FAMILY_NAMES = (
    "mimo",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_next",
    "mimo_v2",
    "step3p7",
    "deepseek_v4",
    "deepseek_v32",
)
"""Qwen3.5 differs from qwen3_next by its projections and its loading: tests/test_recurrent.py."""
CPU_FAMILY_NAMES = FAMILY_NAMES[:4]
"""What the default run compiles for the cpu: paged, with experts, latent, recurrent."""
EACH_FAMILY = [
    *CPU_FAMILY_NAMES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_NAMES[4:]),
]
"""For what is not the theorem: the default run takes those, the slow run all."""
EACH_FAMILY_OF_FEW = [
    *CPU_FAMILY_NAMES[:2],
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_NAMES[2:]),
]
"""For one pass, or one way of running, each family of which takes ten seconds and more."""
TINY = {"max_len": 64, "page_size": 4, "prefill_chunk": 8}
"""Small pages and chunks, so that short sequences cross their edges."""
FEWER_BUCKETS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"batch_buckets": (1, 4)},
    "deepseek_v32": {"batch_buckets": (1, 4)},
}
"""Of families whose graphs are large: a bucket costs five seconds."""
NUM_PAGES = 89
"""A prime that is no other size of these models: found in generated code, it is the pool's."""
CPU_OPTIONS: dict[str, Any] = {
    **TINY,
    **dict(spec_tokens=3, batch_buckets=(2,), num_pages=NUM_PAGES, backend="cpu", dtype="float64"),
}
"""What is compiled for the cpu, once for the whole session."""


@contextmanager
def run_on(threads: int) -> Iterator[None]:
    """That many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
                tiny.make_trained_checkpoint(family, directory)
            elif kind == "full":
                tiny.make_full_acceptance_checkpoint(directory)
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
    """compiled(family, K, kind, **options): a SpecModel, compiled once per distinct call."""
    made: dict[Any, mtpc.SpecModel] = {}

    def get(family: str, spec_tokens: int, kind: str = "trained", **options: Any) -> mtpc.SpecModel:
        options = {
            "backend": "eager",
            "dtype": "float64",
            **TINY,
            **FEWER_BUCKETS.get(family, {}),
            **options,
        }
        key = (family, spec_tokens, kind, *sorted(options.items()))
        if key not in made:
            made[key] = mtpc.compile(checkpoint(family, kind), spec_tokens=spec_tokens, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def hf_generator(checkpoint: Callable[..., Path]) -> Callable[[str, int], Any]:
    """hf_generator(family, K): a `mtpc.transformers.Generator` of a float64 model object.

    With transformers' `sdpa`: its eager attention takes softmax in float32, where the mask of
    float64 overflows, and a left-padded batch becomes NaN. Where it has no other, in float32.
    """
    eager_alone = ("mimo_v2", "deepseek_v4")
    models: dict[str, Any] = {}
    made: dict[Any, Any] = {}

    def get(family: str, spec_tokens: int) -> Any:
        if family not in models:
            models[family] = model_class(tiny.family_of(family)).from_pretrained(
                checkpoint(family),
                dtype=torch.float32 if family in eager_alone else torch.float64,
                attn_implementation="eager" if family in eager_alone else "sdpa",
                experts_implementation="eager",
            )
        if (family, spec_tokens) not in made:
            options = {"backend": "eager", **TINY, "batch_buckets": (4,), "sampling": True}
            made[family, spec_tokens] = mtpc.transformers.Generator(
                models[family], spec_tokens=spec_tokens, **options
            )
        return made[family, spec_tokens]

    return get


@pytest.fixture(scope="session")
def word_spec(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> mtpc.SpecModel:
    """A tiny model with tokenizer, chat template and sampling, as `mtpc serve` compiles it."""
    directory = word_checkpoint(checkpoint("mimo"), tmp_path_factory.mktemp("words"))
    return mtpc.compile(
        directory,
        spec_tokens=2,
        backend="eager",
        dtype="float64",
        batch_buckets=(4,),
        num_pages=22,
        sampling=True,
        **TINY,
    )


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    """A store with one entry, of generation 1, that another user can reach from `tmp_path`."""
    tmp_path.chmod(0o755)
    made = EntryStore(tmp_path / "store")
    made.prepare()
    made.write(DIGEST, filled(1))
    return made


def give_kernels(root: Path) -> None:
    """Put the user's compiled kernels into a new cache: they take half a minute to compile."""
    kernels = build_kernels()
    assert isinstance(kernels, Entry)
    target = root / "entries" / kernels.digest
    if not target.exists():
        (root / "entries").mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copytree(kernels.directory, target)


@pytest.fixture(scope="session")
def cpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph cache of this session; CPU_OPTIONS of every family is in it once asked for."""
    root = tmp_path_factory.mktemp("graph-cache")
    root.chmod(0o755)
    give_kernels(root)
    return root


@dataclass(frozen=True)
class CpuBuilt:
    """A model compiled for the cpu in this process, with all that took part."""

    spec: SpecModel
    backend: CpuBackend
    compiler: CachingCompiler


@pytest.fixture(scope="session")
def cpu_built(checkpoint: Callable[..., Path], cpu_cache: Path) -> Callable[[str], CpuBuilt]:
    """cpu_built(family): CPU_OPTIONS, compiled into `cpu_cache` once."""
    made: dict[str, CpuBuilt] = {}

    def get(family: str) -> CpuBuilt:
        if family not in made:
            source = Checkpoint(checkpoint(family))
            options = CompileOptions(**CPU_OPTIONS, cache_dir=cpu_cache)
            loaded = load(source, options.dtype, needs_mtp=True)
            cache = open_cache(source, options, print)
            backend = CpuBackend(print, cache.store)
            compiler = CachingCompiler(StepCompiler(loaded, options, backend), backend, cache)
            spec = SpecModel(loaded.served(), compiler.compiler.options, compiler.compile(), loaded)
            made[family] = CpuBuilt(spec, backend, compiler)
        return made[family]

    return get


def in_turn(verify: CapturedStep, propose: CapturedStep) -> CapturedStep:
    """The halves of a split step as one: what a host that schedules itself replays."""

    def replay() -> None:
        verify.replay()
        propose.replay()

    return CapturedStep(verify.key, verify.layout, verify.buffers, replay, 0.0)
