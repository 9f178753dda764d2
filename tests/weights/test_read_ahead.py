"""Spans of files that are read ahead: their bytes, what is in memory at once, and their end."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights import read_ahead
from mtpc.weights.read_ahead import ReadAhead
from mtpc.weights.tensor_file import Span

SIZE = 300_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(Random(0).randbytes(SIZE))
    return path


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Each test ends its thread and closes its files."""
    yield
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if tmp_path in path.parents]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("mtpc-read-ahead")]


def tensor_of(ahead: ReadAhead, span: Span) -> Tensor:
    taken = ahead.take(span)
    assert taken is not None
    memory, begin = taken
    return torch.frombuffer(memory, dtype=torch.uint8, count=span.nbytes, offset=begin)


def expected(span: Span) -> bytes:
    return span.path.read_bytes()[span.begin : span.begin + span.nbytes]


def test_bytes_are_the_files(file: Path) -> None:
    """At any offset, up to the file's last byte; in another order than announced, too."""
    places = [(0, 1), (1, 4095), (4095, 2), (4096, 4096), (8191, 70_001), (SIZE - 5, 5), (3, 9)]
    spans = [Span(file, begin, count) for begin, count in places]
    for order in (spans, spans[::-1]):
        with ReadAhead(spans, 1 << 20, 1 << 20) as ahead:
            for span in order:
                assert bytes(tensor_of(ahead, span).numpy()) == expected(span)
                ahead.release(span)
                assert ahead.take(span) is None


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small spans use memory in turn as large ones do."""
    monkeypatch.setattr(read_ahead, "_OWN_BYTES", 1)


def test_what_lives_keeps_its_memory(file: Path, shares: None) -> None:
    """Spans use the same memory in turn, but not while a tensor over it lives."""
    spans = [Span(file, 8192 * i, 8192) for i in range(30)]
    kept, memories = list[Tensor](), set[int]()
    with ReadAhead(spans, 16384, 16384) as ahead:
        for i, span in enumerate(spans):
            tensor = tensor_of(ahead, span)
            memories.add(tensor.data_ptr())
            if i % 3 == 0:
                kept.append(tensor)
            del tensor
            ahead.release(span)
    assert len(kept) < len(memories) < 20
    assert [bytes(t.numpy()) for t in kept] == [expected(span) for span in spans[::3]]


def test_sizes_take_turns_in_the_lowest_memory(file: Path, shares: None) -> None:
    """Those of any size: bytes that were touched once serve again, and a large one joins them."""
    sizes = [100_000, 9000, 20_000, 30_000, 4096, 90_000, 1, 50_000]
    spans = [Span(file, 17 * i, size) for i, size in enumerate(sizes * 3)]
    lowest, highest = set[int](), set[int]()
    with ReadAhead(spans, 40_000, SIZE) as ahead:
        for span in spans:
            tensor = tensor_of(ahead, span)
            assert bytes(tensor.numpy()) == expected(span)
            lowest.add(tensor.data_ptr())
            highest.add(tensor.data_ptr() + span.nbytes)
            del tensor
            ahead.release(span)
    assert max(highest) - min(lowest) < 100_000 + 2 * 40_000 + 3 * 4096


def test_memory_that_nothing_uses_is_given_back_at_the_end(tmp_path: Path) -> None:
    """Though a tensor over some of it lives: what is around that is not resident any more."""
    path, size = tmp_path / "large", 8 << 20
    path.write_bytes(Random(1).randbytes(8 * size))
    spans = [Span(path, size * i, size) for i in range(8)]
    with ReadAhead(spans, 8 * size, 8 * size) as ahead:
        tensors = [tensor_of(ahead, span) for span in spans]
        kept = tensors[3]
        del tensors
        for span in spans:
            ahead.release(span)
        before = _resident()
    assert before - _resident() > 5 * size
    assert bytes(kept.numpy()) == expected(spans[3])


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * mmap.PAGESIZE


def test_no_more_in_memory_than_allowed(file: Path) -> None:
    small, large = [Span(file, 1000 * i, 1000) for i in range(40)], Span(file, 0, SIZE)
    with ReadAhead([*small, large], 5000, 100_000) as ahead:
        assert ahead.take(large) is None  # The caller reads it in another way.
        for span in small:
            assert ahead._held <= 5000
            assert len(tensor_of(ahead, span)) == 1000
            ahead.release(span)
        assert ahead._held == 0


def test_what_is_released_before_it_is_read_is_not_read(file: Path) -> None:
    spans = [Span(file, 1000 * i, 1000) for i in range(40)]
    with ReadAhead(spans, 2000, 8000) as ahead:
        for span in spans[10:]:
            ahead.release(span)
        for span in spans[:10]:
            assert len(tensor_of(ahead, span)) == 1000
            ahead.release(span)
        assert (ahead._held, len(ahead._read), len(ahead._waiting)) == (0, 0, 0)


def test_what_nobody_releases_stops_nothing(file: Path) -> None:
    """A caller that holds more than the limit still gets what it asks for."""
    spans = [Span(file, 4000 * i, 4000) for i in range(20)]
    with ReadAhead(spans, 8000, 8000) as ahead:
        tensors = [tensor_of(ahead, span) for span in spans]
    assert [bytes(t.numpy()) for t in tensors] == [expected(span) for span in spans]


@pytest.mark.parametrize(
    ("name", "begin", "said"),
    [
        ("weights", SIZE - 100, r"200 bytes of .*weights at 299900: .*100 bytes too early"),
        ("none", 0, "200 bytes of .*none at 0: .*No such file"),
    ],
)
def test_a_file_that_has_changed_is_named(file: Path, name: str, begin: int, said: str) -> None:
    span = Span(file.with_name(name), begin, 200)
    with (
        ReadAhead([span], 1000, 1000) as ahead,
        pytest.raises(CheckpointError, match=said),
    ):
        ahead.take(span)


def test_an_error_ends_the_thread(file: Path) -> None:
    spans = [Span(file, 0, SIZE), Span(file, 1, SIZE - 1)]
    with pytest.raises(KeyError), ReadAhead(spans, SIZE, SIZE):
        raise KeyError
