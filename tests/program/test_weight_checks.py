"""NaN and infinity in what a start binds: found, named in one error, and looked for once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.batches import bf16
from safetensors.torch import save_file
from torch import Tensor

from mtpc.backends.cpu_kernels import fill_packed, load_kernels
from mtpc.errors import CheckpointError
from mtpc.weights import packing, stored, tensor_file
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.packing import Fill, pack
from mtpc.weights.recipes import Blocks, Join, Packed, Recipe, Rows
from mtpc.weights.stored import StoredWeights
from mtpc.weights.weights import Weights

load_kernels()
SHAPES = {"q": (64, 66), "k": (33, 66), "v": (31, 66), "down": (70, 34), "norm": (66,),
          "embedding": (70, 34), "copy": (70, 34)}  # fmt: skip
RECIPES: dict[str, Recipe] = {
    "qkv": Packed(Join("cat", ("q", "k", "v"))),  # The middle one fills no whole tiles.
    "two": Packed(Join("cat", ("q", "v"))),  # Packed part by part.
    "down packed": Packed("down"),
    "share": Packed(Rows(((0, 32), (40, 48)), "down")),
    "heads": Packed(Blocks(2, 8, 24, True, "q")),
    "norm": "norm",
    "embedding": "embedding",
    "copy": "copy",
}
ENDS = ("embedding", "copy")
ROWS = 32
"""Rows of a piece, where a matrix is read in pieces. 70 rows have three, and the last is short."""


@pytest.fixture(params=[False, True], ids=["mapped", "read ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(Checkpoint, "nbytes", 1 << 60)
    return bool(request.param)


@pytest.fixture(autouse=True, params=[False, True], ids=["whole", "in pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 2 * ROWS * 34)
    monkeypatch.setattr(stored, "_IN_MAP_BYTES", 2 * 70 * 34)
    return bool(request.param)


@contextmanager
def bound(
    directory: Path, names: list[str], bad: dict[str, int], fill: Fill = fill_packed
) -> Iterator[tuple[StoredWeights, dict[str, Tensor], dict[str, Tensor]]]:
    """A source, its weights of these names, and what is stored; each bad tensor has one NaN."""
    written = {name: bf16(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    written["copy"] = written["embedding"].clone()
    for i, (name, place) in enumerate(bad.items()):
        written[name].view(-1)[place] = (torch.nan, -torch.inf)[i % 2]
    directory.mkdir(exist_ok=True)
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"dtype": "bfloat16"}')
    source = StoredWeights(Checkpoint(directory), {name: name for name in SHAPES}, ENDS, fill)
    weights = Weights(stored=source)
    weights.know({name: recipe for name, recipe in RECIPES.items() if name != recipe}, {}, ())
    with weights.reading_ahead(names, 1 << 40, 0):
        yield source, {name: weights.value(name) for name in names}, written


@pytest.mark.parametrize("fill", [fill_packed, packing.fill_packed])
def test_all_bad_tensors_are_in_one_error(tmp_path: Path, ahead: bool, fill: Fill) -> None:
    """Those of one packed weight by their own names, and those that are not packed."""
    bad = {"k": -1, "v": 0, "down": 70 * 34 // 2, "norm": 65}
    with (
        bound(tmp_path, ["qkv", "down packed", "norm"], bad, fill) as (source, _, _),
        pytest.raises(CheckpointError, match=r"4 tensor.* infinity: k, v, down, norm; expected"),
    ):
        source.check()


@pytest.mark.parametrize("place", [0, 31 * 34, ROWS * 34, 64 * 34, 70 * 34 - 1])
@pytest.mark.parametrize(("name", "stored"), [("down packed", "down"), ("embedding", "embedding")])
def test_each_place_of_a_large_matrix_is_looked_at(
    tmp_path: Path, ahead: bool, name: str, stored: str, place: int
) -> None:
    with (
        bound(tmp_path, [name], {stored: place}) as (source, _, _),
        pytest.raises(CheckpointError, match=rf"1 tensor\(s\) .* infinity: {stored}; expected"),
    ):
        source.check()


@pytest.mark.parametrize("bad", [{}, {"copy": 64 * 34}])
def test_a_copy_is_found_and_its_reading_ends(
    tmp_path: Path, ahead: bool, bad: dict[str, int]
) -> None:
    """One that is equal but for a value in its last rows is none."""
    names = ["embedding", "copy", "down packed"]
    with bound(tmp_path, names, bad) as (source, made, stored):
        assert (made["embedding"] is made["copy"]) == (not bad)
        for name in ENDS:
            assert torch.equal(made[name].view(torch.int16), stored[name].view(torch.int16))
        assert torch.equal(made["down packed"], pack(stored["down"]))
        (file,) = source._checkpoint.files
        assert (file.ahead is not None) == ahead
        assert not file.ahead or (file.ahead._held, len(file.ahead._read)) == (0, 0)
        assert all(source._finite.values()) == (not bad)


@pytest.mark.parametrize("place", [0, 33, 65, 33 * 66 // 2, 33 * 66 - 2, 33 * 66 - 1])
def test_each_place_is_looked_at(tmp_path: Path, ahead: bool, place: int) -> None:
    with (
        bound(tmp_path, ["qkv"], {"k": place}) as (source, _, _),
        pytest.raises(CheckpointError, match=r"1 tensor\(s\) hold NaN or infinity: k; expected"),
    ):
        source.check()


def test_a_rank_checks_its_own_rows(tmp_path: Path, ahead: bool) -> None:
    for place, is_bad in ((31, True), (32, False), (39, False), (40, True), (48, False)):
        with bound(tmp_path / str(place), ["share"], {"down": place * 34}) as (source, _, _):
            found = not all(source._finite.values())
        assert found is is_bad, place


def test_rows_that_blocks_leave_out_are_checked_too(tmp_path: Path, ahead: bool) -> None:
    """Another weight has them, or nothing; the tensor is damaged."""
    with (
        bound(tmp_path, ["heads"], {"q": 0}) as (source, _, _),
        pytest.raises(CheckpointError, match="infinity: q;"),
    ):
        source.check()


def test_packed_weights_get_no_pass_of_their_own(
    tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[tuple[int, ...]]()
    is_finite = stored.is_finite
    monkeypatch.setattr(
        stored, "is_finite", lambda tensor: looked.append(tuple(tensor.shape)) or is_finite(tensor)
    )
    names = ["qkv", "two", "down packed", "share", "norm"]
    with bound(tmp_path, names, {}) as (source, made, written):
        source.check()
    assert looked == [SHAPES["norm"]]
    assert torch.equal(made["qkv"], pack(torch.cat([written[name] for name in "qkv"])))
    assert torch.equal(made["down packed"], pack(written["down"]))
    assert torch.equal(made["norm"], written["norm"])
