"""Builds mtpc's distributions: setuptools, and a wheel that carries the C++ kernels if asked to.

    python -m build --wheel -C kernels=all              # or -C kernels=avx2,avx512
    pip wheel . --no-deps -C kernels=all --no-build-isolation

The wheel is for this platform and for the torch that it is built with. Without `-C kernels` it is
pure Python, and the kernels are compiled at their first use.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

ROOT = Path(__file__).parent
PLACE = "mtpc/backends/cpu_kernels/shipped"
ALL = "all"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Kernels are compiled against torch's headers; nothing else needs them."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    if not wanted_levels(config_settings):
        return needed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return needed + [line for line in project["dependencies"] if re.match(r"(torch|numpy)\b", line)]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The hook of PEP 517."""
    levels = wanted_levels(config_settings)
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    if not levels:
        return name
    with tempfile.TemporaryDirectory(prefix="mtpc-wheel-") as folder:
        compile_kernels(levels, Path(folder))
        return add_kernels(Path(wheel_directory) / name, Path(folder))


def wanted_levels(config_settings: dict[str, Any] | None) -> list[str]:
    """Names of levels in `-C kernels=avx2,avx512` or `-C kernels=all`."""
    text = (config_settings or {}).get("kernels", "")
    return [name.strip() for name in str(text).split(",") if name.strip()]


def compile_kernels(names: list[str], into: Path) -> None:
    """Compile a library for each level, into a folder of its name.

    Raises:
        SystemExit: a level is unknown.
    """
    from mtpc.backends.cpu_kernels.compile import compile_for
    from mtpc.backends.cpu_kernels.levels import X86

    known = {level.name: level for level in X86}
    unknown = [name for name in names if name not in known and name != ALL]
    if unknown:
        raise SystemExit(
            f"-C kernels names {unknown[0]!r}; expected {ALL!r} or some of {', '.join(known)}"
        )
    compile_for([known[n] for n in known if n in names or ALL in names], into, _say)


def _say(line: str, fraction: float | None = None, /) -> None:
    """Print what begins."""
    if fraction is None:
        print(line)


def add_kernels(wheel: Path, kernels: Path) -> str:
    """Write a wheel for this platform that has the kernels, in place of a pure one.

    Returns:
        Its name.
    """
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    target = wheel.with_name(wheel.name.replace("-any.whl", f"-{platform}.whl"))
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        files = {name: source.read(name) for name in source.namelist() if name != record}
        tags = record.replace("RECORD", "WHEEL")
        files[tags] = (
            files[tags]
            .replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            .replace(b"-any\n", f"-{platform}\n".encode())
        )
        for path in sorted(kernels.glob("*/*")):
            files[f"{PLACE}/{path.relative_to(kernels).as_posix()}"] = path.read_bytes()
        for name, data in files.items():
            made.writestr(name, data)
        made.writestr(record, _record(files, record))
    wheel.unlink()
    return target.name


def _record(files: dict[str, bytes], record: str) -> str:
    """The list of a wheel's files with their sums."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        sums = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={sums}", len(data)))
    writer.writerow((record, "", ""))
    return text.getvalue()
