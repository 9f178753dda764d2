"""Kernels compiled into the graph cache for a device that need not be present.

Triton brings its own code generators and assembler, so neither ROCm nor CUDA has to be installed.
Each distinct kernel is an entry of its own. The machine with the device computes the entry's key
from a launch. So a kernel that several buckets or checkpoints need is compiled once.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, triton_key

from mtpc.backends.targets import Target
from mtpc.backends.triton_kernels.launch import (
    ALIGNMENT,
    FUSION,
    Launch,
    early_constants,
    early_options,
)
from mtpc.errors import BackendError, DamagedEntryError
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import digest, hash_of
from mtpc.store.lookup import find, keep

KIND = "gpu-kernel"
FORMAT = "2"
"""Version of an entry's files; part of the key. Entries without it list one resource more."""
RESOURCES, METADATA = "kernel.json", "triton.json"
_NEAR = 2**31 - 1
"""The most bytes of a tensor that AMD's code addresses by 32 bits."""
_ELEMENTS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "u1",  # Launchers call it so; they would not find code for "i1".
}  # fmt: skip
_AMD_FIELDS = ("vgpr_count", "vgpr_spill_count")


@dataclass(frozen=True)
class Resources:
    """Resources of one program of a compiled kernel.

    Attributes:
        nbytes: of the code object.
        shared_bytes: shared memory (LDS).
        registers: per thread; on AMD vector registers, accumulation registers included.
        spills: what did not fit: vector registers on AMD, bytes of stack per thread on NVIDIA.
    """

    nbytes: int
    shared_bytes: int
    registers: int
    spills: int


@dataclass(frozen=True)
class Compiled:
    """One kernel in the cache, and whether it was there before."""

    kernel: str
    target: Target
    entry: Entry
    resources: Resources
    was_there: bool


