"""Kernels compiled for GPUs that are not here: they fit the chips, spill nothing, and are kept.

Needs Triton, compiling, not interpreting: `tests/run_triton.sh`. Nothing here runs a kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

if util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton that compiles: tests/run_triton.sh", allow_module_level=True)

import triton

from mtpc.backends.bindings import BindKernels, Configure, by_default
from mtpc.backends.cross import CrossBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.memory import intermediate_bytes
from mtpc.backends.targets import TARGETS, Target
from mtpc.backends.triton_kernels import crosscompile, plans
from mtpc.backends.triton_kernels.configs import CHOICES, Config, all_configured, configs_of
from mtpc.backends.triton_kernels.crosscompile import (
    METADATA,
    RESOURCES,
    Specialisation,
    compiler_fields,
    cross_compile,
)
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.limits import triton_bindings
from mtpc.backends.triton_kernels.loading import (
    CodeObjects,
    built_by_another,
    loaded_bindings,
)
from mtpc.backends.triton_kernels.plans import step_launches
from mtpc.backends.triton_kernels.tuning import Call, Tuner
from mtpc.cache.key import digest
from mtpc.cache.lookup import KEY, key_bytes
from mtpc.cache.store import EntryStore
from mtpc.cli.main import main
from mtpc.compiler import StepCompiler
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.passes import Verifier

BF16 = torch.bfloat16
SPILLS = {"hip": 0, "cuda": 64}
"""What is tolerated: vector registers on AMD, bytes of stack a thread on NVIDIA (40 on sm_80, where
prompts and drafts of GLM-4.5 fill a tile; none elsewhere)."""


def _fake(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _indices(reqs: int, blocks: int) -> tuple[torch.Tensor, ...]:
    return (
        _fake(reqs, blocks, dtype=torch.int32),
        _fake(reqs, dtype=torch.int32),
        _fake(reqs + 1, dtype=torch.int32),
    )


def _gqa(reqs: int, rows: int, heads: tuple[int, int], dims: tuple[int, int]) -> list[Launch]:
    q = _fake(reqs * rows, heads[0], dims[0])
    k, v = _fake(4096, 16, heads[1], dims[0]), _fake(4096, 16, heads[1], dims[1])
    return plans.plan_paged_attention(q, k, v, *_indices(reqs, 2048), 0.09)[0]


def _gqa_with_all(reqs: int, rows: int) -> list[Launch]:
    q, kv = _fake(reqs * rows, 64, 64), _fake(4096, 16, 8, 64)
    sinks = _fake(64)
    return plans.plan_paged_attention(
        q, kv, kv, *_indices(reqs, 2048), 0.1, sliding_window=128, softcap=30.0, sinks=sinks
    )[0]


def _mla(reqs: int, rows: int, heads: int = 128) -> list[Launch]:
    q = _fake(reqs * rows, heads, 576)
    return plans.plan_latent_attention(q, _fake(4096, 16, 576), *_indices(reqs, 2048), 0.07, 512)[0]


def _experts(
    tokens: int, sizes: tuple[int, int, int], chosen: int = 8, *limit: float | bool
) -> list[Launch]:
    count, hidden, inner = sizes
    ids, weights = _fake(tokens, chosen, dtype=torch.int64), _fake(tokens, chosen)
    gate_up, down = _fake(count, 2 * inner, hidden), _fake(count, hidden, inner)
    return plans.plan_experts(_fake(tokens, hidden), gate_up, down, ids, weights, *limit)[0]


def _write(tokens: int) -> list[Launch]:
    slots = _fake(tokens, dtype=torch.int64)
    return plans.plan_write_cache(_fake(4096, 16, 8, 128), _fake(tokens, 8, 128), slots)[0]


def _rotate(tokens: int, heads: tuple[int, int], dims: tuple[int, int, int]) -> list[Launch]:
    """dims: of a key, of the angles, of a value."""
    (count, kv_count), (width, turned, v_width) = heads, dims
    rows = [_fake(tokens, *shape) for shape in ((count, width), (kv_count, width))]
    angles = [_fake(tokens, turned) for _ in range(2)]
    caches = [_fake(4096, 16, kv_count, dim) for dim in (width, v_width)]
    v, slots = _fake(tokens, kv_count, v_width), _fake(tokens, dtype=torch.int64)
    return plans.plan_rotate_and_write(*rows, v, *angles, *caches, slots)[0]


def _choose(reqs: int, rows: int) -> list[Launch]:
    """DeepSeek-V3.2: 64 heads of 128, 2,048 of up to 32,768 positions."""
    query = _fake(reqs * rows, 64, 128, dtype=torch.float32)
    weights = _fake(reqs * rows, 64, dtype=torch.float32)
    indices = _indices(reqs, 2048)
    return plans.plan_choose_slots(query, weights, _fake(4096, 16, 128), *indices, 2048)[0]


def _delta(
    reqs: int, rows: int, heads: tuple[int, int] = (16, 32), drafts: int = 3, dtype=BF16
) -> list[Launch]:  # type: ignore[no-untyped-def]
    """Qwen3-Next: key and value heads of 128, a convolution over four rows."""
    channels = (2 * heads[0] + heads[1]) * 128
    tokens, fields, slots = reqs * rows, channels + 2 * heads[1], reqs + 1
    weights = (_fake(channels, 4, dtype=dtype), _fake(heads[1]), _fake(heads[1]))
    state = (
        _fake(slots, heads[1], 128, 128, dtype=torch.float32),
        _fake(slots, 3 + drafts, fields, dtype=dtype),
        _fake(slots, dtype=torch.int32),
    )
    indices = (
        _fake(reqs, dtype=torch.int64),
        _fake(reqs, dtype=torch.int32),
        _fake(reqs + 1, dtype=torch.int32),
        _fake(reqs, dtype=torch.int32),
    )
    args = (_fake(tokens, fields, dtype=dtype), *weights, *state, *indices)
    return plans.plan_gated_delta_rule(*args)[0]


def _int8(tokens: int, features: int, inputs: int) -> list[Launch]:
    weight = _fake(-(-features // 32), inputs // 4, 32, 4, dtype=torch.uint8)
    scales = _fake(features, dtype=torch.float32)
    return plans.plan_quantised_linear(_fake(tokens, inputs), weight, scales)[0]


def _sinkhorn(tokens: int, streams: int) -> list[Launch]:
    return plans.plan_sinkhorn(_fake(tokens, streams, streams, dtype=torch.float32), 20, 1e-6)[0]


def _sample(tokens: int, vocab: int, with_mask: bool = False) -> list[Launch]:
    """Bias of up to 256 tokens, 8 stop tokens; a row a request."""
    int64, float64, words = torch.int64, torch.float64, -(-vocab // 32)
    rows = [_fake(tokens, dtype=int64) for _ in range(3)]
    numbers = (_fake(65, 6, dtype=float64), _fake(65, 6, dtype=int64))
    bias = (_fake(65, 256, dtype=int64), _fake(65, 256, dtype=float64))
    known = [_fake(65, width, dtype=torch.int32) for width in (words, words, vocab)]
    mask = _fake(tokens, words, dtype=torch.int32) if with_mask else None
    stops = _fake(65, 8, dtype=int64)
    return plans.plan_sample(_fake(tokens, vocab), *rows, *numbers, *bias, *known, stops, mask)[0]


def _record(reqs: int, rows: int, vocab: int) -> list[Launch]:
    """The 20 most probable tokens of each row."""
    ids, emitted = _fake(reqs, rows, dtype=torch.int64), _fake(reqs, dtype=torch.int32)
    slots, counts = _fake(reqs, dtype=torch.int64), _fake(65, vocab, dtype=torch.int32)
    own = _fake(reqs, rows, dtype=torch.float64)
    top = [_fake(reqs, rows, 20, dtype=dtype) for dtype in (torch.int64, torch.float64)]
    ints = _fake(65, 6, dtype=torch.int64)
    logits = _fake(reqs * rows, vocab)
    counted = plans.plan_count_tokens(counts, ids, emitted, slots)[0]
    return [
        *counted,
        *plans.plan_write_logprobs(own, *top, logits, ids, emitted, slots, ints)[0],
    ]


SHIPPED: dict[str, Callable[[], list[Launch]]] = {
    "GLM-4.5 (96/8 heads of 128), 1 x 4 rows": lambda: _gqa(1, 4, (96, 8), (128, 128)),
    "GLM-4.5, prompt of 512": lambda: _gqa(1, 512, (96, 8), (128, 128)),
    "MiMo-7B (32/8 heads of 128), 64 x 1 rows": lambda: _gqa(64, 1, (32, 8), (128, 128)),
    "MiMo-V2 (64/4 heads of 192, 128), 4 x 4 rows": lambda: _gqa(4, 4, (64, 4), (192, 128)),
    "window, cap and sinks, 4 x 2 rows": lambda: _gqa_with_all(4, 2),
    "DeepSeek-V3, 1 x 4 rows": lambda: _mla(1, 4),
    "DeepSeek-V3, 64 x 1 rows": lambda: _mla(64, 1),
    "DeepSeek-V3 experts, 4 rows": lambda: _experts(4, (256, 7168, 2048)),
    "GLM-4.5-Air experts, 64 rows": lambda: _experts(64, (128, 4096, 1408)),
    "Step-3.7's bounded experts, 4 rows": lambda: _experts(4, (288, 4096, 1280), 8, 7.0),
    "DeepSeek-V4's bounded experts, 64 rows": lambda: _experts(
        64, (256, 4096, 2048), 6, 10.0, True
    ),
    "Qwen3-Next's state, 1 x 4 rows": lambda: _delta(1, 4),
    "Qwen3-Next's state, 64 x 1 rows without drafts": lambda: _delta(64, 1, drafts=0),
    "Qwen3-Next's state, prompt of 512": lambda: _delta(1, 512),
    "Qwen3.5's state (48 heads), float32": lambda: _delta(4, 4, (16, 48), dtype=torch.float32),
    "int8 head of GLM-4.5, 1 row": lambda: _int8(1, 151_552, 4096),
    "int8 projection, 64 rows": lambda: _int8(64, 4096, 8192),
    "DeepSeek-V3.2's indexer, 4 x 4 rows": lambda: _choose(4, 4),
    "four streams, 16 rows": lambda: _sinkhorn(16, 4),
    "choice among GLM-4.5's tokens, 4 rows": lambda: _sample(4, 151_552),
    "choice among masked tokens, 64 rows": lambda: _sample(64, 129_280, True),
    "counts and log-probabilities, 4 x 4 rows": lambda: _record(4, 4, 151_552),
    "cache write, 16 rows": lambda: _write(16),
    "GLM-4.5's rotary of half a head, 4 rows": lambda: _rotate(4, (96, 8), (128, 64, 128)),
    "MiMo-V2's rotary of a third, 16 rows": lambda: _rotate(16, (64, 4), (192, 64, 128)),
    "MiMo-7B's rotary, prompt of 512": lambda: _rotate(512, (32, 8), (128, 128, 128)),
}


@pytest.fixture(scope="module")
def kernel_store(tmp_path_factory: pytest.TempPathFactory) -> EntryStore:
    root = tmp_path_factory.mktemp("kernels")
    root.chmod(0o755)
    return EntryStore(root)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("shipped", SHIPPED.values(), ids=SHIPPED.keys())
def test_every_kernel_compiles_fits_and_does_not_spill(
    shipped: Callable[[], list[Launch]], target: Target, kernel_store: EntryStore
) -> None:
    with FakeTensorMode():
        launches = shipped()
    made = cross_compile([x for x, _ in all_configured(launches)], target, kernel_store)
    assert {m.kernel for m in made} == {launch.name for launch in launches}
    assert len(made) >= sum(len(configs_of(launch)) for launch in launches)
    for kernel in made:
        assert kernel.resources.nbytes > 0
        assert 0 < kernel.resources.registers <= 512
        assert kernel.resources.shared_bytes <= target.shared_bytes
        assert kernel.resources.spills <= SPILLS[target.vendor], kernel


def test_code_objects_are_elf_files_of_their_architecture(kernel_store: EntryStore) -> None:
    """EM_AMDGPU is 224, EM_CUDA 190; hence it is not the same bytes twice."""
    with FakeTensorMode():
        launches = _write(16)
    for name, machine in (("hip:gfx942", 224), ("cuda:90", 190)):
        (made,) = cross_compile(launches, TARGETS[name], kernel_store)
        code = made.entry.read(f"kernel.{made.target.binary}")
        assert code[:4] == b"\x7fELF"
        assert int.from_bytes(code[18:20], "little") == machine
        assert json.loads(made.entry.read(RESOURCES))["nbytes"] == len(code)


def test_a_kernel_is_compiled_once_and_again_where_it_is_damaged(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = EntryStore(tmp_path / "store")
    with FakeTensorMode():
        launches = _write(16) + _write(16)
    (first,) = cross_compile(launches, TARGETS["hip:gfx942"], store)
    (again,) = cross_compile(launches, TARGETS["hip:gfx942"], store)
    assert (first.was_there, again.was_there) == (False, True)
    assert first.entry == again.entry
    (store.directory(first.entry.digest) / "kernel.hsaco").write_bytes(b"damage")
    (mended,) = cross_compile(launches, TARGETS["hip:gfx942"], store)
    assert not mended.was_there
    assert mended.entry.read("kernel.hsaco") == again.entry.read("kernel.hsaco")


def test_what_the_key_depends_on() -> None:
    """Shapes in constants, alignment of integers, dtypes and targets; not addresses or grids."""
    hip, cuda = TARGETS["hip:gfx942"], TARGETS["cuda:90"]
    with FakeTensorMode():
        fields = [Specialisation.of(_write(tokens)[0], hip).fields for tokens in (16, 48)]
        assert fields[0] == fields[1]
        launch = _gqa(2, 4, (96, 8), (128, 128))[0]
        other = Specialisation.of(_gqa(2, 4, (96, 8), (128, 64))[0], hip)
        near = Specialisation.of(_far(1 << 10)[0], hip)
        far = Specialisation.of(_far(1 << 20)[0], hip)
    wanted = Specialisation.of(launch, hip)
    assert (wanted.marks["num_tokens"], wanted.marks["q_token"]) == ("", "D")
    assert wanted.signature["q_ptr"] == "*bf16"
    assert wanted.fields != other.fields
    assert wanted.fields != Specialisation.of(launch, cuda).fields
    assert (near.marks["cache_ptr"], far.marks["cache_ptr"]) == ("DS", "D"), "4 GiB"
    assert wanted.fields["version.triton"]


def _write_for(target: Target) -> Specialisation:
    with FakeTensorMode():
        return Specialisation.of(_write(16)[0], target)


@pytest.mark.parametrize("target", ["hip:gfx942", "cuda:90"])
def test_the_key_holds_all_that_tritons_own_has(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build of the same version, another assembler, another switch: other entries."""
    before = _write_for(TARGETS[target])
    fields, name, options = before.fields, before.triton_hash(), Specialisation.triton_options
    backend = type(crosscompile.make_backend(crosscompile.gpu_target(TARGETS[target])))
    changes: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
        "triton.build": lambda m: (
            m.setattr(crosscompile, "triton_key", lambda: "another"),
            m.setattr(triton.runtime.cache, "triton_key", lambda: "another"),
        ),
        "triton.backend": lambda m: m.setattr(backend, "hash", lambda self: "another"),
        "triton.environment": lambda m: m.setenv("TRITON_ENABLE_ASAN", "1"),
        "triton.options": lambda m: m.setattr(
            Specialisation, "triton_options", lambda self: {**options(self), "debug": True}
        ),
    }
    for field, change in changes.items():
        with monkeypatch.context() as patch:
            change(patch)
            after = _write_for(TARGETS[target])
            differing = {n for n in fields if fields[n] != after.fields[n]}
            assert differing == {field}
            assert after.triton_hash() != name, "Triton itself would not take it"
    assert (_write_for(TARGETS[target]).fields, before.triton_hash()) == (fields, name)


