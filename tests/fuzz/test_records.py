"""Forged and broken files of the graph cache, with good checksums: a miss, or one CacheError."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import changed as changed_plan
from helpers.plans import plan_of
from helpers.store_writer import FIELDS, put

from mtpc.backends.cpu_kernels.build import build_kernels, kernel_fields
from mtpc.backends.cpu_kernels.levels import chosen_level
from mtpc.backends.package import Package
from mtpc.cli.cache import examine
from mtpc.errors import CacheError, DamagedEntryError, MtpcError, OptionError
from mtpc.layout import BufferSpec, StepKey
from mtpc.program.forecast import miss
from mtpc.program.step_cache import KIND, RECORD, StepCache
from mtpc.program.step_record import FORMAT, StepRecord
from mtpc.store.entries import EntryStore
from mtpc.store.key import digest
from mtpc.store.lookup import KEY, find, key_bytes, peek
from mtpc.store.machine import cpu_flags
from mtpc.store.nearest import nearest
from mtpc.weights.recipes import Cast, Join, Packed, Rows

KEY_OF_STEP = StepKey.decode(2, 3)
OPTIONS = plan_of(max_len=32)
PROGRAM = {**FIELDS, "kind": KIND, "format": str(FORMAT)}
DEEP = b'{"kind": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
VALUES: tuple[Any, ...] = (
    *(None, "x", -1, 0, 2**41, 2**70, [], {}, True, 1.5, [None], {"a": {}}, ["a", "b"]),
    *({"pack": "a"}, {"rows": [[[0, 2**60]], "a"]}, {"cat": "a"}, {"cat": {"cat": 3}}),
)


def record() -> StepRecord:
    """A record as a build writes it."""
    values = {
        "lowering": "0" * 32,
        "step": KEY_OF_STEP,
        "part": "step",
        "buffers": (BufferSpec("state.lens", (4, "1*M"), torch.int64),),
        "package": Package(
            {"state.lens": "int64[4,1*M](1*M,1)", "w": "float32[2](1)"}, {}, {"M": 2}
        ),
        "derived": {"w": Packed(Join("cat", ("a", Rows(((0, 2),), "b"))))},
        "stored": {"a": "model.a", "b": Cast("float32", "model.b")},
        "unexplained": (),
        "ends": ("a",),
        "repeats": {},
        "max_positions": 64,
        "vocab_size": 96,
        "history": (),
        "seconds": {"trace": 1.0},
        "source": "tiny",
        "created": "now",
    }
    known = {field.name for field in dataclasses.fields(StepRecord)}
    return StepRecord(**{name: value for name, value in values.items() if name in known})


pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


@pytest.fixture
def cache(tmp_path: Path) -> StepCache:
    return StepCache(EntryStore(tmp_path / "store"), PROGRAM, OPTIONS)


def forge(cache: StepCache, data: bytes) -> str:
    """An entry of the step with these bytes as its record; returns its name."""
    fields = cache.fields(KEY_OF_STEP)

    def fill(into: Path) -> None:
        (into / KEY).write_bytes(key_bytes(fields))
        (into / RECORD).write_bytes(data)

    cache.store.write(digest(fields), fill)
    return digest(fields)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{}", b"\xff", DEEP, b'{"format": 2}'],
    ids=["nothing", "list", "null", "object", "bytes", "deep", "format alone"],
)
def test_forged_records(cache: StepCache, data: bytes) -> None:
    """The entry counts as damaged, and is refused by name under `frozen`."""
    name = forge(cache, data)
    assert cache.find(KEY_OF_STEP) is None
    assert f"{name}: {RECORD} is not a record" in next(iter(cache.notes))
    frozen = StepCache(cache.store, PROGRAM, changed_plan(OPTIONS, frozen=True))
    with pytest.raises(DamagedEntryError, match=f"{name}: {RECORD} is not a record"):
        frozen.find(KEY_OF_STEP)
    assert [row.entry for row in examine(cache.store)] == [None]


def test_the_record_of_another_step(cache: StepCache) -> None:
    other = dataclasses.replace(record(), step=StepKey.decode(4, 3))
    forge(cache, other.to_json().encode())
    with pytest.raises(DamagedEntryError, match=r"step\.record\.json is that of decode"):
        StepCache(cache.store, PROGRAM, changed_plan(OPTIONS, frozen=True)).find(KEY_OF_STEP)
    forge(cache, record().to_json().encode())
    assert cache.find(KEY_OF_STEP) is not None


@pytest.mark.parametrize(
    "data",
    [DEEP, b"[]", b'{"kind": "step", "model": 3}', b'{"kind": "step", "model": {"a": []}}'],
    ids=["deep", "list", "number", "object"],
)
def test_a_neighbours_key(cache: StepCache, data: bytes) -> None:
    """One bad key makes no other lookup fail: not of an entry, not the reasons of a miss."""
    whole = put(cache.store)
    bad = cache.store.directory("0" * 32)
    bad.mkdir()
    (bad / KEY).write_bytes(data)
    wanted = {**FIELDS, "model": "other"}
    unknown = {name: value for name, value in FIELDS.items() if name != "machine.compiler"}
    assert find(cache.store, unknown) == whole
    assert find(cache.store, wanted) is None
    row = nearest(peek(cache.store), wanted)
    assert row is not None
    assert row.digest == whole.digest
    assert "it holds no step" in miss(cache, KEY_OF_STEP)
    put(cache.store, kind=KIND)
    assert "the nearest entry differs in" in miss(cache, KEY_OF_STEP)


@pytest.mark.parametrize("name", ["c" * 300, "c/" * 3000])
def test_path_names_that_are_too_long(name: str, tmp_path: Path) -> None:
    cache = StepCache(EntryStore(tmp_path / name), PROGRAM, OPTIONS)
    with pytest.raises(CacheError, match=r"cannot read the graph cache .*: .*too long.*cache_dir"):
        cache.find(KEY_OF_STEP)
    with pytest.raises(CacheError, match="too long"):
        cache.store.prepare()
    for option in ("cache_dir", "kv_offload_dir", "draft"):
        for wrong in ("a\0b", "\ud800", 5):
            with pytest.raises(MtpcError, match=f"{option} is .*; expected a directory's path"):
                plan_of(**{option: wrong})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [((*path, key), part) for key, part in inner]
    return [
        place
        for own, part in found
        for place in (own, *(places(part, own) if isinstance(part, (dict, list)) else ()))
    ]


def changed(chance: random.Random) -> bytes:
    """A record with other values in some places, or with other bytes."""
    if chance.random() < 0.2:
        data = bytearray(record().to_json().encode())
        data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    value = json.loads(record().to_json())
    for _ in range(chance.randint(1, 3)):
        *above, last = chance.choice(places(value))
        part = value
        for key in above:
            part = part[key]
        part[last] = copy.deepcopy(chance.choice(VALUES))
        if isinstance(part, dict) and chance.random() < 0.2:
            del part[last]
    return json.dumps(value).encode()


def test_random_records(cache: StepCache, chances: Callable[..., Any]) -> None:
    """A changed record is one that can be written again, or it is refused as damaged.

    One with fewer positions than the program has is refused as such a model is, and no other.
    """
    refused = accepted = 0
    for chance in chances():
        data = changed(chance)
        forge(cache, data)
        step, too_few = None, ""
        try:
            step = cache.find(KEY_OF_STEP)
        except OptionError as error:
            too_few = str(error)
        if too_few:
            count = json.loads(data)["max_positions"]
            assert type(count) is int, (chance, too_few)
            assert 0 <= count < OPTIONS.max_len, (chance, too_few)
            assert too_few == message_of(count), chance
        if step is None:
            refused += 1
            continue
        accepted += 1
        positions = step.record.max_positions
        assert positions is None or positions >= OPTIONS.max_len, chance
        assert step.record.to_json(), chance
        assert step.layout is not None, chance
    assert refused > accepted / 10 > 0, (refused, accepted)


def message_of(count: int) -> str:
    """What is said of a model with too few positions."""
    with pytest.raises(OptionError) as refused:
        OPTIONS.given(max_positions=count)
    return str(refused.value)


@pytest.mark.parametrize("count", [0, 31])
def test_a_record_with_too_few_positions(cache: StepCache, count: int) -> None:
    few = dataclasses.replace(record(), max_positions=count)
    forge(cache, few.to_json().encode())
    with pytest.raises(OptionError, match=f"^max_len is 32; .* at most {count} positions"):
        cache.find(KEY_OF_STEP)


@pytest.mark.parametrize("positions", [-1, "4*M", True, 2**70])
def test_a_record_with_no_number_of_positions(cache: StepCache, positions: Any) -> None:
    """Text is a size of a buffer, and no number of positions."""
    forge(cache, dataclasses.replace(record(), max_positions=positions).to_json().encode())
    assert cache.find(KEY_OF_STEP) is None
    assert "is not a record" in next(iter(cache.notes))


def test_damaged_kernels_are_not_missing(cache: StepCache) -> None:
    """Under `frozen` the error says what is damaged, as for steps."""
    fields = kernel_fields(chosen_level(cpu_flags()))
    cache.store.write(digest(fields), lambda into: into.joinpath("x").write_bytes(b"1"))
    with pytest.raises(DamagedEntryError, match=digest(fields)):
        build_kernels(cache.store, frozen=True)
    cache.store.remove(digest(fields))
    with pytest.raises(CacheError, match="has no cpu kernels"):
        build_kernels(cache.store, frozen=True)
