"""What a compilation depends on besides the model: sources, versions, this machine."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

import mtpc
from mtpc.config import compiler_environment, cpu_level, cxx_compiler
from mtpc.store.key import hash_of

COMPILER = "machine.compiler"
"""The one field that may be unknown: where no compiler is installed, any will do."""

_PACKAGE = Path(mtpc.__file__).parent
_SOURCES = {
    "capture": ("capture/*.py",),
    "models": ("models/*.py", "models/families/*.py"),
    "weights": ("weights/*.py",),
    "ops": ("ops/*.py",),
    "passes": ("passes/*.py",),
    "step": ("step/*.py", "layout.py", "buffers.py", "compiler.py"),
    "backends": ("backends/*.py", "backends/cpu_kernels/*.py"),
    "kernels": ("backends/cpu_kernels/*.cpp", "backends/cpu_kernels/*.h"),
}
_NOTES_OF_INDUCTOR = ("aot_inductor.metadata",)
"""Settings that a compilation leaves changed, and that change nothing of what is compiled."""
_INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "vnni", "gfni", "neon",
                     "asimd", "sve", "bf16", "i8mm")  # fmt: skip
"""Beginnings of the cpu flags that code generation looks at."""


def environment_fields() -> dict[str, str]:
    """All that a compilation depends on besides the model and the options."""
    return {**version_fields(), **source_fields(), **modelling_field(), **machine_fields()}


def source_fields(package: Path = _PACKAGE) -> dict[str, str]:
    """A digest of each part of mtpc that has a say in what is compiled."""
    return {
        f"source.{part}": hash_of(
            data
            for pattern in patterns
            for path in sorted(package.glob(pattern))
            for data in (path.name.encode(), path.read_bytes())
        )
        for part, patterns in _SOURCES.items()
    }


def version_fields() -> dict[str, str]:
    """Versions of mtpc, torch and transformers; the last is not imported for it."""
    return {
        "version.mtpc": mtpc.__version__,
        "version.torch": f"{torch.__version__} {torch.version.git_version[:12]}",
        "version.transformers": metadata.version("transformers"),
    }


def modelling_field() -> dict[str, str]:
    """A digest of transformers' modelling code: its version does not see edits (25 MB, 30 ms)."""
    spec = util.find_spec("transformers")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [
        path
        for folder in folders
        for pattern in ("models/*/modeling_*.py", "modeling_*.py", "integrations/moe.py")
        for path in sorted(Path(folder).glob(pattern))
    ]
    return {"source.transformers": hash_of(path.read_bytes() for path in files)}


def machine_fields() -> dict[str, str]:
    """This machine and process, as far as generated code depends on them."""
    fields = {
        "machine.platform": f"{sys.platform} {platform.machine()}",
        **processor_fields(),
        "machine.threads": str(torch.get_num_threads()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.inductor": _inductor_settings(),
    }
    fields.update({f"environment.{k}": v for k, v in compiler_environment().items()})
    compiler = compiler_version()
    return fields if compiler is None else {**fields, COMPILER: compiler}


def processor_fields() -> dict[str, str]:
    """What code is generated for: this very processor, or the level that `MTPC_CPU_LEVEL` names,
    which others may have, too. "native" is a name for this one."""
    level = cpu_level()
    if level not in (None, "native"):
        return {"machine.level": level}
    model, flags = _cpu()
    wanted = sorted(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS))
    return {"machine.cpu": model, "machine.instruction_sets": " ".join(wanted)}


def cpu_flags() -> frozenset[str]:
    """Instruction sets and other features of this processor that this process may use, as Linux
    names them."""
    flags = _cpu()[1]
    tiles = {flag for flag in flags if flag.startswith("amx_")}
    return flags if not tiles or may_use_tiles() else flags - tiles


def may_use_tiles() -> bool:
    """Whether Linux lets this process use AMX's tile registers: one has to ask for them.

    Linux before 5.16 and some sandboxes do not, whatever the processor has. Source:
    Documentation/arch/x86/xstate.rst.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def compiler_version() -> str | None:
    """The first line of the C++ compiler's `--version`; None where there is none that runs."""
    path = shutil.which(cxx_compiler())
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _cpu() -> tuple[str, frozenset[str]]:
    """The processor's name, and all it has."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    info = {name.strip(): value.strip() for name, _, value in (ln.partition(":") for ln in lines)}
    flags = (info.get("flags") or info.get("Features") or "").split()
    return info.get("model name") or platform.processor() or "unknown", frozenset(flags)


def _inductor_settings() -> str:
    """Settings of Inductor that this process changed; it cannot have where it is not imported.

    Not `config.codegen_config()`: that lists what a compilation set and put back, too, and what
    comes from the environment, which has fields of its own.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    changed = {}
    for name, value in config.get_config_copy().items() if config else ():
        entry = config._config[name]
        known = (entry.default, entry.env_value_default, entry.env_value_force)
        if value not in known and name not in _NOTES_OF_INDUCTOR:
            changed[name] = value
    return " ".join(f"{name}={value!r}" for name, value in sorted(changed.items()))
