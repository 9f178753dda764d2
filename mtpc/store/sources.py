"""Which of mtpc's own files decide what a compilation gives.

They are derived from the import statements: every module that the entries reach, however late it
is imported, and the files beside them that are not Python, which are the C++ kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import mtpc
from mtpc.errors import CacheError
from mtpc.store.key import hash_of

ENTRIES = ("mtpc.program.compiler", "mtpc.backends.cpu.backend")
"""The module that turns options into artifacts, and the backend that makes them."""
PACKAGE = Path(mtpc.__file__).parent
KERNELS = "kernels"
"""The part that is not Python."""

_ROOT = "mtpc"
_IMPORT = re.compile(
    r"^([ \t]*)(?:from (mtpc[\w.]*) import (\([^)]*\)|.*)|import (mtpc[\w.]*))", re.MULTILINE
)
"""Import statements of mtpc's modules: indentation, module, names; or a module. `ast` takes fifty
times as long, which a warm start would notice; a test compares the two."""

_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
"""What only type checkers import."""
_IMPORTS_ALL = re.compile(r"members\(sys\.modules\[__name__\]|import_module\(f\"\{__name__\}\.")
"""A package whose source has one of these imports each of its modules, whatever their names."""


@cache
def own_sources() -> Mapping[str, str]:
    """`source_fields` of the code that this process runs, which it reads once: a start asks
    twice, and a copy of this process knows them. What is edited later is not what it has imported.
    """
    return MappingProxyType(source_fields())


def kernels_field() -> dict[str, str]:
    """The field of `source_fields` for the C++ code, read now, as a compiler would read it."""
    return {f"source.{KERNELS}": _digest(_beside(_own_modules(), PACKAGE), PACKAGE)}


def source_fields(package: Path = PACKAGE) -> dict[str, str]:
    """A digest of each part of mtpc that has a say in what is compiled.

    Returns:
        Fields of the cache's key by name. A part is a module or package right below mtpc, as in
        `source.passes`; `source.kernels` is the C++ code.

    Raises:
        CacheError: a part has no files, or an entry is not there.
    """
    files = source_files(package)
    return {f"source.{part}": _digest(paths, package) for part, paths in files.items()}


def _digest(paths: Sequence[Path], package: Path) -> str:
    return hash_of(
        data
        for path in paths
        for data in (str(path.relative_to(package)).encode(), path.read_bytes())
    )


def source_files(package: Path = PACKAGE) -> dict[str, list[Path]]:
    """The files of `source_fields`, by part.

    Raises:
        CacheError: see there.
    """
    parts: dict[str, list[Path]] = defaultdict(list)
    reached = _own_modules() if package == PACKAGE else _reached(package)
    for name, path in sorted(reached.items()):
        parts[name.split(".")[1]].append(path)
    parts[KERNELS] = _beside(reached, package)
    empty = [part for part, paths in parts.items() if not paths]
    if empty:
        raise CacheError(f"{package} has no files of the part {empty[0]!r} of mtpc's sources")
    return dict(parts)


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """What a file imports of mtpc when it runs.

    Args:
        source: of a module.

    Yields:
        Dotted names, with whether the statement stands at the top level. A name that is imported
        from a module may be a module itself.
    """
    for indent, module, names, alone in _IMPORT.findall(_FOR_TYPES.sub("", source)):
        yield module or alone, not indent
        listed = re.sub(r"#.*|\bas \w+", "", names)
        yield from ((f"{module}.{name}", not indent) for name in re.findall(r"\w+", listed))


def _reached(package: Path) -> dict[str, Path]:
    """Modules that the entries import, directly or not, by name.

    With a module its packages are imported, too. Of a package that is imported for that reason
    alone only statements at the top level count, because the build calls none of its functions.
    `mtpc` itself is left out: it lists the public names.
    """
    modules = dict(_modules(package))
    for entry in ENTRIES:
        if entry not in modules:
            raise CacheError(f"{package} has no module {entry}, from which its sources are found")
    reached: dict[str, Path] = {}
    called: set[str] = set()
    waiting = [(entry, True) for entry in ENTRIES]
    while waiting:
        name, is_called = waiting.pop()
        is_known = name in called or (name in reached and not is_called)
        if is_known or name == _ROOT or name not in modules:
            continue
        reached[name] = modules[name]
        if is_called:
            called.add(name)
        waiting.append((name.rpartition(".")[0], False))
        source = modules[name].read_text()
        found = imports(source)
        waiting += [(other, True) for other, at_top in found if at_top or is_called]
        if _IMPORTS_ALL.search(source):
            waiting += [(other, True) for other in modules if other.startswith(f"{name}.")]
    return reached


@cache
def _own_modules() -> Mapping[str, Path]:
    """`_reached` of the code that this process runs, which it looks for once."""
    return MappingProxyType(_reached(PACKAGE))


def _beside(modules: Mapping[str, Path], package: Path) -> list[Path]:
    """The files beside modules that are not Python."""
    folders = sorted({path.parent for path in modules.values()} - {package})
    files = (path for folder in folders for path in sorted(folder.iterdir()))
    return [path for path in files if path.is_file() and path.suffix != ".py"]


def _modules(package: Path) -> Iterator[tuple[str, Path]]:
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join((_ROOT, *(part for part in parts if part != "__init__"))), path