@dataclass(frozen=True)
class Specialisation:
    """A kernel with all that its code depends on, as Triton's own launcher would see it.

    Attributes:
        kernel: the `triton.jit` function.
        target: what it is compiled for.
        signature: Triton's type of each parameter, by name.
        constants: values of `constexpr` parameters, and of integers that are 1.
        marks: of each parameter that the code is specialised for: "D" for multiples of ALIGNMENT,
            "S" on AMD for tensors of up to `_NEAR` bytes.
        threads: in a program.
        num_stages: of software pipelining.
        amd: further options for AMD.
    """

    kernel: Any
    target: Target
    signature: dict[str, str]
    constants: dict[str, Any]
    marks: dict[str, str]
    threads: int
    num_stages: int
    amd: Mapping[str, int]

    @classmethod
    def of(cls, launch: Launch, target: Target) -> Specialisation:
        """The code that a launch needs. Tensors are taken to start at a multiple of 16 bytes."""
        early = early_constants(launch, target)
        constants, signature, marks = {**launch.constants, **early}, {}, {}
        for parameter in launch.kernel.params:
            name = parameter.name
            value, is_plain = launch.arguments.get(name, 1), parameter.do_not_specialize
            if isinstance(value, Tensor):
                signature[name] = f"*{_ELEMENTS[value.dtype]}"
                is_near = value.untyped_storage().nbytes() <= _NEAR
                marks[name] = "DS" if target.vendor == "hip" and is_near else "D"
            elif name in constants or (value == 1 and not is_plain):
                signature[name] = "constexpr"
                constants.setdefault(name, 1)
            else:
                signature[name] = "i32" if abs(value) <= _NEAR else "i64"
                if not is_plain:  # Triton specialises plain ones for their type alone.
                    marks[name] = "D" if value % ALIGNMENT == 0 else ""
        tail = (marks, launch.threads, launch.num_stages, launch.amd)
        return cls(launch.kernel, target, signature, constants, *tail)

    @property
    def fields(self) -> dict[str, str]:
        """The key of its code object."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "target": self.target.name,
            "kernel": self.kernel.__name__,
            # Triton's digest of its source and of all device functions that it calls.
            "source": self.kernel.cache_key,
            "signature": json.dumps(self.signature),
            "constants": json.dumps(self.constants, sort_keys=True),
            "marks": json.dumps(self.marks),
            "threads": str(self.threads),
            "num_stages": str(self.num_stages),
            "triton.options": self._parsed_options().hash(),
            **compiler_fields(self.target),
        }

    def triton_source(self) -> ASTSource:
        """The kernel as Triton's compiler takes it.

        Triton's own launcher assembles it, because its versions note constants in different ways,
        and so look for different code.
        """
        names = self.kernel.arg_names
        known = [(self.signature[n], self.constants.get(n, self.marks.get(n))) for n in names]
        constants = {name: self.constants.get(name) for name in names}
        backend = make_backend(gpu_target(self.target))
        _, *parts = self.kernel._pack_args(backend, {}, constants, known, None)
        return ASTSource(self.kernel, *parts)

    def triton_options(self) -> dict[str, Any]:
        """Options of a compilation, as a launch gives them."""
        return {
            "num_warps": max(1, self.threads // self.target.warp_size),
            "num_stages": self.num_stages,
            **self.amd,
            **FUSION,
            **early_options(self.constants),
        }

    def triton_hash(self) -> str:
        """The hash under which the Triton of this process files the code and looks for it."""
        backend, environment = make_backend(gpu_target(self.target)), _environment()
        key = get_cache_key(self.triton_source(), backend, self._parsed_options(), environment)
        return hashlib.sha256(key.encode()).hexdigest()

    def _parsed_options(self) -> Any:
        return make_backend(gpu_target(self.target)).parse_options(self.triton_options())


def compiler_fields(target: Target) -> dict[str, str]:
    """What the code for a target depends on in this process's Triton.

    A version is not enough: builds of one version differ, and so do assemblers beside one build.
    """
    return {
        **triton_fields(),
        "triton.backend": " ".join(make_backend(gpu_target(target)).hash().split()),
        "triton.environment": json.dumps(_environment(), sort_keys=True),
    }


def triton_fields() -> dict[str, str]:
    """The Triton of this process, whatever the target, and whatever its distribution is called."""
    return {
        "version.triton": triton.__version__,
        # Triton's digest of its own files: compiler, language, code generators.
        "triton.build": hash_of([triton_key().encode()]),
    }


def _environment() -> dict[str, Any]:
    """Variables that change what Triton compiles, as it lists them."""
    return dict(get_cache_invalidating_env_vars())


def cross_compile(
    launches: Iterable[Launch], target: Target, store: EntryStore
) -> tuple[Compiled, ...]:
    """Code objects of all launches, each distinct one once, from the cache or into it.

    Raises:
        BackendError: Triton is interpreting, or refuses a kernel for this target, or a kernel
            takes more shared memory than the target has.
        CacheError: another user could have written the cache.
        CacheWriteError: the cache cannot be written.
    """
    made: dict[str, Compiled] = {}
    for launch in launches:
        if not hasattr(launch.kernel, "cache_key"):
            raise BackendError(
                "Triton only interprets kernels in this process (TRITON_INTERPRET is set); unset "
                "it to compile them"
            )
        wanted = Specialisation.of(launch, target)
        name = digest(wanted.fields)
        if name not in made:
            made[name] = _obtain(wanted, store)
    return tuple(made.values())


def _obtain(wanted: Specialisation, store: EntryStore) -> Compiled:
    fields = wanted.fields
    entry, was_there = _find(store, fields), True
    if entry is None:
        with store.lock(digest(fields), lambda line: None):
            entry = _find(store, fields)
            if entry is None:
                entry, was_there = keep(store, fields, _compiled_files(wanted)), False
    resources = Resources(**json.loads(entry.read(RESOURCES)))
    return Compiled(wanted.kernel.__name__, wanted.target, entry, resources, was_there)


def _find(store: EntryStore, fields: dict[str, str]) -> Entry | None:
    """The entry; None where it is missing, or damaged and to be built again."""
    try:
        return find(store, fields)
    except DamagedEntryError:
        return None


def _compiled_files(wanted: Specialisation) -> dict[str, bytes]:
    """The files of an entry, without its key."""
    compiled, target = compile_for(wanted), wanted.target
    code = compiled.asm[target.binary]
    resources = _resources(compiled, code, target)
    if resources.shared_bytes > target.shared_bytes:
        raise BackendError(
            f"{wanted.kernel.__name__} takes {resources.shared_bytes} bytes of shared memory; "
            f"{target.name} ({target.device}) has {target.shared_bytes}"
        )
    # Triton's own record of the kernel, as it keeps it.
    record = next(p for n, p in compiled.metadata_group.items() if n.endswith(".json"))
    return {
        f"kernel.{target.binary}": code,
        RESOURCES: json.dumps(asdict(resources), indent=1).encode() + b"\n",
        METADATA: Path(record).read_bytes(),
    }


def compile_for(wanted: Specialisation) -> Any:
    """Triton's compiled kernel, which holds every stage's text and the code object.

    Raises:
        BackendError: the message is the compiler's.
    """
    target, source = wanted.target, wanted.triton_source()
    device, options = gpu_target(target), wanted.triton_options()
    try:
        return triton.compile(source, target=device, options=options)
    except (RuntimeError, triton.TritonError) as error:
        raise BackendError(
            f"Triton could not compile {wanted.kernel.__name__} for {target.name}: {error}"
        ) from error


def gpu_target(target: Target) -> GPUTarget:
    """A target as Triton names it."""
    arch = int(target.arch) if target.vendor == "cuda" else target.arch
    return GPUTarget(target.vendor, arch, target.warp_size)


def _resources(compiled: Any, code: bytes, target: Target) -> Resources:
    shared = int(compiled.metadata.shared)
    if target.vendor == "hip":
        text = compiled.asm["amdgcn"]
        found = {name: int(_one(rf"\.{name}:\s+(\d+)", text)) for name in _AMD_FIELDS}
        return Resources(len(code), shared, found["vgpr_count"], found["vgpr_spill_count"])
    text = _resource_usage(code)
    registers, stack = int(_one(r"REG:(\d+)", text)), int(_one(r"STACK:(\d+)", text))
    return Resources(len(code), shared, registers, stack)


def _resource_usage(cubin: bytes) -> str:
    """The resource usage that `cuobjdump`, which comes with Triton, prints for a code object."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise BackendError(f"{tool} failed with exit status {done.returncode}: {done.stderr}")
    return done.stdout


def _one(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise BackendError(f"no {pattern!r} in what Triton's compiler says of a kernel's resources")
    return found[1]
