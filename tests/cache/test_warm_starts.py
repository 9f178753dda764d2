"""The graph cache: warm starts, weights stay outside, and other ways to it (that warm equals cold
is in cpu/test_backend.py, which compiles each family)."""

from __future__ import annotations

import gzip
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
import transformers
from helpers.compiled import CpuBuilt, give_kernels, in_turn
from helpers.families import CPU_OPTIONS
from helpers.oracles import Oracle
from helpers.places import ROOT
from helpers.plans import plan_of
from helpers.warm_starts import BATCH, DECODE, PREFILL, edit_weights
from safetensors.torch import load_file
from torch import Tensor

import mtpc
from mtpc.errors import CheckpointError
from mtpc.layout import parts_of
from mtpc.program.build import build
from mtpc.program.compiler import StepCompiler
from mtpc.program.open_cache import open_cache
from mtpc.program.program import Program, StepBinder
from mtpc.program.step_cache import graph_file
from mtpc.program.workers import keeping_tokenizer
from mtpc.store.entries import EntryStore
from mtpc.store.tokenizers import KeptTokenizers
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.read_ahead import ReadAhead
from mtpc.weights.served_model import ServedModel
from mtpc.weights.tensor_file import Span


def test_a_warm_start_needs_no_compiler_and_traces_nothing(
    checkpoint: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt]
) -> None:
    """In a process of its own: no compiler, no Inductor, no Dynamo, no transformers, no sympy."""
    code = f"""
import sys, json, torch
torch.set_num_threads(1)
import mtpc
options = json.loads(sys.argv[3])
spec = mtpc.compile(sys.argv[1], cache_dir=sys.argv[2], frozen=True, **options)
print(json.dumps(spec.generate({BATCH!r}, 16)))
heavy = ("transformers", "torch._inductor", "torch._dynamo", "sympy", "networkx",
         "mtpc.program.compiler", "mtpc.capture.trace", "mtpc.models")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    wanted = cpu_built("mimo").spec.generate(BATCH, 16)
    arguments = [str(checkpoint("mimo")), str(cpu_cache), json.dumps(CPU_OPTIONS)]
    clean = {"PATH": "/nonexistent", "CXX": "no-compiler", "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tokens, heavy = map(json.loads, done.stdout.splitlines())
    assert tokens == wanted
    assert heavy == []


def test_graphs_are_the_same_text_every_time(
    checkpoint: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt]
) -> None:
    """Another process, with other hash seeds, traces and rewrites to the very same text."""
    step = cpu_built("mimo").compiler.obtain(DECODE)
    code = """
import sys, json
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.layout import parts_of
from mtpc.program.program import StepBinder
from mtpc.program.compiler import StepCompiler
from mtpc.layout import StepKey
from mtpc.config import CompileOptions
from mtpc.models.load import load_planned
from mtpc.plan import make_plan
plan = make_plan(CompileOptions(**json.loads(sys.argv[2])))
compiler = StepCompiler(load_planned(sys.argv[1], plan), plan, CpuBackend())
compiler.rewrite(compiler.trace(StepKey.prefill(2, 4, 3)))  # What came before must not matter.
print(compiler.rewrite(compiler.trace(StepKey.decode(2, 3))).text())
"""
    arguments = [str(checkpoint("mimo")), json.dumps(CPU_OPTIONS)]
    env = {**os.environ, "PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    history = step.record.history
    cached = step.read(graph_file(len(history), history[-1].name))
    assert done.stdout.rstrip("\n") == gzip.decompress(cached).decode()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_build_keeps_the_tokenizer(
    copied: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt], jobs: int
) -> None:
    """So a start from it reads texts without transformers, also a frozen one. No step is built."""
    cpu_built("mimo")
    directory, store = copied("mimo"), EntryStore(cpu_cache)
    shutil.copy(mtpc.demo() / "tokenizer.json", directory)
    served = ServedModel("a model", 64, (), directory, KeptTokenizers(store, is_frozen=True))
    with keeping_tokenizer(cpu_cache, directory, jobs):
        report = build(directory, [plan_of(**CPU_OPTIONS, cache_dir=cpu_cache)])
    assert all(step.was_there for step in report.steps)
    served.__dict__["_tokenizer"] = None  # It would import transformers.
    text = "def quicksort(array):"
    assert served.encode(text) == ServedModel("a model", 64, (), directory).encode(text)
    assert served.decode(served.encode(text)) == text


@pytest.mark.parametrize("reads_text", [False, True])
def test_who_reads_text_has_the_tokenizer_before_the_weights(
    copied: Callable[..., Path],
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    reads_text: bool,
) -> None:
    """Loading it takes twice the memory that it keeps. Who gives token ids never loads it."""
    cpu_built("mimo")
    directory, kept = copied("mimo"), KeptTokenizers(EntryStore(cpu_cache))
    shutil.copy(mtpc.demo() / "tokenizer.json", directory)
    assert ServedModel("a model", 64, (), directory, kept).has_tokenizer
    code = f"""
