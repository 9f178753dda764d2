"""Safetensors files: what is read is what was saved, released or not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.tensor_file import DTYPES, TensorFile

LARGE = 1 << 20
"""Elements of a tensor that covers many pages."""


@pytest.fixture
def saved() -> dict[str, Tensor]:
    integers = torch.arange(24)
    tensors = {name: (integers % 2).to(dtype).view(2, 3, 4) for name, dtype in DTYPES.items()}
    empty = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    return {**tensors, **empty, "large": torch.arange(LARGE, dtype=torch.int32)}


@pytest.fixture
def path(saved: dict[str, Tensor], tmp_path: Path) -> Path:
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    as_bytes = [t.contiguous().flatten().view(torch.uint8) for t in (found, expected)]
    return torch.equal(*as_bytes)


def test_tensors_are_as_saved(path: Path, saved: dict[str, Tensor]) -> None:
    file = TensorFile(path)
    assert file.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert same(file.tensor(name), tensor)
        assert file.tensors[name].shape == tuple(tensor.shape)
    assert str(file.tensors["BF16"]) == "BF16[2,3,4]"


def test_released_tensors_are_read_again(path: Path, saved: dict[str, Tensor]) -> None:
    """Their neighbours, too; twice is no error."""
    file = TensorFile(path)
    held = file.tensor("large")
    assert same(held, saved["large"])
    for name in [*saved, *saved]:
        file.release(name)
    assert all(same(file.tensor(name), tensor) for name, tensor in saved.items())
    assert same(held, saved["large"])


def _resident_file_kb() -> int:
    return int(re.search(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def test_release_gives_memory_back(path: Path) -> None:
    file = TensorFile(path)
    file.tensor("large").sum()
    before = _resident_file_kb()
    file.release("large")
    assert before - _resident_file_kb() > 0.9 * LARGE * 4 / 1024


def test_nothing_is_written_to_the_file(path: Path, saved: dict[str, Tensor]) -> None:
    file, before = TensorFile(path), path.read_bytes()
    file.tensor("large").zero_()
    del file
    assert path.read_bytes() == before


def test_unknown_dtypes_are_named(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(CheckpointError, match="w is F4; expected one of BOOL"):
        TensorFile(path).tensor("w")


def sparse(path: Path, nbytes: int) -> Path:
    """A safetensors file with one tensor of zeros, which takes no room on the disk."""
    entry = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + nbytes)
    return path


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """Nothing but the pages in use takes memory, so it is opened and read like any other."""
    nbytes = 2**40
    assert nbytes > 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    file = TensorFile(sparse(tmp_path / "model.safetensors", nbytes))
    tensor = file.tensor("w")
    assert tensor.shape == (nbytes,)
    assert tensor[[0, nbytes // 2, -1]].tolist() == [0, 0, 0]
    assert file.sample("w", 4) == bytes(4)
    file.release("w")


@pytest.mark.parametrize(
    ("kind", "name"),
    [("tensor_file.TensorFile", "a.safetensors"), ("gguf.file.GgufFile", "a.gguf")],
)
def test_a_file_that_cannot_be_mapped(kind: str, name: str, tmp_path: Path) -> None:
    """Where a limit of the system forbids it, one error says so."""
    path = sparse(tmp_path / name, 2**38)
    module, _, cls = f"mtpc.weights.{kind}".rpartition(".")
    code = f"""
import resource, sys
from pathlib import Path
from {module} import {cls}
from mtpc.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_AS, (2**37, 2**37))
try:
    {cls}(Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert re.fullmatch(rf"cannot (map|read) {re.escape(str(path))}.*: .*memory.*\n", done.stdout)
