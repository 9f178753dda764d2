"""`mtpc doctor`: what this machine has, what is missing, and how to get it.

It must work on a machine with few packages. Only the checks that need other packages import them;
the rest uses the standard library alone. The table is plain text.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Literal

import mtpc
from mtpc.cli.demo import demo_checkpoint
from mtpc.environment import cxx_compiler
from mtpc.errors import BackendError, CacheError, MtpcError

Version = tuple[int, ...]

PYTHON: Version = (3, 11)
RANGES: dict[str, tuple[Version, Version | None]] = {
    "torch": ((2, 11), (2, 16)),
    "transformers": ((5, 17), (6,)),
    "safetensors": ((0, 5), None),
    "networkx": ((3, 2), None),
    "sympy": ((1, 13), None),
    "numpy": ((1, 26), None),
    "rich": ((13,), None),
}
"""The distributions that mtpc needs, each with the lowest version and the first too new one."""


@dataclass(frozen=True)
class Finding:
    """One row of the table: a checked item, what was found, and how to get what is missing.

    Its status is "ok"; "optional" if it is missing but not needed; "wrong" if mtpc cannot run until
    it is fixed.
    """

    what: str
    status: Literal["ok", "optional", "wrong"]
    found: str
    advice: str = ""


def command(args: argparse.Namespace) -> int:
    """Run the subcommand, and return 0 if mtpc can run on this machine, else 1."""
    findings = list(examine())
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.status:8}  {finding.what:{width}}  {finding.found}")
        if finding.advice:
            print(f"{'':8}  {'':{width}}  -> {finding.advice}")
    wrong = [finding.what for finding in findings if finding.status == "wrong"]
    print(f"\nmtpc {mtpc.__version__} ", end="")
    print(f"cannot run here: {', '.join(wrong)}" if wrong else "can run here")
    return 1 if wrong else 0


def examine() -> Iterator[Finding]:
    """Yield the results of all checks. Without torch, the checks of hardware are left out."""
    yield _check_python()
    needed = [check_distribution(name) for name in RANGES]
    yield from needed
    yield _check_demo()
    triton = check_triton()
    if all(finding.status == "ok" for finding in needed):
        yield from (_check_compiler(), _check_kernels(), _check_cpu(), _check_gpu())
        yield _check_gpu_kernels(triton)
    yield from (triton, check_aiter())


def _check_python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= PYTHON:
        return Finding("python", "ok", found)
    return Finding("python", "wrong", found, f"install python {_dotted(PYTHON)} or newer")


def check_distribution(name: str) -> Finding:
    """Check that a distribution is installed, has a supported version, and can be imported."""
    low, high = RANGES[name]
    wanted = f"{name}>={_dotted(low)}" + (f",<{_dotted(high)}" if high else "")
    advice = f'pip install "{wanted}"'
    version = _version(name)
    if version is None:
        return Finding(name, "wrong", "not installed", advice)
    release = _release(version)
    if release < low or (high is not None and release >= high):
        return Finding(name, "wrong", f"{version}; mtpc needs {wanted}", advice)
    try:
        import_module(name)
    except (ImportError, OSError) as error:
        return Finding(name, "wrong", f"{version}, cannot be imported: {error}", f"re{advice}")
    return Finding(name, "ok", version)


def _release(version: str) -> Version:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _check_demo() -> Finding:
    try:
        return Finding("demo model", "ok", str(demo_checkpoint()))
    except MtpcError as error:
        return Finding("demo model", "optional", "not in this installation", str(error))


def _check_compiler() -> Finding:
    """Check the compiler of mtpc's kernels ($CXX, else g++), by running it once."""
    from mtpc.store.machine import compiler_version

    version, path = compiler_version(), shutil.which(cxx_compiler())
    if version is not None:
        return Finding("C++ compiler", "ok", f"{version} ({path})")
    reason = f"{path} --version fails" if path else f"no {cxx_compiler()} in PATH"
    advice = "install g++ >= 12 or clang++ >= 15, or set CXX; --backend eager needs no compiler"
    return Finding("C++ compiler", "optional", reason, advice)