import sys, json, torch
torch.set_num_threads(1)
import mtpc
options, seen = json.loads(sys.argv[3]), []
def listen(progress):
    seen.extend(["tokenizers" in sys.modules] if progress.stage == "load" else [])
mtpc.compile(sys.argv[1], listen, reads_text={reads_text}, cache_dir=sys.argv[2], **options)
print(json.dumps([seen, "tokenizers" in sys.modules, "transformers" in sys.modules]))
"""
    arguments = [str(directory), str(cpu_cache), json.dumps(CPU_OPTIONS)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, in_the_end, heavy = json.loads(done.stdout)
    assert seen
    assert {*seen, in_the_end} == {reads_text}
    assert not heavy


# ------------------------------------------------------------------------------- weights


def test_a_fine_tune_needs_no_rebuild(
    warm: Callable[..., Any], copied: Callable[..., Path]
) -> None:
    """Other values under the same names: found, bound, and decoded as transformers decodes them."""
    directory = copied("mimo")
    edit_weights(
        directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0).contiguous()})
    )
    tuned = warm("mimo", directory)
    wanted = [Oracle("mimo", directory).generate(prompt, 12) for prompt in BATCH]
    assert tuned.generate(BATCH, 12) == wanted
    assert tuned.generate(BATCH, 12) != warm("mimo").generate(BATCH, 12)


def test_weights_are_not_in_the_cache(
    cpu_cache: Path, cpu_built: Callable[..., CpuBuilt], checkpoint: Callable[..., Path]
) -> None:
    """No row of any weight matrix stands in any file of the cache."""
    cpu_built("mimo")
    blob = b"".join(p.read_bytes() for p in cpu_cache.rglob("*") if p.is_file())
    for name, tensor in load_file(checkpoint("mimo") / "model.safetensors").items():
        if tensor.dim() == 2:
            row = tensor[1].double().contiguous()
            assert row.numpy().tobytes() not in blob, name
            assert tensor[1].contiguous().numpy().tobytes() not in blob, name


def test_weights_exist_once(warm: Callable[..., Any]) -> None:
    """All steps of a restored program share state; a second bucket costs no second set."""
    spec = warm("mimo")
    first, second = spec.program.steps.values()
    shared = spec.program.shared
    assert all(first.buffers[n] is second.buffers[n] is tensor for n, tensor in shared.items())


def test_files_that_the_page_cache_cannot_keep_are_read_ahead(
    checkpoint: Callable[..., Path],
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nearly all bytes come from the thread, and the text is the same."""
    built, taken = cpu_built("mimo"), list[Span]()
    take = ReadAhead.take

    def watched(ahead: ReadAhead, span: Span) -> Any:
        found = take(ahead, span)
        taken.extend([span] if found is not None else [])
        return found

    monkeypatch.setattr(ReadAhead, "take", watched)
    monkeypatch.setattr(Checkpoint, "nbytes", 1 << 60)
    directory = checkpoint("mimo")
    spec = mtpc.compile(directory, cache_dir=cpu_cache, frozen=True, **CPU_OPTIONS)
    assert spec.generate(BATCH, 16) == built.spec.generate(BATCH, 16)
    sizes = [tensor.nbytes for tensor in load_file(directory / "model.safetensors").values()]
    assert sum(span.nbytes for span in set(taken)) > 0.9 * sum(sizes)


def test_nan_weights_are_refused_warm(
    warm: Callable[..., Any], copied: Callable[..., Path]
) -> None:
    directory = copied("mimo")
    edit_weights(directory, lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"hold NaN or infinity: model\.norm\.weight"):
        warm("mimo", directory)


@pytest.mark.slow
def test_a_copied_head_is_bound_once(
    copied: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt]
) -> None:
    """Steps are the same whether an MTP layer's head repeats the target's; a start looks."""
    directory, name = copied("glm4_moe"), "model.layers.2.shared_head.head.weight"
    wanted = cpu_built("glm4_moe").spec.generate(BATCH, 8)
    options = {**CPU_OPTIONS, "cache_dir": cpu_cache}
    edit_weights(directory, lambda t: t.update({name: t["lm_head.weight"].clone()}))
    copy = mtpc.compile(directory, **options)
    assert copy.generate(BATCH, 8) == wanted
    assert copy.stats.accepted == cpu_built("glm4_moe").spec.stats.accepted
    edit_weights(directory, lambda t: t[name].copy_(t[name].flip(0)))
    own = mtpc.compile(directory, **options, frozen=True)
    assert own.generate(BATCH, 8) == wanted
    assert own.stats.accepted != copy.stats.accepted


# ----------------------------------------------------------------- other ways to the cache


