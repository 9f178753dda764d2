"""The cpu backend: compiled packages give what the eager graph gives, over the same tensors, and
restored from the graph cache what they gave when they were compiled."""

from __future__ import annotations

import re
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import CpuBuilt
from helpers.families import EACH_FAMILY, NUM_PAGES, TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS, poison
from helpers.warm_starts import BATCH

from mtpc.backends import cpu as cpu_module
from mtpc.backends.cpu import CpuBackend
from mtpc.backends.package import Package, open_package
from mtpc.config import CompileOptions
from mtpc.errors import BackendError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

Tensors = Callable[[str], torch.Tensor]
DECODE = StepKey.decode(2, 3)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_compiled_equals_plain_decoding(
    family: str, cpu_built: Callable[..., CpuBuilt], oracle: Callable[..., Any]
) -> None:
    """Poisoned, padded, ragged, over page and chunk edges: the model's own tokens."""
    spec = cpu_built(family).spec
    poison(spec)
    wanted = [oracle(family).generate(prompt, 16) for prompt in PROMPTS]
    assert spec.generate(PROMPTS, 16) == wanted


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_compiled_equals_eager_acceptance(
    family: str, cpu_built: Callable[..., CpuBuilt], compiled: Callable[..., Any]
) -> None:
    """Equal accepted drafts: a compiler that changes the draft's numerics only is seen here."""
    spec = cpu_built(family).spec
    eager = compiled(family, 3, batch_buckets=(2,))
    before = (list(spec.stats.accepted), list(eager.stats.accepted))
    spec.generate(PROMPTS[4:8], 16)
    eager.generate(PROMPTS[4:8], 16)
    gained = [
        [b - a for a, b in zip(old, model.stats.accepted, strict=True)]
        for old, model in zip(before, (spec, eager), strict=True)
    ]
    assert gained[0] == gained[1]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_warm_equals_cold(
    family: str, warm: Callable[..., Any], cpu_built: Callable[..., CpuBuilt]
) -> None:
    """Restored programs give the tokens, and accept the drafts, of the one compiled here."""
    cold, restored = cpu_built(family).spec, warm(family)
    assert restored.loaded is None
    poison(restored)
    accepted = list(cold.stats.accepted)
    assert restored.generate(BATCH, 16) == cold.generate(BATCH, 16)
    gained = [b - a for a, b in zip(accepted, cold.stats.accepted, strict=True)]
    assert restored.stats.accepted == gained
    assert restored.stats.fallbacks == cold.stats.fallbacks  # Recurrent state is not reused.
    assert restored.options.max_len == cold.options.max_len
    assert restored.served == cold.served


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_warm_equals_plain_decoding(
    family: str, warm: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    restored = warm(family)
    assert restored.generate(BATCH, 12) == [oracle(family).generate(p, 12) for p in BATCH]


def test_weights_are_not_in_the_packages(cpu_built: Callable[..., CpuBuilt]) -> None:
    """Packages refer to the user's tensors: changing a weight changes what they compute."""
    spec = cpu_built("mimo").spec
    before = spec.generate(PROMPTS[5], 8)
    head = spec.loaded.target.get_output_embeddings().weight
    with torch.no_grad():
        saved = head.clone()
        head.copy_(head[torch.arange(95, -1, -1)])
        changed = spec.generate(PROMPTS[5], 8)
        head.copy_(saved)
    assert changed != before
    assert spec.generate(PROMPTS[5], 8) == before


@pytest.mark.parametrize("family", ["mimo", pytest.param("deepseek_v32", marks=pytest.mark.slow)])
def test_no_copy_of_the_cache(family: str, cpu_built: Callable[..., CpuBuilt]) -> None:
    """Canary: functionalised cache writes are reinplaced, so no package allocates a page pool."""
    backend = cpu_built(family).backend
    packages = sorted(Path(backend._scratch.name).glob("*.pt2"))
    assert len(packages) == 2
    for package in packages:
        check_no_pool_is_made(package, "write_cache")


def test_no_copy_of_the_cache_by_the_fused_write(checkpoint: Callable[..., Path]) -> None:
    """The same of the operator that writes two caches, and has a result, too (bfloat16)."""
    backend = CpuBackend()
    options = CompileOptions(spec_tokens=1, batch_buckets=(1,), max_len=64, num_pages=NUM_PAGES,
                             page_size=TINY["page_size"])  # fmt: skip
    compiler = StepCompiler(load(checkpoint("mimo"), "bfloat16", True), options, backend)
    compiler.capture(StepKey.decode(1, 1))
    (package,) = Path(backend._scratch.name).glob("*.pt2")
    check_no_pool_is_made(package, "rotate_and_write")


def check_no_pool_is_made(package: Path, write: str) -> None:
    """A package that calls this operator allocates nothing of the size of a page pool."""
    code = wrapper_source(package)
    assert f"{write}(" in code
    assert f"{{{NUM_PAGES}L" not in code, f"{package.name} makes a tensor of {NUM_PAGES} pages"
    # The pool as pages of one token may be a view, and must not be an allocation.
    sizes = dict(re.findall(r"(int_array_\d+)\[\] = \{(\d+)L[,}]", code))
    made = {sizes.get(name) for name in re.findall(r"empty_strided\(\d+, (\w+),", code)}
    assert len(made) > 1
    assert str(NUM_PAGES * TINY["page_size"]) not in made


def wrapper_source(package: Path) -> str:
    """The C++ that AOTInductor generated around its kernels."""
    with zipfile.ZipFile(package) as archive:
        names = [n for n in archive.namelist() if n.endswith(".wrapper.cpp")]
        return "\n".join(archive.read(name).decode() for name in names)


@pytest.fixture
def decode_step(cpu_built: Callable[..., CpuBuilt]) -> tuple[Path, Package, Tensors]:
    """A compiled decode step: where it is, how it is called, and the tensors it is called on."""
    built = cpu_built("mimo")
    step = built.compiler.obtain(DECODE)
    buffers, weights = built.spec.program.steps[DECODE].buffers, built.compiler.compiler.weights

    def tensor_of(name: str) -> torch.Tensor:
        return buffers[name] if name in buffers else weights[name]

    return step.directory, step.record.package, tensor_of


def test_tensors_are_all_accounted_for(decode_step: tuple[Path, Package, Tensors]) -> None:
    """A tensor that Inductor copied into the code would be lost to later writes: refused."""
    directory, package, tensor_of = decode_step
    open_package(directory, package, tensor_of)
    extra = {**package.tensors, "state.stray": package.tensors["state.token_ids"]}
    with pytest.raises(BackendError, match=r"does not refer to \['state.stray'\]"):
        open_package(
            directory,
            replace(package, tensors=extra),
            lambda name: tensor_of(name.replace("stray", "token_ids")),
        )
    fewer = {n: t for n, t in package.tensors.items() if n != "state.token_ids"}
    with pytest.raises(BackendError, match=r"refers to unknown \['state.token_ids'\]"):
        open_package(directory, replace(package, tensors=fewer), tensor_of)


def test_tensors_of_another_layout_are_refused(decode_step: tuple[Path, Package, Tensors]) -> None:
    """Generated code reads by the strides it was compiled for; it would read nonsense."""
    directory, package, tensor_of = decode_step

    def transposed(name: str) -> torch.Tensor:
        return tensor_of(name).t() if name == "lm_head.weight" else tensor_of(name)

    with pytest.raises(BackendError, match=r"lm_head.weight is float64\[64,96\]\(1,64\); the pack"):
        open_package(directory, package, transposed)


def test_host_buffers_and_small_constants_become_inputs(
    cpu_built: Callable[..., CpuBuilt],
) -> None:
    compiler = cpu_built("glm4_moe").compiler.compiler
    graph = compiler.rewrite(compiler.trace(StepKey.prefill(1, 8, 3)))
    _, inputs = cpu_module._lift_inputs(graph)
    host = {n for n, s in graph.layout.items() if s.is_host_only}
    assert host <= set(inputs)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in inputs
    for name, tensor in inputs.items():
        assert name in host or tensor.numel() <= 8


def test_auto_falls_back_visibly(
    checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler: eager, counted with its reason; an error under strict or by name."""
    import mtpc
    from mtpc import backends

    def unavailable(report: Any, store: Any) -> Any:
        raise BackendError("no C++ compiler")

    monkeypatch.setitem(
        backends.BACKENDS, "cpu", replace(backends.BACKENDS["cpu"], make=unavailable)
    )
    options = {**TINY, "batch_buckets": (1,), "spec_tokens": 1}
    spec = mtpc.compile(checkpoint("mimo"), backend="auto", **options)
    assert dict(spec.stats.fallbacks) == {"eager backend instead of cpu: no C++ compiler": 1}
    assert "fallbacks: eager backend" in str(spec.stats)
    for choice in ({"backend": "auto", "strict": True}, {"backend": "cpu"}):
        with pytest.raises(BackendError, match="no C"):
            mtpc.compile(checkpoint("mimo"), **choice, **options)


def test_a_replay_lets_go_of_the_interpreters_lock(cpu_built: Callable[..., CpuBuilt]) -> None:
    """Another thread runs in the midst of a replay; not when it comes is tested, but that it can.

    Nobody is made to give the lock away here: the other thread gets it where the first one lets go
    of it, and between `inside = True` and `inside = False` only the replay can do that.
    """
    replay = cpu_built("mimo").spec.program.steps[DECODE].replay
    inside, is_over, seen = False, False, 0

    def watch() -> None:
        nonlocal seen
        while not is_over:
            seen += inside
            time.sleep(1e-5)

    before, other = sys.getswitchinterval(), threading.Thread(target=watch)
    sys.setswitchinterval(1e6)
    try:
        other.start()
        for _ in range(20_000):
            inside = True
            replay()
            inside = False
            if seen:
                break
    finally:
        is_over = True
        sys.setswitchinterval(before)
        other.join()
    assert seen
