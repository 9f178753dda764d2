"""`mtpc quantize` on GGUF files, read by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.blocks import random_blocks

from mtpc.cli.main import main
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.gguf.blocks import BLOCKS
from mtpc.weights.gguf.file import GgufFile
from mtpc.weights.gguf.write import in_file_order, names_of
from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.rounding import Sensitivity

FILES = Path(__file__).parent / "gguf"
SCHEME_OF = {scheme.block: name for name, scheme in SCHEMES.items() if scheme.block}
WRITTEN = sorted(number for number, block in BLOCKS.items() if block.name in SCHEME_OF)


@pytest.mark.parametrize("number", WRITTEN, ids=lambda number: BLOCKS[number].name)
def test_blocks_are_written_as_they_are_read(number: int) -> None:
    """Bit for bit, every pattern of codes."""
    block = BLOCKS[number]
    raw = random_blocks(number, 7, 96).unflatten(-1, (-1, block.nbytes))
    assert block.decode is not None
    assert block.encode is not None
    assert torch.equal(block.encode(block.decode(raw)), raw)


def test_each_scheme_of_blocks_is_a_type() -> None:
    assert {block.name for block in BLOCKS.values() if block.encode} == set(SCHEME_OF)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "glm4_moe"])
@pytest.mark.parametrize("scheme", SCHEME_OF.values())
def test_the_library_reads_what_is_written(name: str, scheme: str, tmp_path: Path) -> None:
    """Metadata, names and shapes stay; plain tensors are equal; values of blocks are those of
    `quantise`, and mtpc reads the same."""
    gguf = pytest.importorskip("gguf")
    source, out = FILES / f"{name}.gguf", tmp_path / "out.gguf"
    assert main(["quantize", str(source), str(out), "--scheme", scheme]) == 0
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(out)
    own = {"general.file_type", "general.quantization_version"}
    kept = before.fields.keys() - own - {"GGUF.tensor_count", "GGUF.kv_count"}
    for key in kept:
        assert before.fields[key].contents() == after.fields[key].contents(), key
    assert (
        after.fields["general.file_type"].contents()
        == gguf.LlamaFileType[f"MOSTLY_{SCHEMES[scheme].block}"]
    )
    assert [t.name for t in before.tensors] == [t.name for t in after.tensors]
    rounded, file = set(), GgufFile(source)
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert one.shape.tolist() == other.shape.tolist()
        if other.tensor_type.name != SCHEMES[scheme].block:
            assert np.array_equal(one.data, other.data)
            continue
        rounded.add(one.name)
        plain = file.plain(one.name)
        spec = SCHEMES[scheme].spec(plain.shape[-1], plain.dtype)
        assert spec is not None
        values = gguf.quants.dequantize(other.data, other.tensor_type).reshape(plain.shape)
        assert torch.equal(torch.from_numpy(values), quantise(plain, spec).dequantise())
    assert "token_embd.weight" in rounded
    assert any("attn_output" in name for name in rounded)
    assert not {n for n in rounded if "ffn_gate_inp" in n}
    found, plain = Checkpoint(out), Checkpoint(source)
    assert found.tensors.keys() == plain.tensors.keys()
    for tensor in found.tensors:
        one, other = plain.tensor(tensor).float(), found.tensor(tensor).float()
        if one.abs().sum() and one.dim() > 1:
            assert float((one - other).norm() / one.norm()) < 0.1, tensor


def test_moments_follow_the_order_of_the_file() -> None:
    """Qwen3.5's output projections have inputs in another order in files: the importance of each
    is that of its own weights."""
    checkpoint = Checkpoint(FILES / "qwen3_5.gguf")
    (file,) = checkpoint.files
    assert isinstance(file, GgufFile)
    names = {name: source for source, name in names_of(file).items()}
    name = next(n for n in file.tensors if n.endswith("linear_attn.out_proj.weight"))
    sums = checkpoint.tensor(name).float().abs().sum(0)
    in_file = file.plain(names[name]).float().abs().sum(0)
    assert not torch.equal(sums, in_file)
    known = Sensitivity(torch.diag(sums)[None], 3.0)
    found = in_file_order(known, file.tensors[name])
    assert torch.equal(found.moments.flatten(), in_file)
    assert found.scale == 3.0


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other format's schemes; what is quantised already; a text that is too short."""
    source, out = FILES / "llama.gguf", tmp_path / "out.gguf"
    for words, message in (
        ([str(source), str(out), "--scheme", "int8"], "GGUF files do not have, and"),
        ([str(source), str(FILES / "llama.gguf"), "--scheme", "q8_0"], "exists; expected"),
    ):
        assert main(["quantize", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["quantize", str(source), str(out), "--scheme", "q8_0"]) == 0
    again = ["quantize", str(out), str(tmp_path / "again.gguf"), "--scheme", "q8_0"]
    assert main(again) == 2
    assert "is quantised already" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"out.gguf"}


def test_what_is_half_written_goes(tmp_path: Path) -> None:
    """A weight that is not finite ends the run, and leaves nothing."""
    source, out = tmp_path / "plain.gguf", tmp_path / "out.gguf"
    data = bytearray((FILES / "llama.gguf").read_bytes())
    file = GgufFile(FILES / "llama.gguf")
    begin = file.header.tensors["blk.1.ffn_up.weight"].begin
    data[begin : begin + 2] = b"\xff\x7f"
    source.write_bytes(data)
    assert main(["quantize", str(source), str(out), "--scheme", "q8_0"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["plain.gguf"]
