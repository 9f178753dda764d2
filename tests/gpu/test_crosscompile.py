"""Kernels compiled for GPUs that are not here: they fit the chips, spill nothing, and are kept.

Needs Triton, compiling, not interpreting: `tests/run_triton.sh`. Nothing here runs a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.triton_here import COMPILES, NO_COMPILER
from torch._subclasses.fake_tensor import FakeTensorMode

if not COMPILES:
    pytest.skip(NO_COMPILER, allow_module_level=True)

import triton
from helpers.places import TESTS
from helpers.shipped_launches import (
    FP32,
    SHIPPED,
    far_write,
    gqa,
    kernel_choices,
    mla,
    write,
    write_for,
)

from mtpc.backends.targets import TARGETS, Target
from mtpc.backends.triton_kernels import crosscompile
from mtpc.backends.triton_kernels.configs import all_configured
from mtpc.backends.triton_kernels.crosscompile import (
    RESOURCES,
    Specialisation,
    compile_for,
    cross_compile,
)
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.cli.main import main
from mtpc.store.entries import EntryStore

pytestmark = pytest.mark.gpu_compile

SPILLS = {"hip": 1, "hip:gfx1201": 372, "cuda": 96}
"""What is tolerated, by target or vendor: vector registers on AMD, bytes of stack a thread on
NVIDIA (on sm_80, where prompts and drafts of GLM-4.5 fill a tile: 40, and 88 by Triton 3.6; on
sm_90 the indexer in float16, 56 by Triton 3.8). RDNA has 256 registers a thread, half of what
others have: attention of wide heads spills."""
IN_TURN = ("hip:gfx942", "cuda:90")
"""Targets of the fast part, one of either vendor: each has every other launch. All launches take
about a minute for a target."""


@pytest.fixture(scope="module")
def kernel_store(tmp_path_factory: pytest.TempPathFactory) -> EntryStore:
    root = tmp_path_factory.mktemp("kernels")
    root.chmod(0o755)
    return EntryStore(root)


def _must_fit(launch: Launch, is_default: bool) -> bool:
    """Not what latent attention has for Hopper: a device that measures a configuration which spills
    would not choose it, nor can it choose one that is too large."""
    return is_default or launch.name != "latent_attention_kernel"


@pytest.mark.parametrize(
    ("shipped", "target"),
    [
        pytest.param(
            shipped,
            target,
            id=f"{name}-{key}",
            marks=[pytest.mark.slow] * (key != IN_TURN[place % 2]),
        )
        for place, (name, shipped) in enumerate(SHIPPED.items())
        for key, target in TARGETS.items()
    ],
)
def test_every_kernel_compiles_fits_and_does_not_spill(
    shipped: Callable[[], list[Launch]], target: Target, kernel_store: EntryStore
) -> None:
    with FakeTensorMode():
        launches = shipped()
    wanted = [x for x, default in all_configured(launches, target.vendor) if _must_fit(x, default)]
    made = cross_compile(wanted, target, kernel_store)
    assert {m.kernel for m in made} == {launch.name for launch in launches}
    assert len(made) >= len(wanted)
    for kernel in made:
        assert kernel.resources.nbytes > 0
        assert 0 < kernel.resources.registers <= 512
        assert kernel.resources.shared_bytes <= target.shared_bytes
        assert kernel.resources.spills <= SPILLS.get(target.name, SPILLS[target.vendor]), kernel


def test_what_latent_attention_has_for_hopper_fits_there(kernel_store: EntryStore) -> None:
    """DeepSeek-V3's heads, 64 requests: wide tiles, and fewer threads."""
    with FakeTensorMode():
        launches = mla(64, 1)
    others = [x for x, default in all_configured(launches, "cuda") if not _must_fit(x, default)]
    assert len(others) == 4
    for kernel in cross_compile(others, TARGETS["cuda:90"], kernel_store):
        assert kernel.resources.shared_bytes <= TARGETS["cuda:90"].shared_bytes


