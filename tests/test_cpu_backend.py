"""The cpu backend: compiled packages give what the eager graph gives, over the same tensors."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILY_NAMES, TINY
from test_theorem import PROMPTS, poison

from mtpc.api import SpecModel
from mtpc.backends import cpu as cpu_module
from mtpc.backends.cpu import CpuBackend
from mtpc.backends.package import open_package
from mtpc.capture.graph import get_tensor
from mtpc.compiler import StepCompiler
from mtpc.config import CompileOptions
from mtpc.errors import BackendError
from mtpc.layout import StepKey
from mtpc.models.load import load

NUM_PAGES = 89
"""A prime that is no other size of these models: found in generated code, it is the pool's."""


@pytest.fixture(scope="module")
def built(checkpoint: Callable[..., Any]) -> Callable[[str], tuple[SpecModel, CpuBackend]]:
    """built(family): compiled once for this module, K = 3, one bucket of two requests."""
    made: dict[str, tuple[SpecModel, CpuBackend]] = {}

    def get(family: str) -> tuple[SpecModel, CpuBackend]:
        if family not in made:
            options = CompileOptions(
                spec_tokens=3, batch_buckets=(2,), num_pages=NUM_PAGES, backend="cpu", **TINY
            )
            loaded, backend = load(checkpoint(family), "float64", True), CpuBackend()
            program = StepCompiler(loaded, options, backend).compile()
            made[family] = SpecModel(loaded.served(), options, program, loaded), backend
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_compiled_equals_plain_decoding(
    family: str, built: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Poisoned, padded, ragged, over page and chunk edges: the model's own tokens."""
    spec, _ = built(family)
    poison(spec)
    wanted = [oracle(family).generate(prompt, 16) for prompt in PROMPTS]
    assert spec.generate(PROMPTS, 16) == wanted


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_compiled_equals_eager_acceptance(
    family: str, built: Callable[..., Any], compiled: Callable[..., Any]
) -> None:
    """Equal accepted drafts: a compiler that changes the draft's numerics only is seen here."""
    spec, _ = built(family)
    eager = compiled(family, 3, batch_buckets=(2,))
    before = (list(spec.stats.accepted), list(eager.stats.accepted))
    spec.generate(PROMPTS[4:8], 16)
    eager.generate(PROMPTS[4:8], 16)
    gained = [
        [b - a for a, b in zip(old, model.stats.accepted, strict=True)]
        for old, model in zip(before, (spec, eager), strict=True)
    ]
    assert gained[0] == gained[1]


def test_weights_are_not_in_the_packages(built: Callable[..., Any]) -> None:
    """Packages refer to the user's tensors: changing a weight changes what they compute."""
    spec, _ = built("mimo")
    before = spec.generate(PROMPTS[5], 8)
    head = spec.loaded.target.get_output_embeddings().weight
    with torch.no_grad():
        saved = head.clone()
        head.copy_(head[torch.arange(95, -1, -1)])
        changed = spec.generate(PROMPTS[5], 8)
        head.copy_(saved)
    assert changed != before
    assert spec.generate(PROMPTS[5], 8) == before


def test_no_copy_of_the_cache(built: Callable[..., Any]) -> None:
    """Canary: functionalised cache writes are reinplaced, so no package allocates a page pool."""
    _, backend = built("mimo")
    packages = sorted(Path(backend._scratch.name).glob("*.pt2"))
    assert len(packages) == 2
    for package in packages:
        code = wrapper_source(package)
        assert "write_cache" in code
        assert f"{{{NUM_PAGES}L" not in code, f"{package.name} makes a tensor of {NUM_PAGES} pages"


def wrapper_source(package: Path) -> str:
    """The C++ that AOTInductor generated around its kernels."""
    with zipfile.ZipFile(package) as archive:
        names = [n for n in archive.namelist() if n.endswith(".wrapper.cpp")]
        return "\n".join(archive.read(name).decode() for name in names)


def test_tensors_are_all_accounted_for(built: Callable[..., Any], tmp_path: Path) -> None:
    """A tensor that Inductor copied into the code would be lost to later writes: refused."""
    spec, backend = built("mimo")
    graph = spec.program.steps[StepKey.decode(2, 3)].graph
    package = backend.package(graph, tmp_path)
    tensor_of = partial(get_tensor, graph.module)
    open_package(tmp_path, package, tensor_of)
    extra = {**package.tensors, "state.stray": package.tensors["state.token_ids"]}
    stray = replace(package, tensors=extra)
    with pytest.raises(BackendError, match=r"does not refer to \['state.stray'\]"):
        open_package(tmp_path, stray, lambda name: tensor_of(name.replace("stray", "token_ids")))
    fewer = {n: t for n, t in package.tensors.items() if n != "state.token_ids"}
    with pytest.raises(BackendError, match=r"refers to unknown \['state.token_ids'\]"):
        open_package(tmp_path, replace(package, tensors=fewer), tensor_of)


def test_tensors_of_another_layout_are_refused(built: Callable[..., Any], tmp_path: Path) -> None:
    """Generated code reads by the strides it was compiled for; it would read nonsense."""
    spec, backend = built("mimo")
    graph = spec.program.steps[StepKey.decode(2, 3)].graph
    package = backend.package(graph, tmp_path)

    def transposed(name: str) -> torch.Tensor:
        tensor = get_tensor(graph.module, name)
        return tensor.t() if name == "lm_head.weight" else tensor

    with pytest.raises(BackendError, match=r"lm_head.weight is float64\[64,96\]\(1,64\), the pack"):
        open_package(tmp_path, package, transposed)


def test_host_buffers_and_small_constants_become_inputs(built: Callable[..., Any]) -> None:
    spec, _ = built("glm4_moe")
    step = spec.program.steps[StepKey.prefill(1, 8, 3)]
    _, inputs = cpu_module._lift_inputs(step.graph)
    host = {n for n, s in step.graph.layout.items() if s.writer == "host"}
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

    monkeypatch.setitem(backends.BACKENDS, "cpu", unavailable)
    options = {**TINY, "batch_buckets": (1,), "spec_tokens": 1}
    spec = mtpc.compile(checkpoint("mimo"), backend="auto", **options)
    assert dict(spec.stats.fallbacks) == {"eager backend instead of cpu: no C++ compiler": 1}
    assert "fallbacks: eager backend" in str(spec.stats)
    for choice in ({"backend": "auto", "strict": True}, {"backend": "cpu"}):
        with pytest.raises(BackendError, match="no C"):
            mtpc.compile(checkpoint("mimo"), **choice, **options)
