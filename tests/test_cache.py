"""The graph cache: warm equals cold, weights stay outside, and every difference is a miss."""

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
from conftest import CPU_OPTIONS, EACH_FAMILY, CpuBuilt, give_kernels, in_turn
from oracles import Oracle
from safetensors.torch import load_file, save_file
from test_theorem import PROMPTS, poison

import mtpc
from mtpc.ahead import CachingCompiler
from mtpc.cache.lookup import key_of
from mtpc.cache.opening import open_cache
from mtpc.cache.steps import CachedStep, StepCache, graph_file, step_fields
from mtpc.cache.store import SUMS
from mtpc.capture.program import Program
from mtpc.checkpoint import Checkpoint
from mtpc.compiler import StepCompiler
from mtpc.config import CompileOptions
from mtpc.errors import CacheError, CheckpointError, OptionError
from mtpc.layout import StepKey

DECODE, PREFILL = StepKey.decode(2, 3), StepKey.prefill(2, 4, 3)
BATCH = PROMPTS[2:8]


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


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """copied(family): its checkpoint in another place, to be changed."""

    def get(family: str) -> Path:
        return Path(shutil.copytree(checkpoint(family), tmp_path / f"copy-of-{family}"))

    return get


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite a checkpoint's tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------------ warm equals cold


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
         "mtpc.compiler", "mtpc.capture.trace", "mtpc.models")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    wanted = cpu_built("glm4_moe").spec.generate(BATCH, 16)
    arguments = [str(checkpoint("glm4_moe")), str(cpu_cache), json.dumps(CPU_OPTIONS)]
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
    step = cpu_built("glm4_moe").compiler.obtain(DECODE)
    code = """
import sys, json
from mtpc.backends.cpu import CpuBackend
from mtpc.compiler import StepCompiler
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
options = CompileOptions(**json.loads(sys.argv[2]))
compiler = StepCompiler(load(sys.argv[1], options.dtype, True), options, CpuBackend())
compiler.rewrite(compiler.trace(StepKey.prefill(2, 4, 3)))  # What came before must not matter.
print(compiler.rewrite(compiler.trace(StepKey.decode(2, 3))).text())
"""
    arguments = [str(checkpoint("glm4_moe")), json.dumps(CPU_OPTIONS)]
    env = {**os.environ, "PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    history = step.record.history
    cached = step.directory / graph_file(len(history), history[-1].name)
    assert done.stdout.rstrip("\n") == gzip.decompress(cached.read_bytes()).decode()


# ------------------------------------------------------------------------------- weights


def test_a_fine_tune_needs_no_rebuild(
    warm: Callable[..., Any], copied: Callable[..., Path]
) -> None:
    """Other values under the same names: found, bound, and decoded as transformers decodes them."""
    directory = copied("glm4_moe")
    edit_weights(
        directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0).contiguous()})
    )
    tuned = warm("glm4_moe", directory)
    wanted = [Oracle("glm4_moe", directory).generate(prompt, 12) for prompt in BATCH]
    assert tuned.generate(BATCH, 12) == wanted
    assert tuned.generate(BATCH, 12) != warm("glm4_moe").generate(BATCH, 12)


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


def test_nan_weights_are_refused_warm(
    warm: Callable[..., Any], copied: Callable[..., Path]
) -> None:
    directory = copied("mimo")
    edit_weights(directory, lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"hold NaN or infinity: model\.norm\.weight"):
        warm("mimo", directory)


def test_an_own_head_is_refused_warm(
    copied: Callable[..., Path], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt]
) -> None:
    """A fine-tune whose MTP layer no longer repeats the target's head is found on a warm start."""
    directory, name = copied("glm4_moe"), "model.layers.2.shared_head.head.weight"
    wanted = cpu_built("glm4_moe").spec.generate(BATCH, 8)
    options = {**CPU_OPTIONS, "cache_dir": cpu_cache}
    edit_weights(directory, lambda t: t.update({name: t["lm_head.weight"].clone()}))
    mtpc.compile(directory, **options)
    assert mtpc.compile(directory, **options, frozen=True).generate(BATCH, 8) == wanted
    edit_weights(directory, lambda t: t[name].add_(1))
    with pytest.raises(
        CheckpointError, match=r"head\.weight differs from the tensor of the target"
    ):
        mtpc.compile(directory, **options, frozen=True)


# ----------------------------------------------------------------------------------- keys