def test_amd_has_configurations_of_its_own(kernel_store: EntryStore) -> None:
    """Other code from the same kernel; what it takes of registers depends on Triton's version."""
    target = TARGETS["hip:gfx942"]
    for name in ("GLM-4.5 (96/8 heads of 128), 1 x 5 rows", "int8 projection, 64 rows"):
        with FakeTensorMode():
            launch = next(each for each in SHIPPED[name]() if each.choice.changes)
        assert not any(other.amd for other, _ in all_configured([launch], "cuda"))
        (own,) = [other for other, _ in all_configured([launch], "hip") if other.amd]
        options = Specialisation.of(own, target).triton_options()
        assert own.amd.items() <= options.items()
        made = cross_compile([launch, own], target, kernel_store)
        assert len({kernel.entry.read("kernel.hsaco") for kernel in made}) == 2


def test_float32_attention_does_not_spill_by_default(kernel_store: EntryStore) -> None:
    """Heads of 128; its variant of 128 threads does, so that tuning would not choose it."""
    with FakeTensorMode():
        launches = gqa(1, 5, (96, 8), (128, 128), FP32)
    for kernel in cross_compile(launches, TARGETS["cuda:90"], kernel_store):
        assert kernel.resources.spills == 0, kernel


@pytest.mark.parametrize(
    ("target", "stage", "raised", "seen"),
    [
        ("cuda:90", "ptx", r"atom\.\S*\.sys\.release\.exch", r"atom\.\S*\.sys\.acquire\.add"),
        # Writes its caches back to what other GPUs read, and drops what it has read of theirs.
        ("hip:gfx942", "amdgcn",
         r"buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\).*\s+global_atomic_swap_x2 .*sc1",
         # LLVM of Triton 3.6 makes a load of a sum with zero.
         r"global_(atomic_add_|load_dword)x2 .*sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+buffer_inv sc0 sc1",
        ),
    ],
)  # fmt: skip
def test_exchanges_order_their_flags(target: str, stage: str, raised: str, seen: str) -> None:
    """For the whole system: a part is written before its flag, and read after it, 16 bytes each."""
    with FakeTensorMode():
        (launch,) = SHIPPED["DeepSeek-V3's sum of 8 ranks, 4 rows"]()
    text = compile_for(Specialisation.of(launch, TARGETS[target])).asm[stage]
    (flag,), waits = list(re.finditer(raised, text)), list(re.finditer(seen, text))
    assert len(waits) == 2, "one look, and one in the loop"
    assert flag.end() < waits[0].start()
    wide = r"ld\.global\.v4\.b32|(buffer|global)_load_dwordx4"
    places = [match.start() for match in re.finditer(wide, text)]
    assert sum(place < flag.start() for place in places) == 2
    assert sum(place > waits[1].start() for place in places) >= 2 * 8


def test_code_objects_are_elf_files_of_their_architecture(kernel_store: EntryStore) -> None:
    """EM_AMDGPU is 224, EM_CUDA 190; hence it is not the same bytes twice."""
    with FakeTensorMode():
        launches = write(16)
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
        launches = write(16) + write(16)
    (first,) = cross_compile(launches, TARGETS["hip:gfx942"], store)
    (again,) = cross_compile(launches, TARGETS["hip:gfx942"], store)
    assert (first.was_there, again.was_there) == (False, True)
    assert first.entry == again.entry
    (store.directory(first.entry.digest) / "kernel.hsaco").write_bytes(b"damage")
    (mended,) = cross_compile(launches, TARGETS["hip:gfx942"], store)
    assert not mended.was_there
    assert mended.entry.read("kernel.hsaco") == again.entry.read("kernel.hsaco")