def _check_kernels() -> Finding:
    """Check which C++ kernels this processor can run, and whether they are in the cache."""
    from mtpc.backends.cpu_kernels.build import build_kernels
    from mtpc.backends.cpu_kernels.levels import chosen_level, runnable
    from mtpc.backends.cpu_kernels.shipped import is_shipped
    from mtpc.store.machine import cpu_flags

    names = [level.name for level in runnable(cpu_flags())]
    try:
        level = f"level {chosen_level(cpu_flags()).name} of {', '.join(names)}"
    except BackendError as error:
        advice = f"unset MTPC_CPU_LEVEL, or set it to one of {', '.join(names)}"
        return Finding("C++ kernels", "wrong", str(error), advice)
    try:
        kernels = build_kernels(frozen=True)
        origin = "came with this installation" if is_shipped(kernels) else "built"
        return Finding("C++ kernels", "ok", f"{level}; {origin}: {kernels}")
    except CacheError as error:
        note = "built at the first use of --backend cpu"
        return Finding("C++ kernels", "optional", f"{level}; {' '.join(str(error).split())}", note)


def _check_cpu() -> Finding:
    torch = import_module("torch")
    from mtpc.store.machine import cpu_flags

    flags = cpu_flags()
    extra = [f for f in ("avx512_bf16", "amx_tile", "amx_bf16", "amx_int8") if f in flags]
    parts = [
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        f"with {', '.join(extra)}" if extra else "without avx512_bf16 and amx",
        f"{torch.get_num_threads()} threads",
    ]
    return Finding("CPU", "ok", ", ".join(parts))


def _check_gpu() -> Finding:
    torch = import_module("torch")
    hip, cuda = torch.version.hip, torch.version.cuda
    build = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU only"
    if not torch.cuda.is_available():
        found = f"none that torch can use (this torch is built for {build})"
        return Finding("GPU", "optional", found, "not needed: steps run on the CPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("GPU", "ok", f"{', '.join(names)} ({build})")


def check_triton() -> Finding:
    """Check for Triton. It comes with torch's builds for GPUs, under one of three names."""
    for name in ("triton", "triton-rocm", "pytorch-triton-rocm"):
        version = _version(name)
        if version is None:
            continue
        try:
            import_module("triton")
        except (ImportError, OSError) as error:
            found = f"{name} {version}, cannot be imported: {error}"
            return Finding("triton", "optional", found, f"pip install --force-reinstall {name}")
        return Finding("triton", "ok", f"{name} {version}")
    advice = "comes with torch's builds for GPUs; not needed on the CPU"
    return Finding("triton", "optional", "not installed", advice)


def _check_gpu_kernels(triton: Finding) -> Finding:
    """Check the kernels that `mtpc build --target` can compile, and those of aiter in use."""
    from mtpc.backends.targets import TARGETS

    if triton.status != "ok":
        return Finding("GPU kernels", "optional", "Triton is missing", "pip install triton")
    from mtpc.backends.aiter import aiter_bindings
    from mtpc.backends.triton_kernels import kernel_table, load_kernels

    load_kernels()
    found = aiter_bindings()
    own = f"{len(kernel_table())} of mtpc, which compile for {', '.join(TARGETS)}"
    return Finding("GPU kernels", "ok", f"{own}; {len(found.bindings)} of aiter: {found.message}")


def check_aiter() -> Finding:
    """Check for AMD's kernels, which are the distribution `amd-aiter`.

    The distribution `aiter` on the public index is a different project.
    """
    advice = "for AMD GPUs: build amd-aiter from https://github.com/ROCm/aiter"
    ours, other = (_version(name) for name in ("amd-aiter", "aiter"))
    if ours and other:  # Each has overwritten files of the other.
        found = f"amd-aiter {ours}, and aiter {other} of the same import name"
        return Finding("aiter", "optional", found, "uninstall both, then install amd-aiter")
    if ours:
        return Finding("aiter", "ok", f"amd-aiter {ours}")
    if other:
        found = f"aiter {other} is the async-iterator helpers of that name, not AMD's kernels"
        return Finding("aiter", "optional", found, f"pip uninstall aiter; {advice}")
    return Finding("aiter", "optional", "amd-aiter is not installed", advice)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