def fields_of(directory: Path, **changes: Any) -> dict[str, str]:
    """The key of the decode step of a checkpoint."""
    options = CompileOptions(**{**CPU_OPTIONS, **changes})
    cache = open_cache(Checkpoint(directory), options, print)
    assert cache is not None
    return step_fields(cache.program, StepKey.decode(2, options.spec_tokens))


def changed_fields(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"spec_tokens": 2}, {"options.spec_tokens", "step.spec_tokens", "step.query_len"}),
        ({"batch_buckets": (2, 4)}, {"options.largest_bucket"}),
        ({"max_len": 48}, {"options.max_len"}),
        ({"page_size": 8}, {"options.page_size"}),
        ({"num_pages": 64}, {"options.num_pages"}),
        ({"dtype": "float32"}, {"options.dtype"}),
        ({"sampling": True}, {"options.sampling", "options.max_logprobs"}),
        ({"disabled_passes": ("hoist-shared",)}, {"passes.disabled"}),
        ({"enabled_passes": ("merge-projections",)}, {"passes.enabled"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_in_the_key(
    change: dict[str, Any], fields: set[str], checkpoint: Callable[..., Path]
) -> None:
    directory = checkpoint("mimo")
    assert changed_fields(fields_of(directory), fields_of(directory, **change)) == fields


@pytest.mark.parametrize(
    "change",
    [
        {"verify_passes": True},
        {"strict": True},
        {"frozen": True},
        {"backend": "auto"},
        {"cache_dir": Path("/elsewhere")},
        {"require_sha256": "0" * 64},
        {"max_logprobs": 9},  # It sizes what only sampling has.
        {"prefill_chunk": 16},  # It is in the key of prefill steps only.
        {"batch_buckets": (1, 2)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_options_not_in_the_key(change: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("mimo")
    assert fields_of(directory) == fields_of(directory, **change)


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
        (lambda d: (d / "generation_config.json").write_text('{"eos_token_id": 3}'), set()),
        (lambda d: (d / "tokenizer.json").write_text("{}"), set()),
        (lambda d: os.utime(d / "model.safetensors", (1, 1)), set()),
    ],
    ids=["eps", "architecture", "unknown", "extra-tensor", "dtype", "provenance", "values", "eos",
         "tokenizer", "mtime"],
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
        ("mtpc.cache.machine.metadata.version", lambda name: "9.9", "version.transformers"),
        ("torch.get_num_threads", lambda: 7, "machine.threads"),
        ("torch.are_deterministic_algorithms_enabled", lambda: True, "torch.deterministic"),
        ("torch.get_float32_matmul_precision", lambda: "low", "torch.float32_matmul_precision"),
        ("torch.get_default_dtype", lambda: torch.float64, "torch.default_dtype"),
        ("platform.machine", lambda: "vax", "machine.platform"),
        ("mtpc.cache.machine.compiler_version", lambda: "g++ 99", "machine.compiler"),
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


def test_the_processor_in_the_key(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AVX-512 machine's code is not for a machine without."""
    before = fields_of(checkpoint("mimo"))
    monkeypatch.setattr("mtpc.cache.machine._cpu", lambda: ("Zen 9", frozenset({"avx2"})))
    after = fields_of(checkpoint("mimo"))
    assert changed_fields(before, after) == {"machine.cpu", "machine.instruction_sets"}


def test_inductors_settings_in_the_key(checkpoint: Callable[..., Path]) -> None:
    """What this process changed, and not what a compilation set and put back."""
    before = fields_of(checkpoint("mimo"))
    import torch._inductor.config as settings

    with settings.patch(max_autotune=True):
        assert changed_fields(before, fields_of(checkpoint("mimo"))) == {"torch.inductor"}
    assert fields_of(checkpoint("mimo")) == before


def test_the_environment_in_the_key(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fields_of(checkpoint("mimo"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert fields_of(checkpoint("mimo")) == before
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    after = fields_of(checkpoint("mimo"))
    assert changed_fields(before, after) == {"environment.TORCHINDUCTOR_FREEZING"}


def test_every_part_of_the_source_is_in_the_key(tmp_path: Path) -> None:
    """Of every file that has a say in a graph, one changed byte is a miss, in its own field."""
    from mtpc.cache.machine import source_fields

    package = Path(shutil.copytree(Path(mtpc.__file__).parent, tmp_path / "mtpc"))
    before = source_fields(package)
    assert before == source_fields()
    for file, part in (
        ("passes/hoist_shared.py", "passes"),
        ("capture/inline.py", "capture"),
        ("models/mimo.py", "models"),
        ("ops/attention.py", "ops"),
        ("step.py", "step"),
        ("pieces/accept.py", "step"),
        ("backends/cpu.py", "backends"),
        ("backends/cpu_kernels/simd.h", "kernels"),
    ):
        with (package / file).open("a") as handle:
            handle.write("\n")
        after = source_fields(package)
        assert changed_fields(before, after) == {f"source.{part}"}
        before = after


def test_every_field_is_said_where_it_differs(
    cpu_cache: Path, cpu_built: Callable[..., CpuBuilt], checkpoint: Callable[..., Path]
) -> None:
    """A change of any one field is a miss, and the reason names that field with both values."""
    cpu_built("mimo")
    cache = open_cache(
        Checkpoint(checkpoint("mimo")), CompileOptions(**CPU_OPTIONS, cache_dir=cpu_cache), print
    )
    assert cache is not None
    assert cache.find(DECODE) is not None
    for name in cache.program:
        if name == "kind":
            continue
        other = StepCache(cache.store, {**cache.program, name: "something else"})
        assert other.find(DECODE) is None, name
        (difference,) = other.reasons(DECODE)
        assert (difference.field, difference.wanted) == (name, "something else")
        assert difference.cached == cache.program[name]


# ----------------------------------------------------------------------- reuse and refusal


def test_an_equal_graph_is_not_lowered_again(
    cpu_built: Callable[..., CpuBuilt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed source that leads to the same graph: traced anew, the package is reused."""
    built = cpu_built("mimo")
    cache = built.compiler.cache
    edited = StepCache(cache.store, {**cache.program, "source.passes": "a comment was added"})
    again = CachingCompiler(built.compiler.compiler, built.backend, edited)

    def refuse(*_: Any) -> Any:
        raise AssertionError("lowered again")

    monkeypatch.setattr(type(built.backend), "package", refuse)
    step = again.obtain(DECODE)
    assert step.record.lowering == built.compiler.obtain(DECODE).record.lowering
    assert step.entry is not None
    assert key_of(step.entry)["source.passes"] == "a comment was added"
    elsewhere = StepCache(cache.store, {**cache.program, "machine.instruction_sets": "none"})
    there = CachingCompiler(built.compiler.compiler, built.backend, elsewhere)
    with pytest.raises(AssertionError, match="lowered again"):
        there.obtain(DECODE)


def test_frozen_says_what_is_missing(
    warm: Callable[..., Any], cpu_cache: Path, tmp_path: Path
) -> None:
    before = sorted(cpu_cache.rglob("*"))
    with pytest.raises(CacheError, match=r"differs in options\.page_size: 4 -> 8; frozen, so noth"):
        warm("mimo", page_size=8)
    with pytest.raises(CacheError, match=r"decode.* is not in the cache .*: it has none like it"):
        warm("mimo", cache_dir=tmp_path)
    assert sorted(cpu_cache.rglob("*")) == before
    with pytest.raises(OptionError, match="frozen with backend 'eager', which has no cache"):
        warm("mimo", backend="eager")
    with pytest.raises(OptionError, match="frozen and require_sha256 need the cache"):
        warm("mimo", use_cache=False)


def test_pinned_entries(warm: Callable[..., Any]) -> None:
    """Other entries than the pinned ones are refused, and the message has their digest."""
    with pytest.raises(CacheError, match=r"the cache holds [0-9a-f]{64}") as refused:
        warm("mimo", require_sha256="0" * 64)
    held = str(refused.value).split("the cache holds ")[1][:64]
    assert warm("mimo", require_sha256=held).generate(BATCH[0], 4)


def own_copy(cache: Path, target: Path) -> Path:
    """A cache of one's own, to be damaged."""
    return Path(shutil.copytree(cache, target / "cache"))


def damage(cache: Path, step: CachedStep, file: str) -> None:
    """Flip one bit in the middle of a file of a step's entry."""
    assert step.entry is not None
    path = cache / "entries" / step.entry.digest / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    "file", ["step.so", "constants.safetensors", "step.record.json", "key.json", SUMS]
)
def test_damage_is_refused_when_frozen(
    file: str,
    warm: Callable[..., Any],
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    tmp_path: Path,
) -> None:
    """No byte of a damaged entry is used."""
    step = cpu_built("mimo").compiler.obtain(DECODE)
    mine = own_copy(cpu_cache, tmp_path)
    damage(mine, step, file)
    with pytest.raises(CacheError, match=file):
        warm("mimo", cache_dir=mine)


def test_damage_is_said_and_healed(
    cpu_cache: Path,
    cpu_built: Callable[..., CpuBuilt],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Not frozen: the entry is built again, in place, and the stats say so."""
    cold = cpu_built("mimo")
    mine = own_copy(cpu_cache, tmp_path)
    damage(mine, cold.compiler.obtain(DECODE), "step.so")
    options = {**CPU_OPTIONS, "cache_dir": mine}
    healed = mtpc.compile(checkpoint("mimo"), **options)
    (note,) = healed.stats.fallbacks
    assert "damaged cache entry was not used" in note
    assert "step.so does not have the SHA-256" in note
    assert healed.generate(BATCH, 12) == cold.spec.generate(BATCH, 12)
    again = mtpc.compile(checkpoint("mimo"), **options, frozen=True)
    assert not again.stats.fallbacks
    assert again.generate(BATCH, 12) == healed.generate(BATCH, 12)


def test_a_cache_that_others_can_write_is_refused(
    warm: Callable[..., Any], cpu_cache: Path, cpu_built: Callable[..., CpuBuilt], tmp_path: Path
) -> None:
    """Before anything of it is opened, and whether frozen or not."""
    cpu_built("mimo")
    mine = own_copy(cpu_cache, tmp_path)
    mine.chmod(0o775)
    for frozen in (True, False):
        with pytest.raises(CacheError, match=r"can be written by its group.*chmod go-w"):
            warm("mimo", cache_dir=mine, frozen=frozen)


# ----------------------------------------------------------------- other ways to the cache


def test_a_model_object_uses_the_cache(
    checkpoint: Callable[..., Path], cpu_built: Callable[..., CpuBuilt], cpu_cache: Path
) -> None:
    """An object's own tensors are bound; its key is its own, its graphs are the checkpoint's."""
    cold, directory = cpu_built("mimo").spec, checkpoint("mimo")
    model = transformers.Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float64)
    options = {**CPU_OPTIONS, "cache_dir": cpu_cache, "dtype": None}
    first = mtpc.compile(model, **options)
    second = mtpc.compile(model, **options, frozen=True)
    assert first.generate(BATCH, 8) == second.generate(BATCH, 8) == cold.generate(BATCH, 8)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert second.generate(BATCH, 8) != cold.generate(BATCH, 8)


def test_a_patched_model_object_is_not_cached(checkpoint: Callable[..., Path]) -> None:
    """Hooks and replaced forwards change the graph and are in no key."""
    lines: list[str] = []
    options = CompileOptions(**{**CPU_OPTIONS, "dtype": None})
    model = transformers.Qwen2ForCausalLM.from_pretrained(checkpoint("mimo"))
    assert open_cache(model, options, lines.append) is not None
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    assert open_cache(model, options, lines.append) is None
    hook.remove()
    model.model.layers[0].forward = lambda *args, **kwargs: None
    assert open_cache(model, options, lines.append) is None
    assert (
        lines == ["the model object has hooks or replaced forwards: its steps are not cached"] * 2
    )


@pytest.mark.slow
def test_split_steps_through_the_cache(
    cpu_built: Callable[..., CpuBuilt],
) -> None:
    """verify and propose, each an entry of its own, over one set of buffers: the whole step."""
    built = cpu_built("glm4_moe")
    steps = {}
    for key in (DECODE, PREFILL):
        steps[key] = in_turn(*built.compiler.capture_split(key))
    compiler: StepCompiler = built.compiler.compiler
    spec = mtpc.SpecModel(built.spec.served, compiler.options, Program(steps, compiler.shared))
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
    checkpoint: Callable[..., Path],
    cpu_built: Callable[..., CpuBuilt],
    cpu_cache: Path,
    oracle: Callable[..., Oracle],
) -> None:
    """Halves out of the cache over slices of a host's own pools, in a process without compiler."""
    for key in (DECODE, PREFILL):
        cpu_built("glm4_moe").compiler.capture_split(key)
    code = f"""
import sys, json, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent.parent / "examples")!r})
import host, mtpc
options = json.loads(sys.argv[3])
model = mtpc.compile_host(sys.argv[1], cache_dir=sys.argv[2], frozen=True, **options)
served = host.Host(model)
requests = [served.add(prompt, 16) for prompt in {BATCH!r}]
while served.step():
    pass
heavy = ("transformers", "torch._inductor", "torch._dynamo", "sympy", "networkx",
         "mtpc.compiler", "mtpc.capture.trace", "mtpc.models")
print(json.dumps([request.output for request in requests]))
print(json.dumps([name for name in heavy if name in sys.modules]))
print(json.dumps([dict(model.fallbacks), len(served.accepted)]))
"""
    arguments = [str(checkpoint("glm4_moe")), str(cpu_cache), json.dumps(CPU_OPTIONS)]
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