def test_entries_of_another_format_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay, and a kernel is compiled beside them; each mtpc finds its own again."""
    tmp_path.chmod(0o755)
    store, target = EntryStore(tmp_path / "store"), TARGETS["hip:gfx942"]
    with FakeTensorMode():
        launches = write(16)
    with monkeypatch.context() as patch:
        patch.setattr(crosscompile, "FORMAT", "another")
        (older,) = cross_compile(launches, target, store)
    (made,) = cross_compile(launches, target, store)
    assert not made.was_there
    assert made.entry.digest != older.entry.digest
    listed = json.loads(made.entry.read(RESOURCES))
    assert listed.keys() == {"nbytes", "shared_bytes", "registers", "spills"}
    (again,) = cross_compile(launches, target, store)
    assert again.was_there


def test_what_the_key_depends_on() -> None:
    """Shapes in constants, alignment of integers, dtypes and targets; not addresses or grids."""
    hip, cuda = TARGETS["hip:gfx942"], TARGETS["cuda:90"]
    with FakeTensorMode():
        fields = [Specialisation.of(write(tokens)[0], hip).fields for tokens in (16, 48)]
        assert fields[0] == fields[1]
        launch = gqa(2, 4, (96, 8), (128, 128))[0]
        other = Specialisation.of(gqa(2, 4, (96, 8), (128, 64))[0], hip)
        near = Specialisation.of(far_write(1 << 10)[0], hip)
        far = Specialisation.of(far_write(1 << 20)[0], hip)
    wanted = Specialisation.of(launch, hip)
    assert (wanted.marks["num_tokens"], wanted.marks["q_token"]) == ("", "D")
    assert wanted.signature["q_ptr"] == "*bf16"
    assert wanted.fields != other.fields
    assert wanted.fields != Specialisation.of(launch, cuda).fields
    assert (near.marks["cache_ptr"], far.marks["cache_ptr"]) == ("DS", "D"), "4 GiB"
    assert wanted.fields["version.triton"]


@pytest.mark.parametrize("target", ["hip:gfx942", "cuda:90"])
def test_the_key_holds_all_that_tritons_own_has(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build of the same version, another assembler, another switch: other entries."""
    before = write_for(TARGETS[target])
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
            after = write_for(TARGETS[target])
            differing = {n for n in fields if fields[n] != after.fields[n]}
            assert differing == {field}
            assert after.triton_hash() != name, "Triton itself would not take it"
    assert (write_for(TARGETS[target]).fields, before.triton_hash()) == (fields, name)