def test_code_of_another_triton_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filed under its own key it is not found; filed under ours, by whatever mistake, refused."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    tmp_path.chmod(0o755)
    store, target = EntryStore(tmp_path / "store"), TARGETS["cuda:90"]
    with FakeTensorMode():
        launches = _write(16)
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
    assert said.endswith("); build it with this one")

    def fill(directory: Path) -> None:
        for name in theirs.entry.files:
            (directory / name).write_bytes(theirs.entry.read(name))
        (directory / KEY).write_bytes(key_bytes(_write_for(target).fields))

    store.write(digest(_write_for(target).fields), fill)
    reason = objects.seed(launches)
    assert reason is not None
    assert "the code is another Triton's; remove the entry" in reason
    found = json.loads(theirs.entry.read(METADATA))["hash"]
    assert not (tmp_path / "triton" / found / "write_cache_kernel.cubin").is_file() or (
        triton.runtime.cache.get_cache_manager(_write_for(target).triton_hash()).get_group(
            "write_cache_kernel.json"
        )
        is None
    )
    assert compiler_fields(target)["triton.build"] != "3.0.0 and its files"
    (ours,) = cross_compile(launches, target, store)
    assert ours.was_there, "cross_compile trusts a key: the record is looked at when it is loaded"


def _far(pages: int) -> list[Launch]:
    slots = _fake(16, dtype=torch.int64)
    return plans.plan_write_cache(_fake(pages, 16, 128), _fake(16, 128), slots)[0]


