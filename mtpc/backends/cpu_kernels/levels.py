"""Instruction-set levels: what kernels are compiled for, and which of them a processor runs.

A library of one level is the same on every processor that has the level's instructions, and so
are its results, bit for bit: nothing in it looks at the processor again.
"""

from __future__ import annotations

import platform
from collections.abc import Set
from dataclasses import dataclass

from mtpc.config import cpu_level
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


_AVX2 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_AVX512 = frozenset(
    {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
)
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_BF16 = ("avx512bf16", "avx512vnni")
X86 = (
    Level(
        "amx",
        "x86-64-v4",
        (*_BF16, "amx-tile", "amx-bf16", "amx-int8"),
        512,
        _AVX2 | _AVX512 | _AMX,
    ),
    Level("avx512", "x86-64-v4", _BF16, 512, _AVX2 | _AVX512),
    Level("avx2", "x86-64-v3", (), 256, _AVX2),
    Level("portable", "x86-64"),
)
"""Best first. `march` is the psABI's name of a level."""
NATIVE = Level("native", "native")
"""What this very machine has: elsewhere than on x86-64."""


def runnable(flags: Set[str], machine: str | None = None) -> tuple[Level, ...]:
    """The levels that a processor runs, best first.

    Args:
        flags: of its /proc/cpuinfo.
        machine: `platform.machine()` of it; by default of this one.
    """
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return (NATIVE,)
    return tuple(level for level in X86 if level.needs <= flags)


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