def test_a_model_object_uses_the_cache(
    checkpoint: Callable[..., Path], cpu_built: Callable[..., CpuBuilt], cpu_cache: Path
) -> None:
    """An object's own tensors are bound; its key is its own, its graphs are the checkpoint's."""
    cold, directory = cpu_built("mimo").spec, checkpoint("mimo")
    model = transformers.Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float64)
    options = {**CPU_OPTIONS, "cache_dir": cpu_cache, "dtype": None, "spec_tokens": 1}
    first = mtpc.compile(model, **options)
    second = mtpc.compile(model, **options, frozen=True)
    assert first.generate(BATCH, 8) == second.generate(BATCH, 8) == cold.generate(BATCH, 8)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert second.generate(BATCH, 8) != cold.generate(BATCH, 8)


def test_a_patched_model_object_is_not_cached(checkpoint: Callable[..., Path]) -> None:
    """Hooks and replaced forwards change the graph and are in no key."""
    lines: list[str] = []
    options = plan_of(**{**CPU_OPTIONS, "dtype": None})
    model = transformers.Qwen2ForCausalLM.from_pretrained(checkpoint("mimo"))
    assert open_cache(model, options, lines.append) is not None
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    assert open_cache(model, options, lines.append) is None
    hook.remove()
    model.model.layers[0].forward = lambda *args, **kwargs: None
    assert open_cache(model, options, lines.append) is None
    assert (
        lines
        == ["the model object has hooks or replaced forwards, so its steps are not cached"] * 2
    )


@pytest.mark.slow
def test_split_steps_through_the_cache(
    cpu_built: Callable[..., CpuBuilt],
) -> None:
    """verify and propose, each an entry of its own, over one set of buffers: the whole step."""
    built = cpu_built("glm4_moe")
    steps = {}
    compiler: StepCompiler = built.compiler
    binder = StepBinder(compiler.built({}), compiler.shared)
    for key in (DECODE, PREFILL):
        own: dict[str, Tensor] = {}
        halves = (built.compiler.obtain(key, part) for part in parts_of(key, "split"))
        steps[key] = in_turn(*(binder.bind(half, own) for half in halves))
    spec = mtpc.SpecModel(built.spec.served, compiler.plan, Program(steps, compiler.shared))
    assert spec.generate(BATCH, 16) == built.spec.generate(BATCH, 16)


@pytest.mark.slow
def test_derived_weights_are_made_again(
    checkpoint: Callable[..., Path], cpu_built: Callable[..., CpuBuilt], tmp_path: Path
) -> None:
    """merge-projections makes weights of weights: on a warm start, of today's checkpoint."""
    give_kernels(tmp_path)
    tmp_path.chmod(0o755)
    options = {**CPU_OPTIONS, "cache_dir": tmp_path, "enabled_passes": ("merge-projections",)}
    cold = mtpc.compile(checkpoint("mimo"), **options)
    restored = mtpc.compile(checkpoint("mimo"), **options, frozen=True)
    assert restored.generate(BATCH, 16) == cold.generate(BATCH, 16)
    assert restored.generate(BATCH, 16) == cpu_built("mimo").spec.generate(BATCH, 16)


@pytest.mark.slow
def test_a_host_starts_warm(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """Halves out of the cache over slices of a host's own pools, in a process without compiler."""
    tmp_path.chmod(0o755)
    cache = tmp_path / "cache"
    give_kernels(cache)
    build(checkpoint("glm4_moe"), [plan_of(**CPU_OPTIONS, cache_dir=cache)], "split", 1)
    code = f"""
import sys, json, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(ROOT / "examples")!r})
import host, mtpc
options = json.loads(sys.argv[3])
model = mtpc.compile_host(sys.argv[1], cache_dir=sys.argv[2], frozen=True, **options)
served = host.Host(model)
requests = [served.add(prompt, 16) for prompt in {BATCH!r}]
while served.step():
    pass
heavy = ("transformers", "torch._inductor", "torch._dynamo", "sympy", "networkx",
         "mtpc.program.compiler", "mtpc.capture.trace", "mtpc.models")
print(json.dumps([request.output for request in requests]))
print(json.dumps([name for name in heavy if name in sys.modules]))
print(json.dumps([dict(model.fallbacks), len(served.accepted)]))
"""
    arguments = [str(checkpoint("glm4_moe")), str(cache), json.dumps(CPU_OPTIONS)]
    clean = {"PATH": "/nonexistent", "CXX": "no-compiler", "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tokens, heavy, (fallbacks, outcomes) = map(json.loads, done.stdout.splitlines())
    plain = oracle("glm4_moe")
    assert tokens == [plain.generate(prompt, 16, stop=False) for prompt in BATCH]
    assert (heavy, fallbacks) == ([], {})
    assert outcomes > 1
