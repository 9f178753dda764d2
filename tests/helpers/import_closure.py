"""What `mtpc.compile` imports of mtpc: a script that prints it, warm and cold.

    python -m helpers.import_closure CACHE CHECKPOINT [-v]    (in tests/)

The first start fills the cache directory, and so is cold; the second one is warm.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CODE = """
import json, sys, pathlib
import mtpc
mtpc.compile(sys.argv[2], cache_dir=sys.argv[1], batch_buckets=(1,), spec_tokens=1, max_len=64)
files = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "mtpc"}
print(json.dumps({n: len(pathlib.Path(f).read_text().splitlines()) for n, f in files.items() if f}))
"""


@dataclass(frozen=True)
class Closure:
    """The modules of mtpc that one start imports, and the lines of each."""

    lines: dict[str, int]

    @property
    def size(self) -> tuple[int, int]:
        """How many modules, and lines of all."""
        return len(self.lines), sum(self.lines.values())


def closure(cache: Path, checkpoint: Path) -> Closure:
    """What a process imports that compiles a model over a cache."""
    command = [sys.executable, "-c", CODE, str(cache), str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Closure(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print both closures; with `-v` each module's lines."""
    cache, checkpoint = map(Path, sys.argv[1:3])
    for name in ("cold", "warm"):
        found = closure(cache, checkpoint)
        print(name, "{} modules, {} lines".format(*found.size))
        for module, count in sorted(found.lines.items()) if "-v" in sys.argv else ():
            print(f"  {count:5} {module}")


if __name__ == "__main__":
    main()
