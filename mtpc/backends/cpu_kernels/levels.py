"""Instruction-set levels: what kernels are compiled for, and which of them a processor runs.

A library of one level is the same on every processor that has the level's instructions, and so
are its results, bit for bit: nothing in it looks at the processor again.
"""

from __future__ import annotations

import platform
from collections.abc import Set
from dataclasses import dataclass

from mtpc.environment import cpu_level
from mtpc.errors import BackendError


@dataclass(frozen=True)
class Level:
    """One set of instructions.

    Attributes:
        name: as in `MTPC_CPU_LEVEL`.
        march: the compiler's name for it.
        extensions: instruction sets beyond that.
        vector_bits: the widest vectors.
        needs: flags of /proc/cpuinfo that a processor must show.
    """

    name: str
    march: str
    extensions: tuple[str, ...] = ()
    vector_bits: int = 128
    needs: frozenset[str] = frozenset()

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's options."""
        wide = ("-mprefer-vector-width=512",) if self.vector_bits == 512 else ()
        return (f"-march={self.march}", *(f"-m{name}" for name in self.extensions), *wide)


_AVX2_FLAGS = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_VNNI_FLAGS = _AVX2_FLAGS | {
    "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"
}  # fmt: skip
_BF16_FLAGS = _VNNI_FLAGS | {"avx512_bf16"}
_AMX_FLAGS = _BF16_FLAGS | {"amx_tile", "amx_bf16", "amx_int8"}
_AMX_SETS = ("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8")
_AMX = Level("amx", "x86-64-v4", _AMX_SETS, 512, _AMX_FLAGS)
_AVX512 = Level("avx512", "x86-64-v4", ("avx512bf16", "avx512vnni"), 512, _BF16_FLAGS)
_AVX512_VNNI = Level("avx512_vnni", "x86-64-v4", ("avx512vnni",), 512, _VNNI_FLAGS)
_AVX2 = Level("avx2", "x86-64-v3", (), 256, _AVX2_FLAGS)
_PORTABLE = Level("portable", "x86-64")

X86 = (_AMX, _AVX512, _AVX512_VNNI, _AVX2, _PORTABLE)
"""Best first. `march` is the psABI's name of a level."""
INTEL = (_AMX, _AVX512_VNNI, _AVX512, _AVX2, _PORTABLE)
"""Best first on Intel's processors.

Their instruction for pairs of bfloat16 does 32 products in 2.2 cycles, where two multiply-adds of
16 floats do as many in 1.1 (measured on an Emerald Rapids whose virtual machine hides AMX).
"""
NATIVE = Level("native", "native")
"""The instructions of this machine; used on other processors than x86-64."""


def runnable(flags: Set[str]) -> tuple[Level, ...]:
    """The levels that a processor runs, best first, by the flags of its /proc/cpuinfo, with its
    `vendor_id`."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return (NATIVE,)
    levels = INTEL if "GenuineIntel" in flags else X86
    return tuple(level for level in levels if level.needs <= flags)


def chosen_level(flags: Set[str]) -> Level:
    """The level to use: the best that runs here, or the one that `MTPC_CPU_LEVEL` names.

    Raises:
        BackendError: that one does not run here, or there is none of its name.
    """
    levels = runnable(flags)
    wanted = cpu_level()
    found = [level for level in levels if wanted in (None, level.name)]
    if not found:
        names = ", ".join(level.name for level in levels)
        raise BackendError(
            f"MTPC_CPU_LEVEL is {wanted!r}; this processor runs {names}: set it to one of these, "
            "or unset it"
        )
    return found[0]
