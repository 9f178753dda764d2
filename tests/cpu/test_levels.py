"""Instruction-set levels: which one runs where, and that each computes what it must."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from helpers.places import TESTS

from mtpc.backends.cpu_kernels import build_kernels
from mtpc.backends.cpu_kernels.build import LIBRARY, kernel_fields
from mtpc.backends.cpu_kernels.compile import Build
from mtpc.backends.cpu_kernels.levels import NATIVE, X86, chosen_level, runnable
from mtpc.cli.doctor import Finding, examine
from mtpc.errors import BackendError
from mtpc.store.entries import Entry
from mtpc.store.machine import cpu_flags, machine_fields

SAPPHIRE_RAPIDS = frozenset.union(*(level.needs for level in X86)) | {"sse2"}
ZEN4 = SAPPHIRE_RAPIDS - {"amx_tile", "amx_bf16", "amx_int8"}
ICE_LAKE = ZEN4 - {"avx512_bf16"} | {"GenuineIntel"}
NAMES = {level.name: level for level in X86}
KERNEL_TESTS = [
    "cpu/test_grouped.py",
    "cpu/test_kernels.py",
    "ops/test_gated_delta.py",
    "ops/test_row_linears.py",
    "ops/test_slot_attention.py",
    "passes/test_packed_weights.py",
    "sampling/test_kernels.py",
]
"""What compares kernels with references in float64, and rows with themselves."""


def names(flags: frozenset[str], machine: str = "x86_64") -> list[str]:
    with mock.patch("platform.machine", return_value=machine):
        return [level.name for level in runnable(flags)]


def test_which_levels_run_where() -> None:
    assert names(SAPPHIRE_RAPIDS) == ["amx", "avx512", "avx512_vnni", "avx2", "portable"]
    assert names(ZEN4) == ["avx512", "avx512_vnni", "avx2", "portable"]
    assert names(ICE_LAKE) == ["avx512_vnni", "avx2", "portable"]
    # Skylake has AVX-512 without products of int8: its lanes would be those of another level.
    assert names(ICE_LAKE - {"avx512_vnni"}) == ["avx2", "portable"]
    assert names(frozenset({"sse2", "avx"})) == ["portable"]
    assert names(frozenset({"asimd"}), "aarch64") == ["native"]


def test_intel_without_tile_registers_multiplies_floats() -> None:
    """Its instruction for pairs of bfloat16 takes twice the time of two multiply-adds."""
    assert names(ZEN4 | {"GenuineIntel"}) == ["avx512_vnni", "avx512", "avx2", "portable"]
    assert names(SAPPHIRE_RAPIDS | {"GenuineIntel"})[0] == "amx"
    assert names(ZEN4 | {"AuthenticAMD"})[0] == "avx512"


def test_the_flags_say_who_made_the_processor() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    vendors = {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}
    assert vendors <= cpu_flags()


def test_tile_registers_are_used_where_linux_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.16, and in some sandboxes, it does not, whatever /proc/cpuinfo says."""
    monkeypatch.setattr("mtpc.store.machine._cpu", lambda: ("Xeon", SAPPHIRE_RAPIDS))
    for granted, best in ((True, "amx"), (False, "avx512")):
        monkeypatch.setattr("mtpc.store.machine.may_use_tiles", lambda granted=granted: granted)
        assert names(cpu_flags())[0] == best


def test_the_best_one_is_taken_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("MTPC_CPU_LEVEL", raising=False)
    assert chosen_level(ZEN4).name == "avx512"
    monkeypatch.setenv("MTPC_CPU_LEVEL", "avx2")
    assert chosen_level(ZEN4).name == "avx2"
    with pytest.raises(BackendError, match="'avx2'; this processor runs portable"):
        chosen_level(frozenset())
    monkeypatch.setenv("MTPC_CPU_LEVEL", "mmx")
    with pytest.raises(
        BackendError, match="'mmx'; this processor runs avx512, avx512_vnni, avx2, portable"
    ):
        chosen_level(ZEN4)


def test_the_key_of_a_level_names_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine's library of a level is every machine's; elsewhere it is this machine's own."""
    before = kernel_fields(NAMES["avx2"]), kernel_fields(NATIVE)
    monkeypatch.setattr("mtpc.store.machine._cpu", lambda: ("Zen 9", frozenset({"avx2"})))
    assert kernel_fields(NAMES["avx2"]) == before[0]
    assert kernel_fields(NATIVE) != before[1]
    assert kernel_fields(NAMES["avx512"]) != before[0]
    monkeypatch.setenv("MTPC_CPU_LEVEL", "native")  # A name for this machine, not for a level.
    assert "Zen 9" in kernel_fields(NATIVE).values()


def test_steps_of_a_named_level_are_for_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTPC_CPU_LEVEL", raising=False)
    assert "machine.cpu" in machine_fields()
    monkeypatch.setenv("MTPC_CPU_LEVEL", "avx2")
    fields = machine_fields()
    assert fields["machine.level"] == "avx2"
    assert fields.keys().isdisjoint({"machine.cpu", "machine.instruction_sets"})


def test_the_doctor_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels() -> Finding:
        (found,) = (f for f in examine() if f.what == "C++ kernels")
        return found

    assert kernels().found.startswith(f"level {chosen_level(cpu_flags()).name} of ")
    monkeypatch.setenv("MTPC_CPU_LEVEL", "mmx")
    assert kernels().status == "wrong"


def disassemble(library: Path) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


OTHERS = [level.name for level in runnable(cpu_flags())[1:]]
"""The levels that this processor runs, but for the one that all other tests run."""


@pytest.mark.slow
@pytest.mark.parametrize("level", OTHERS)
def test_each_level_computes_what_it_must(level: str) -> None:
    """The kernels' own tests once more, in a process whose kernels are of that level."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-k",
               "not emitted and not the_pass", *KERNEL_TESTS]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=TESTS,
        env={**os.environ, "MTPC_CPU_LEVEL": level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86-64's")
@pytest.mark.parametrize("level", NAMES)
def test_each_level_compiles_here(level: str, tmp_path: Path) -> None:
    """Whatever this processor runs; tile registers are the best level's alone."""
    Build("g++", NAMES[level], lambda line: None)._compile(tmp_path)
    listing = disassemble(tmp_path / LIBRARY)
    for instruction in ("tdpbf16ps", "tdpbsud", "ldtilecfg"):
        assert (instruction in listing) == (level == "amx")


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in OTHERS, reason="this processor has no level above avx2")
def test_a_lower_level_has_none_of_the_higher_ones_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inline functions of the standard library, too: a linker would keep any one of them."""
    monkeypatch.setenv("MTPC_CPU_LEVEL", "avx2")
    built = build_kernels()
    assert isinstance(built, Entry)
    listing = disassemble(built.directory / LIBRARY)
    assert "%ymm" in listing
    assert "%zmm" not in listing
    assert "{%k" not in listing
