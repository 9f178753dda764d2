"""A C++ compiler that compiles no text twice, so that a fault in a kernel takes a file or two.

`CXX` names a copy that Python runs (plant.py), `KEPT_CXX` the compiler, and `KEPT_OBJECTS` a folder
of what it has compiled.
An object is known by the options, its source, and the files of mtpc that the source includes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_SOURCES = (".cpp", ".h")


def included(source: Path, folders: list[Path]) -> dict[str, str]:
    """The texts of a source and of what it includes from the folders, by name."""
    texts, waiting = dict[str, str](), [source]
    while waiting:
        path = waiting.pop()
        texts[path.name] = path.read_text()
        names = {name for name in _INCLUDE.findall(texts[path.name]) if name not in texts}
        found = (folder / name for name in sorted(names) for folder in folders)
        waiting += [path for path in found if path.exists()]
    return texts


def main() -> int:
    command = [os.environ["KEPT_CXX"], *sys.argv[1:]]
    sources = [Path(word) for word in command if word.endswith(_SOURCES)]
    if not sources or "-o" not in command:  # It links, or says its version.
        return subprocess.call(command)
    output = Path(command[command.index("-o") + 1])
    options = [word for word in command if word[0] == "-" and word[:2] != "-I"]
    folders = [source.parent for source in sources]
    folders += [Path(word[2:]) for word in command if word[:2] == "-I"]
    texts = [included(source, folders) for source in sources]
    name = hashlib.sha256(repr((options, texts)).encode()).hexdigest()
    kept = Path(os.environ["KEPT_OBJECTS"]) / name
    if not kept.exists():
        status = subprocess.call(command)
        if status != 0:
            return status
        written = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(output, written)
        written.replace(kept)
    shutil.copyfile(kept, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