def test_build_for_a_target_prints_a_table(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    words = ["--batch-buckets", "2", "--max-len", "64", "--spec-tokens", "2", "--no-sampling"]
    build = ["build", str(checkpoint("deepseek_v3")), *words, "--out", str(tmp_path / "cache")]
    assert main([*build, "--target", "hip:gfx950"]) == 0
    out = capsys.readouterr().out
    kernel = r"{} +hip:gfx950 +[0-9a-f]{{8}} +[\d.]+ KiB +.* of 160.0 KiB +\d+ +0 +built"
    for name in ("latent_attention_kernel", "expert_gate_up_kernel", "write_cache_kernel"):
        assert re.search(kernel.format(name), out)
    # 2 decoder layers and an MTP layer run once, the MTP layer once more in the chain: each a
    # cache write and an attention with its combine, and four kernels for the experts of all
    # but the first layer, which is dense, and one for its router. And acceptance.
    assert "decode[R=2,Q=3,K=2]: 28 launches" in out
    for name, choice in kernel_choices().items():
        rows = len(re.findall(rf"{name} +hip:gfx950", out))
        assert rows == 0 or rows >= len(choice.changes), "each configuration is built"
    assert "on the GPU's own machine" in out
    assert main(["cache", "ls", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "gpu-kernel" in capsys.readouterr().out


@pytest.mark.slow
def test_build_for_a_target_reads_codes(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    words = ["--batch-buckets", "2", "--max-len", "64", "--spec-tokens", "1"]
    words += ["--quantize", "int4-g32", "--out", str(tmp_path / "cache")]
    assert main(["build", str(checkpoint("glm4_moe")), *words, "--target", "hip:gfx942"]) == 0
    out = capsys.readouterr().out
    for name in ("round_groups", "grouped_linear", "grouped_gate_up", "grouped_down"):
        assert re.search(rf"{name}_kernel +hip:gfx942", out)
    assert "instead" not in out, "nothing is left to a reference"


@pytest.mark.parametrize(
    ("kind", "writes"), [("int8", ("rotate", "write_codes")), ("fp8", ("rotate_and_write",))]
)
def test_build_for_a_target_has_pages_of_codes(
    kind: str, writes: tuple[str, ...], checkpoint: Callable[..., Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of a model in bfloat16, so that angles and writes are one launch where rows stay whole."""
    tmp_path.chmod(0o755)
    words = ["--batch-buckets", "2", "--max-len", "64", "--spec-tokens", "1", "--no-sampling"]
    words += ["--dtype", "bfloat16", "--kv-cache-dtype", kind, "--out", str(tmp_path / "cache")]
    assert main(["build", str(checkpoint("mimo")), *words, "--target", "cuda:80"]) == 0
    out = capsys.readouterr().out
    for name in (*writes, "paged_attention", "combine"):
        assert re.search(rf"{name}_kernel +cuda:80", out)
    assert "instead" not in out, "nothing is left to a reference"


def _printed_by(program: str) -> Any:
    """What a program among the helpers prints last, as JSON."""
    command = [sys.executable, "-m", f"helpers.{program}"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_inductor_copies_no_cache_before_a_launch() -> None:
    """Of a step that writes its caches, reads them, and writes them again, thrice; and of such
    steps on int8 and on float8."""
    before, copied, *coded = _printed_by("reinplacing")
    assert all(before), "unless somebody looks, all that is written is copied"
    assert copied == [[]] * (3 * 3 + 3), "3 layers of 3 launches, and 3 of the delta rule"
    assert len(coded) == 4
    assert all(coded[0])
    assert all(coded[2])
    assert coded[3] == [[]] * (3 * 4), "attention has two launches"
    assert coded[1] == [[]] * (3 * 7), "spread rows are turned and written by four"


def test_inductor_sees_what_our_kernels_write_and_nothing_else() -> None:
    """Else it would copy a whole cache, or all experts, before every launch."""
    assert _printed_by("mutation_analysis") == [
        ["cache_ptr"],
        ["out_ptr"],
        ["acc_ptr", "stats_ptr"],
        ["out_ptr"],
        ["experts_ptr", "picks_ptr"],
        ["hidden_ptr"],
        ["part_ptr"],
        ["out_ptr"],
        ["terms_ptr"],
        ["out_ptr", "state_ptr"],
        ["history_ptr", "out_ptr", "standing_ptr"],
        ["terms_ptr"],
        ["inverse_ptr", "scores_ptr"],
        ["out_ptr", "state_ptr"],
        ["history_ptr", "out_ptr", "standing_ptr"],
        ["counts_ptr"],
        ["logprobs_ptr", "top_ids_ptr", "top_ptr"],
        ["integers_ptr", "steps_ptr", "sums_ptr"],
        ["out_ptr"],
        ["integers_ptr", "steps_ptr", "sums_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["experts_ptr", "picks_ptr"],
        ["integers_ptr", "steps_ptr", "sums_ptr"],
        ["hidden_ptr"],
        ["integers_ptr", "steps_ptr", "sums_ptr"],
        ["part_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["k_cache_ptr", "out_ptr", "v_cache_ptr"],
        ["scores_ptr"],
        ["out_ptr"],
        ["peaks_ptr", "raw_peaks_ptr", "scores_ptr"],
        ["counts_ptr", "masses_ptr"],
        ["bins_ptr", "places_ptr", "sums_ptr"],
        ["above_ptr", "near_ptr"],
        ["cuts_ptr"],
        ["bests_ptr", "tokens_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["out_ptr", "total_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        [
            "accepted_ptr",
            "anchors_ptr",
            "emitted_ptr",
            "left_ptr",
            "lens_ptr",
            "out_ids_ptr",
            "reason_ptr",
        ],
        ["acc_ptr", "stats_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["out_ptr", "total_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["places_ptr", "values_ptr"],
        ["places_ptr", "values_ptr"],
        ["firsts_ptr", "peaks_ptr"],
        ["places_ptr", "values_ptr"],
        ["terms_ptr"],
        ["out_ptr", "state_ptr"],
        ["history_ptr", "out_ptr", "standing_ptr"],
        ["terms_ptr"],
        ["scores_ptr"],
        ["out_ptr", "state_ptr"],
        ["history_ptr", "out_ptr", "standing_ptr"],
        ["experts_ptr", "picks_ptr"],
        ["hidden_ptr"],
        ["part_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["out_ptr"],
        ["cache_ptr", "scale_ptr"],
        ["cache_ptr", "scale_ptr"],
        ["acc_ptr", "stats_ptr"],
        ["out_ptr"],
        ["cache_ptr", "scale_ptr"],
    ]