def _child(action: str, store: Path, target: str, triton_cache: Path) -> list[list[Any]]:
    """tests/loaded_kernels.py with a cache of Triton's that it has for itself."""
    script = Path(__file__).parent / "loaded_kernels.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(triton_cache)}
    done = subprocess.run(
        [sys.executable, str(script), action, str(store), target],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if action == "load" else []


@pytest.mark.parametrize("target", ["hip:gfx942", "cuda:90"])
def test_a_device_finds_what_was_built_elsewhere(target: str, tmp_path: Path) -> None:
    """Triton's own launcher asks its cache for the very code; without ours it would compile.

    A damaged entry is refused with its reason, and compiled instead.
    """
    tmp_path.chmod(0o755)
    store = tmp_path / "store"
    _child("build", store, target, tmp_path / "elsewhere")
    found = _child("load", store, target, tmp_path / "here")
    assert len(found) == 20
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


def test_steps_are_bound_to_what_was_built(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose kernels are all in the cache takes them; what is not there is noted."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    tmp_path.chmod(0o755)
    store, target = EntryStore(tmp_path / "store"), TARGETS["cuda:90"]
    objects = CodeObjects(store, target)
    assert loaded_bindings(objects) == loaded_bindings(None) == ()
    loaded = load(checkpoint("mimo"), "bfloat16", True)
    options = CompileOptions(spec_tokens=1, batch_buckets=(2,), max_len=64, prefill_chunk=8)
    compiler = StepCompiler(loaded, options, CrossBackend())
    launches = step_launches(compiler.rewritten(StepKey.decode(2, 1)))
    attend = next(x for x in launches if x.name == "paged_attention_kernel")
    parts = [attend.arguments[name] for name in ("acc_ptr", "stats_ptr")]
    estimate = intermediate_bytes(compiler.rewritten(StepKey.decode(2, 1)))
    assert estimate > sum(part.nbytes for part in parts) > 0, "scratch memory is counted"
    cross_compile([x for x in launches if x.name != "write_cache_kernel"], target, store)

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
    assert names == {"mtpc_triton.write_cache.default", "mtpc_loaded.paged_attention.default"}
    assert set(notes) == {
        "mtpc::write_cache does not run on code built for cuda:90 (write_cache_kernel was not "
        "built for cuda:90 at these sizes): triton"
    }
    cross_compile(launches, target, store)
    names, notes = bind()
    assert names == {"mtpc_loaded.write_cache.default", "mtpc_loaded.paged_attention.default"}
    assert not notes
    other = loaded_bindings(CodeObjects(store, TARGETS["cuda:80"]))
    assert other == (), "nothing was built for it, and nobody is told"

    def last(call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        return [float(len(configs) - place) for place in range(len(configs))]

    tuner = Tuner(store, "no device", last)
    names, notes = bind(tuner)
    assert "mtpc_triton.paged_attention.default" in names, "its choice was not built"
    assert all("paged_attention_kernel was not built for cuda:90" in note for note in notes)
    cross_compile([launch for launch, _ in all_configured(launches)], target, store)
    names, notes = bind(tuner)
    assert names == {"mtpc_loaded.write_cache.default", "mtpc_loaded.paged_attention.default"}
    assert not notes


def test_build_for_a_target_prints_a_table(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    words = ["--batch-buckets", "2", "--max-len", "64", "--spec-tokens", "2"]
    build = ["build", str(checkpoint("deepseek_v3")), *words, "--out", str(tmp_path / "cache")]
    assert main([*build, "--target", "hip:gfx950"]) == 0
    out = capsys.readouterr().out
    kernel = r"{} +hip:gfx950 +[0-9a-f]{{8}} +[\d.]+ KiB +.* of 160.0 KiB +\d+ +0 +built"
    for name in ("latent_attention_kernel", "expert_gate_up_kernel", "write_cache_kernel"):
        assert re.search(kernel.format(name), out)
    # 2 decoder layers and an MTP layer run once, the MTP layer once more in the chain: each a
    # cache write and an attention with its combine, and three kernels for the experts of all
    # but the first layer, which is dense.
    assert "decode[R=2,Q=3,K=2]: 21 launches" in out
    for name, choice in CHOICES.items():
        rows = len(re.findall(rf"{name} +hip:gfx950", out))
        assert rows == 0 or rows >= len(choice.changes), "each configuration is built"
    assert "compiled by Inductor on the device itself" in out
    assert main(["cache", "ls", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "gpu-kernel" in capsys.readouterr().out


def test_inductor_sees_what_our_kernels_write_and_nothing_else() -> None:
    """Else it would copy a whole cache, or all experts, before every launch."""
    script = Path(__file__).parent / "mutation_analysis.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [
        ["cache_ptr"],
        ["acc_ptr", "stats_ptr"],
        ["out_ptr"],
        ["acc_ptr", "stats_ptr"],
        ["out_ptr"],
        ["hidden_ptr"],
        ["part_ptr"],
        ["out_ptr"],
        ["terms_ptr"],
        ["out_ptr", "state_ptr"],
        ["history_ptr", "out_ptr", "standing_ptr"],
        ["counts_ptr"],
        ["logprobs_ptr", "top_ids_ptr", "top_ptr"],
        ["integers_ptr", "scales_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["k_cache_ptr", "out_ptr", "v_cache_ptr"],
        ["scores_ptr"],
        ["out_ptr"],
        ["peaks_ptr", "raw_peaks_ptr", "scores_ptr"],
        ["out_ptr"],
    ]
