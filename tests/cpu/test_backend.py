"""The cpu backend: compiled packages give what the eager graph gives, over the same tensors, and
restored from the graph cache what they gave when they were compiled."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import CpuBuilt
from helpers.families import FAMILY_NAMES, NEAR_FAMILIES, TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS, poison
from helpers.warm_starts import BATCH

import mtpc
from mtpc.backends.package import TAPE, Package, TapeArtifact
from mtpc.errors import BackendError, OptionError
from mtpc.layout import StepKey

Tensors = Callable[[str], torch.Tensor]
Opened = tuple[bytes, Package, Tensors, dict[str, int]]
DECODE = StepKey.decode(2, 3)
IN_FLOAT64 = [
    FAMILY_NAMES[0],
    *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILY_NAMES[1:], *NEAR_FAMILIES)),
]
"""Families that this file compiles; test_batch_invariance.py compiles four in bfloat16."""


@pytest.mark.parametrize("family", IN_FLOAT64)
def test_compiled_equals_plain_decoding(
    family: str, cpu_built: Callable[..., CpuBuilt], oracle: Callable[..., Any]
) -> None:
    """Poisoned, padded, ragged, over page and chunk edges: the model's own tokens."""
    spec = cpu_built(family).spec
    poison(spec)
    wanted = [oracle(family).generate(prompt, 16) for prompt in PROMPTS]
    assert spec.generate(PROMPTS, 16) == wanted


@pytest.mark.parametrize("family", IN_FLOAT64)
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


@pytest.mark.parametrize("family", IN_FLOAT64)
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


@pytest.mark.parametrize("family", IN_FLOAT64)
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
    """Canary: caches are written in place, so no tape has memory of the size of a page pool."""
    built = cpu_built(family)
    for key in built.spec.program.steps:
        step = built.compiler.obtain(key)
        entries = json.loads(step.read(TAPE))["entries"]
        layout = step.layout
        pools = [layout.allocate(name).nbytes for name in layout if layout[name].is_paged]
        made = [entry[-1] for entry in entries if entry[0] in ("planned", "returned")]
        assert len(made) > 1
        assert max(made) < min(pools)


@pytest.mark.parametrize("family", IN_FLOAT64)
def test_no_reference_runs(family: str, cpu_built: Callable[..., CpuBuilt]) -> None:
    """Each operator of mtpc has a kernel here. A reference is Python, which takes its lock."""
    built = cpu_built(family)
    for key in built.spec.program.steps:
        entries = json.loads(built.compiler.obtain(key).read(TAPE))["entries"]
        calls = {tuple(entry[:2]) for entry in entries if entry[0] in ("kernel", "aten")}
        assert {name for kind, name in calls if kind == "aten" and name.startswith("mtpc")} == set()
        attends = {"paged_attention", "latent_attention", "slot_attention"}
        assert any(kind == "kernel" and name in attends for kind, name in calls)


@pytest.fixture
def decode_step(cpu_built: Callable[..., CpuBuilt]) -> Opened:
    """A compiled decode step: where it is, how it is called, its tensors and sizes."""
    built = cpu_built("mimo")
    step = built.compiler.obtain(DECODE)
    buffers, weights = built.spec.program.steps[DECODE].buffers, built.compiler.weights

    def tensor_of(name: str) -> torch.Tensor:
        return buffers[name] if name in buffers else weights[name]

    return step.read(TAPE), step.record.package, tensor_of, step.sizes


def test_tensors_are_all_accounted_for(decode_step: Opened) -> None:
    """A record that lacks a tensor of its tape is refused."""
    tape, package, tensor_of, sizes = decode_step
    TapeArtifact(package, tape).open(tensor_of, sizes)
    fewer = {n: t for n, t in package.tensors.items() if n != "state.token_ids"}
    with pytest.raises(BackendError, match=r"reads state.token_ids, which its record does not"):
        TapeArtifact(replace(package, tensors=fewer), tape).open(tensor_of, sizes)


def test_tensors_of_another_layout_are_refused(decode_step: Opened) -> None:
    """A tape has the strides that it was made for; it would read nonsense."""
    tape, package, tensor_of, sizes = decode_step

    def transposed(name: str) -> torch.Tensor:
        return tensor_of(name).t() if name == "lm_head.weight" else tensor_of(name)

    with pytest.raises(BackendError, match=r"lm_head.weight is float64\[64,96\]\(1,64\); the pack"):
        TapeArtifact(package, tape).open(transposed, sizes)


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


def test_a_pass_that_counts_rows_is_refused(checkpoint: Callable[..., Path]) -> None:
    """A row's bits would depend on how many there are: drafts could change the text."""
    options = {"spec_tokens": 1, "batch_buckets": (1,), "enabled_passes": ("fuse-skinny-linears",)}
    with pytest.raises(OptionError, match="fuse-skinny-linears' is for GPUs"):
        mtpc.compile(checkpoint("mimo", "random"), backend="cpu", **options, **TINY)
