"""Small pages and state in files, and a process that writes and reads them for ever.

python offloads.py DIRECTORY MAX_BYTES SEED
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import torch

from mtpc.engine.offload import Offload
from mtpc.engine.offload_files import OffloadDirectory
from mtpc.engine.request import Request

BIG = 1 << 30
PAGE, K = 4, 2
TEXT = list(range(100, 126))
"""Six blocks of four tokens with two tokens after each."""


def offload_of(
    path: Path, pages: torch.Tensor, max_bytes: int = BIG, identity: str = "one"
) -> Offload:
    """An offload directory for two page pools and one state."""
    states = torch.full((3, 2, 5), -1.0), torch.zeros(4, 2, 5)
    pools = {"kv.0.k": pages, "kv.1.k": pages.half()}
    directory = OffloadDirectory(path, max_bytes)
    return Offload(directory, pools, {"kv.2.state": states}, PAGE, K, identity, Counter())


def filled(count: int = 8) -> torch.Tensor:
    """Pages of four rows, all different."""
    return torch.arange(float(count * PAGE * 3)).view(count, PAGE, 3)


def request(text: list[int] = TEXT) -> Request:
    one = Request(0, text, 5)
    one.slot = 2
    return one


def save_all(offload: Offload, text: list[int] = TEXT) -> None:
    one = request(text)
    for number in range(6):
        offload.save("page", offload.block(one, number), number)


def loaded(offload: Offload, text: list[int] = TEXT) -> list[int]:
    """The blocks of a text that are in files; asserts that their contents are right."""
    one, found = request(text), []
    pages = offload._forms["page"]._views
    for number in range(6):
        if offload.has("page", one, number) and offload.load("page", one, number, 7):
            for rows, _, _ in pages:
                assert rows[7].tolist() == filled()[number].tolist()
            found.append(number)
    return found


def write_for_ever(path: Path, max_bytes: int, seed: int) -> None:
    """Texts of 40 beginnings; a file that is refused is an error."""
    print("ready", flush=True)
    for count in itertools.count():
        offload = offload_of(path, filled(), max_bytes)
        text = [seed * 1000 + count % 40, *TEXT[1:]]
        save_all(offload, text)
        loaded(offload, text)
        assert not offload._fallbacks, offload._fallbacks


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
