"""Key fields that are not the model's: mtpc's sources, versions of libraries, this machine."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType

import torch

import mtpc
from mtpc.environment import cpu_level, cxx_compiler
from mtpc.errors import CacheError
from mtpc.store.key import hash_of
from mtpc.store.sources import own_sources

COMPILER = "machine.compiler"
"""The only field that may be absent: without a compiler, entries of any compiler match."""

_MODELLING = ("models/*/modeling_*.py", "modeling_*.py", "integrations/moe.py")
"""Files of transformers that write a model's graph."""
_INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "vnni", "gfni", "neon",
                     "asimd", "sve", "bf16", "i8mm")  # fmt: skip
"""Prefixes of the cpu flags that affect code generation."""


def environment_fields() -> dict[str, str]:
    """All key fields except those of the model, the options and the step.

    A step holds no code, so it depends on what traced it and not on the machine.
    """
    return {
        "version.mtpc": mtpc.__version__,
        "version.transformers": metadata.version("transformers"),  # It is not imported.
        **torch_field(),
        **own_sources(),
        **own_modelling(),
        "torch.default_dtype": str(torch.get_default_dtype()),
    }


def torch_field() -> dict[str, str]:
    """torch's version, with its commit."""
    return {"version.torch": f"{torch.__version__} {torch.version.git_version[:12]}"}


@cache
def own_modelling() -> Mapping[str, str]:
    """`modelling_field`, which this process reads once, as `own_sources`."""
    return MappingProxyType(modelling_field())


def modelling_field() -> dict[str, str]:
    """A digest of transformers' modelling code: its version does not show edits (25 MB, 30 ms).

    Raises:
        CacheError: a pattern matches no file, so that edits would be missed.
    """
    spec = util.find_spec("transformers")
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    files: list[Path] = []
    for pattern in _MODELLING:
        found = [path for folder in folders for path in sorted(folder.glob(pattern))]
        if not found:
            raise CacheError(f"transformers has no {pattern}, so edits of its code would be missed")
        files += found
    return {"source.transformers": hash_of(path.read_bytes() for path in files)}


def machine_fields() -> dict[str, str]:
    """Properties of this machine that compiled kernels depend on."""
    fields = {"machine.platform": f"{sys.platform} {platform.machine()}", **processor_fields()}
    compiler = compiler_version()
    return fields if compiler is None else {**fields, COMPILER: compiler}


def processor_fields() -> dict[str, str]:
    """The processor that code is generated for.

    That is this processor, or any processor of the level that `MTPC_CPU_LEVEL` names. The level
    "native" means this processor.
    """
    level = cpu_level()
    if level not in (None, "native"):
        return {"machine.level": level}
    model, flags = _cpu()
    wanted = sorted(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS))
    return {"machine.cpu": model, "machine.instruction_sets": " ".join(wanted)}


def cpu_name() -> str:
    """The processor's name."""
    return _cpu()[0]


def cpu_flags() -> frozenset[str]:
    """Linux's names of the processor's features that this process may use, and of its vendor."""
    flags = _cpu()[1]
    tiles = {flag for flag in flags if flag.startswith("amx_")}
    return flags if not tiles or may_use_tiles() else flags - tiles


def may_use_tiles() -> bool:
    """Ask Linux for the permission to use AMX tile registers; returns whether it grants it.

    Linux before 5.16 and some sandboxes refuse, even on processors with AMX. Source:
    Documentation/arch/x86/xstate.rst.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def compiler_version() -> str | None:
    """The first line of `--version` of the C++ compiler; None if no compiler runs."""
    path = shutil.which(cxx_compiler())
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _cpu() -> tuple[str, frozenset[str]]:
    """The processor's name; its feature flags and its vendor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    info = {name.strip(): value.strip() for name, _, value in (ln.partition(":") for ln in lines)}
    flags = (info.get("flags") or info.get("Features") or "").split()
    flags.append(info.get("vendor_id", ""))
    return info.get("model name") or platform.processor() or "unknown", frozenset(flags)
