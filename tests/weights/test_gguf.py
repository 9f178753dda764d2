"""GGUF files: those of llama.cpp's own converter, types of blocks, and files that are damaged."""

from __future__ import annotations

import json
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blocks import KEPT, BlockWeight
from helpers.tiny import family_of, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import mtpc
from mtpc.errors import CheckpointError, OptionError, UnsupportedModelError
from mtpc.models.hf import model_class
from mtpc.models.load import find_family
from mtpc.models.read_config import read_config
from mtpc.server.chat import load_chat_template
from mtpc.store.entries import EntryStore
from mtpc.store.tokenizers import KeptTokenizers
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.formats.gguf import find
from mtpc.weights.gguf import find_gguf
from mtpc.weights.gguf.blocks import BLOCKS
from mtpc.weights.gguf.families import FAMILIES
from mtpc.weights.gguf.file import Change, GgufFile, GgufTensor, Heads
from mtpc.weights.gguf.names import ENDS, STACKS
from mtpc.weights.grouped_recipes import GroupSpec, pack_rows, rows_of
from mtpc.weights.served_model import ServedModel
from mtpc.weights.write_quantised import quantise_checkpoint

MODEL = "model.safetensors"
FILES = Path(__file__).parent / "gguf"
SMALL: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, vocab_size=64)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"rope_parameters": dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64,
        attention_factor=1.25)}),
    "llama": ("llama", {}),
    "llama3": ("llama", {"attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": dict(
            rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=64)}),
}  # fmt: skip
"""Files of dense models -> family, and what its tiny checkpoint has of its own."""
WITH_LAYERS = ("qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "mimo_v2", "step3p5")
NAMES = (*WITH_LAYERS, *DENSE)
WITHOUT_MTP = ("deepseek_v3",)
"""The converter leaves out MTP layers of these."""
SAYS_LESS = {
    "initializer_range",  # Of training.
    "pad_token_id",  # Files have none that the tiny configs have.
    "num_nextn_predict_layers",  # Qwen's own name is another; DeepSeek's layers are left out.
    "scoring_func",
    "topk_method",
    "rope_parameters",  # Compared by what follows from it.
    "partial_rotary_factor",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
}
"""Entries of configs that files do not have, or that differ without a difference."""
JOINED = re.compile(r"\.experts\.|\.kv_b_proj\.")
"""Names of tensors that are several in a file, or a part of one."""
NOT_READ = {
    *("rope_factors_long", "rope_factors_short"),  # They go into the config.
    "rope_freqs",  # Part of the config, or refused by name.
    "attn_rot_embd",
    "ffn_gate_up_exps",
    "attn_qkv",
    "layer_output_norm",
    "attn_sinks",
}
"""Names that gguf allows in families where the converter does not write them."""
CODES = sorted(KEPT)
FEW = sorted(number for number, block in BLOCKS.items() if block.is_rounded)
"""Types of 1 to 3 bits."""


def source_of(name: str, directory: Path) -> Path:
    """The checkpoint that a file was converted from."""
    family, changes = DENSE.get(name, (name, {}))
    return make_checkpoint(family, directory, mtp=name not in DENSE, **SMALL, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_checkpoint_is_itself(name: str, tmp_path: Path) -> None:
    """Each tensor under its name, with its values, and the config."""
    source = Checkpoint(source_of(name, tmp_path / "hf"))
    found = Checkpoint(FILES / f"{name}.gguf")
    missing = source.tensors.keys() - found.tensors.keys()
    if name in WITHOUT_MTP:
        missing = {n for n in missing if not n.startswith("model.layers.2.")}
    assert not missing
    assert found.tensors.keys() <= source.tensors.keys()
    for tensor in found.tensors:
        wanted, got = source.tensor(tensor), found.tensor(tensor)
        if got.dtype == torch.bfloat16:
            assert torch.equal(got, wanted.bfloat16()), tensor
        else:  # One was added to norms, and exp taken of A_log, in float32.
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    family = family_of(DENSE.get(name, (name,))[0])
    assert find_family(found.config["architectures"]).name == family.name
    one, other = (read_config(c, family) for c in (source, found))
    differ = {
        key
        for key in one.to_dict().keys() & other.to_dict().keys() - SAYS_LESS
        if one.to_dict()[key] != other.to_dict()[key]
    }
    assert differ <= {"dtype"}


@pytest.mark.parametrize("arch", FAMILIES)
def test_names_are_those_of_the_library(arch: str) -> None:
    """Whatever gguf knows of MTP layers of a family, mtpc does; and the rest of a layer."""
    gguf = pytest.importorskip("gguf")
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    all_ = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]}
    known = {name.removeprefix("blk.{bid}.") for name in all_}
    family = FAMILIES[arch]
    own = {*family.modules, *family.mtp_modules, *STACKS, *ENDS}
    assert len(own & known) >= 11
    unknown = known - own - NOT_READ - ({"ffn_gate_inp"} if arch == "llama" else set())
    assert not unknown


@pytest.mark.parametrize("name", NAMES)
def test_names_come_from_the_library(name: str) -> None:
    """transformers' name of a tensor -> that of the file, by gguf's own table."""
    gguf = pytest.importorskip("gguf")
    file = Checkpoint(FILES / f"{name}.gguf")
    header = GgufFile(FILES / f"{name}.gguf").header
    arch = header.metadata["general.architecture"]
    number = next(key for key, said in gguf.MODEL_ARCH_NAMES.items() if said == arch)
    table = gguf.get_tensor_name_map(number, header.metadata[f"{arch}.block_count"])
    sources = {stored.begin: source for source, stored in header.tensors.items()}
    whole = {n: sources[t.begin] for n, t in file.tensors.items() if not JOINED.search(n)}
    wanted = {n: table.get_name(n, (".weight", ".bias")) for n in whole}
    ends = {n: (None, source, source.rpartition(".")[0]) for n, source in whole.items()}
    assert not {n: found for n, found in wanted.items() if found not in ends[n]}
    assert None not in wanted.values() or name not in DENSE


def blocks(number: int, seed: int, rows: int = 3, count: int = 2) -> torch.Tensor:
    """Random bytes of rows of blocks."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, count * BLOCKS[number].nbytes)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def values(number: int, raw: torch.Tensor) -> torch.Tensor:
    """What blocks stand for."""
    return BlockWeight(number, raw).weight.dequantise()


@pytest.mark.parametrize("number", CODES, ids=lambda number: BLOCKS[number].name)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_blocks_are_those_of_the_library(number: int, seed: int) -> None:
    """Every pattern of bits, infinite and subnormal scales included, against gguf's own."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    kind = gguf.GGMLQuantizationType(number)
    block, raw = BLOCKS[number], blocks(number, seed)
    assert (block.name, (block.inputs, block.nbytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind)).double()
    found = values(number, raw).double()
    if block.name == "MXFP4":  # An exponent of 255 is NaN, and 2^127 in the library.
        wanted = torch.where(found.isnan(), found, wanted)
    limit = 2 * wanted.abs().nan_to_num(0, 0, 0).amax().item() * 2**-23  # It works in float32.
    torch.testing.assert_close(found, wanted, rtol=2**-22, atol=limit, equal_nan=True)


@pytest.mark.parametrize("number", CODES, ids=lambda number: BLOCKS[number].name)
def test_blocks_are_those_of_transformers(number: int) -> None:
    """The same against transformers' own, which every machine has."""
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    if number not in dequant.GGML_BLOCK:
        pytest.skip("transformers has no such type")
    raw = blocks(number, 0)
    size = BLOCKS[number].nbytes
    raw.unflatten(-1, (-1, size))[..., :2] = torch.tensor([0, 60], dtype=torch.uint8)  # d = 1
    if BLOCKS[number].name == "Q6_K":
        raw.unflatten(-1, (-1, size))[..., -2:] = torch.tensor([0, 60], dtype=torch.uint8)
    elif BLOCKS[number].has_mins:
        raw.unflatten(-1, (-1, size))[..., 2:4] = torch.tensor([0, 56], dtype=torch.uint8)
    wanted = dequant.dequantize(raw, number, torch.float32)
    assert torch.equal(values(number, raw), wanted.reshape(3, -1))


@pytest.mark.parametrize("number", [n for n in CODES if BLOCKS[n].has_mins])
@pytest.mark.parametrize("columns", [None, Heads(2, 8, 32)], ids=["", "turned"])
def test_types_with_minima_are_read_as_codes(number: int, columns: Heads | None) -> None:
    """What Q4_K_M is made of: as gguf's own dequantiser has it, to the bit."""
    gguf = pytest.importorskip("gguf")
    block, raw = BLOCKS[number], blocks(number, 1, rows=40, count=512 // BLOCKS[number].inputs)
    steps = raw.unflatten(-1, (-1, block.nbytes))[..., :4].view(torch.int16)
    steps[:] = torch.tensor([0.0123, 0.0567]).half().view(torch.int16)
    stored = GgufTensor(Path("a"), block.name, (40, 512), 0, block, Change(columns=columns))
    (weight,) = find({"a.weight": stored}, {}, {})
    whole = GroupSpec(block.form, block.scales)
    assert weight.spec == (whole if columns is None else whole.widened())
    found = weight.grouped(lambda name: raw).whole()
    kind = gguf.GGMLQuantizationType(number)
    wanted = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind))
    wanted = wanted if columns is None else wanted[:, columns.order()]
    torch.testing.assert_close(found.dequantise(), wanted, rtol=2**-23, atol=2**-23)
    assert torch.equal(weight.values(lambda name: raw, torch.float32), found.dequantise())
    packed = pack_rows(rows_of(found), weight.spec)
    x = torch.eye(512)  # Rounding to int8 leaves it as it is.
    parts = packed["codes"], packed["scales"], packed.get("zeros")
    product = torch.ops.mtpc.grouped_linear(x, *parts, 40)
    torch.testing.assert_close(product.t(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", FEW, ids=lambda number: BLOCKS[number].name)
def test_types_of_few_bits_are_rounded_again(number: int) -> None:
    """To 8 bits, which is within half a 127th of a group's largest value; a note says so."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType(number)
    block = BLOCKS[number]
    assert (block.name, (block.inputs, block.nbytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])
    raw = torch.randint(0, 64, (3, 2 * block.nbytes), dtype=torch.uint8)  # All scales are finite.
    stored = GgufTensor(Path("a"), block.name, (3, 512), 0, block, Change())
    (weight,) = find({"a.weight": stored}, {}, {})
    assert weight.is_rounded
    assert weight.layout == f"{block.name}, rounded to 8 bits"
    wanted = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind)).unflatten(-1, (-1, 32))
    found = weight.grouped(lambda name: raw).whole().dequantise().unflatten(-1, (-1, 32))
    limit = wanted.abs().amax(-1, keepdim=True) * (0.51 / 127) + 2.0**-25 * 127
    assert bool(((found - wanted).abs() <= limit).all())


def rewritten(source: Path, out: Path, kind: str) -> Path:
    """A GGUF file with its matrices in another type, by the gguf package."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        is_vector = len(tensor.shape) < 2 or any(n in tensor.name for n in ("conv1d", "gate_inp"))
        if is_vector or tensor.shape[0] % gguf.GGML_QUANT_SIZES[wanted][0]:
            writer.add_tensor(tensor.name, plain)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(plain, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("name", NAMES)
def test_quantised_files_are_their_values(name: str, kind: str, tmp_path: Path) -> None:
    """Codes where kernels read them, and the values of gguf's own dequantiser everywhere."""
    path = rewritten(FILES / f"{name}.gguf", tmp_path / "a.gguf", kind)
    found = Checkpoint(path)
    plain = Checkpoint(rewritten(path, tmp_path / "b.gguf", "F32"))
    assert found.tensors.keys() == plain.tensors.keys()
    for tensor in found.tensors:
        wanted = plain.tensor(tensor)
        if tensor in found.quantised:
            wanted = wanted.to(torch.bfloat16)
        assert torch.equal(found.tensor(tensor), wanted), tensor
    for tensor in found.specs:
        codes = found.grouped(tensor).whole().dequantise().to(torch.bfloat16)
        assert torch.equal(codes, found.tensor(tensor)), tensor
    assert found.specs


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        pytest.param("glm4_moe", marks=pytest.mark.slow),
        *(pytest.param(n, marks=[pytest.mark.slow] * (n != "llama3")) for n in DENSE),
    ],
)
def test_text_is_that_of_the_values(name: str, tmp_path: Path) -> None:
    """transformers runs the dequantised values, in the checkpoint's own format; mtpc the file.

    The values are gguf's, rounded to bfloat16: the test above. The prompt is long enough for scaled
    angles to matter.
    """
    path = rewritten(FILES / f"{name}.gguf", tmp_path / "model.gguf", "Q8_0")
    plain = Checkpoint(path)
    directory = source_of(name, tmp_path / "hf")
    save_file({n: plain.tensor(n).float() for n in plain.tensors}, directory / MODEL)
    theirs = model_class(family_of(DENSE.get(name, (name,))[0])).from_pretrained(directory)
    prompt = torch.randint(2, 64, (1, 100), generator=torch.Generator().manual_seed(0))
    wanted = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    count = 0 if name in DENSE else 1
    options = dict(backend="eager", spec_tokens=count, batch_buckets=(1,), max_len=128)
    spec = mtpc.compile(path, dtype="float32", **options)
    found = spec.generate(prompt[0].tolist(), max_new_tokens=12, ignore_eos=True)
    assert list(found) == wanted[0, 100:].tolist()


@pytest.fixture(scope="module")
def whole() -> bytes:
    return (FILES / "glm4_moe.gguf").read_bytes()


def read(data: bytes, directory: Path) -> Checkpoint:
    path = directory / "model.gguf"
    path.write_bytes(data)
    return Checkpoint(path)


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_truncated_file_is_one_error(
    share: float, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(CheckpointError, match=r"empty|not a complete GGUF file"):
        read(whole[: int(len(whole) * share)], tmp_path_factory.mktemp("cut"))


def header_size(data: bytes) -> int:
    """Bytes before the data of tensors: the last tensor's name is near their end."""
    return data.rindex(b"output_norm.weight") + 60


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_one_error(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any number of eight bytes at any place: an error of ours, or a file that still reads."""
    place = data.draw(st.integers(0, header_size(whole)))
    number = data.draw(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32, 2**63]))
    broken = bytearray(whole)
    broken[place : place + 8] = struct.pack("<Q", number)
    try:
        found = read(bytes(broken), tmp_path_factory.mktemp("damaged"))
    except (CheckpointError, UnsupportedModelError):
        return
    for name in found.tensors:
        found.tensor(name)


def edited(whole: bytes, key: str, number: int) -> bytes:
    """The file with another number in an entry of metadata."""
    place = whole.index(key.encode()) + len(key) + 4
    return whole[:place] + struct.pack("<I", number) + whole[place + 4 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], r"begins with b'GGML', and GGUF files with b'GGUF'"),
        (lambda d: d[:4] + struct.pack("<I", 9) + d[8:], "version 9; expected 2 or 3"),
        (lambda d: d[:8] + b"\xff" * 8 + d[16:], r"announces \d+ tensors, and \d+ bytes are left"),
        (lambda d: d[:16] + b"\xff" * 8 + d[24:], r"announces \d+ entries of metadata"),
        (lambda d: edited(d, "glm4moe.block_count", 2**30), "expected a tensor or more for each"),
        (lambda d: edited(d, "glm4moe.embedding_length", 0), "is 0; expected a positive size"),
        (lambda d: d.replace(b"blk.1.attn_q.w", b"blk.1.attn_x.w"), "blk.1.attn_x.weight is no"),
        (lambda d: d.replace(b"glm4moe.nextn_predict", b"glm4moe.nextn_predicx"), "blk.2.* is no"),
    ],
)
def test_what_is_wrong_is_named(change: Any, message: str, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(change(whole), tmp_path)


def test_it_is_not_quantised_again(whole: bytes, tmp_path: Path) -> None:
    read(whole, tmp_path)
    with pytest.raises(OptionError, match="scheme is 'int8', which GGUF files do not have"):
        quantise_checkpoint(tmp_path / "model.gguf", tmp_path / "out", "int8")


def test_an_unknown_family_is_named(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture 'glm4mox'; expected one of"):
        read(whole.replace(b"glm4moe", b"glm4mox"), tmp_path)


def test_which_files_are_a_model(whole: bytes, tmp_path: Path) -> None:
    """One file, or all parts of a split one; encoders of pictures are passed over."""
    (tmp_path / "mmproj-a.gguf").write_bytes(whole)
    (tmp_path / "a.gguf").write_bytes(whole)
    assert find_gguf(tmp_path) == [tmp_path / "a.gguf"]
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: a.gguf, b.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "c-00001-of-00002.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"c-00002-of-00002.gguf is missing"):
        find_gguf(tmp_path / "c-00001-of-00002.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_the_theorem_on_codes(name: str, kind: str, tmp_path: Path) -> None:
    path = rewritten(FILES / f"{name}.gguf", tmp_path / "model.gguf", kind)
    texts = []
    for count in (0, 2):
        spec = mtpc.compile(path, spec_tokens=count, batch_buckets=(1,), max_len=64)
        texts.append(spec.generate([5, 6, 7, 8, 9], max_new_tokens=24, ignore_eos=True))
    assert texts[0] == texts[1]


def test_the_vocabulary_of_the_file(tmp_path: Path) -> None:
    """Bytes and one merge: transformers makes the tokenizer of a file that has merges."""
    gguf = pytest.importorskip("gguf")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_ = list(bytes_to_unicode().values())
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([*bytes_, "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    served = ServedModel("a model", 257, (), path)
    assert served.encode("abba") == [256, bytes_.index("b"), bytes_.index("a")]
    assert served.decode([256, bytes_.index("a")]) == "aba"
    assert served.name == "model.gguf"
    kept = KeptTokenizers(EntryStore(tmp_path / "cache"))
    assert not KeptTokenizers(kept.store, is_frozen=True).write(path, b"no")
    for is_kept in (False, True):
        again = replace(served, kept=kept)
        assert (kept.read(path) is not None) is is_kept
        if is_kept:  # transformers is not asked.
            again.__dict__["_tokenizer"] = None
        assert again.encode("abba") == served.encode("abba")
        assert again.decode([256, bytes_.index("a")]) == "aba"
        assert again.own_tokens == served.own_tokens
        assert again.tokenizer_json() == served.tokenizer_json()
    assert json.loads(kept.read(path) or b"")["model"]["merges"] == ["a b"], "not [['a', 'b']]"
    path.write_bytes(path.read_bytes())
    assert kept.read(path) is None, "the file is another one now"


def test_a_file_without_vocabulary(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(
        whole.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.nokens")
    )
    assert not ServedModel("a model", 64, (), tmp_path / "a.gguf").has_tokenizer


@pytest.mark.parametrize("is_directory", [False, True])
@pytest.mark.parametrize("size", [0, 100_000])
def test_the_chat_template_of_the_file(size: int, is_directory: bool, tmp_path: Path) -> None:
    """A long one, too, with the texts of special tokens; a file beside it counts first."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_token_list(["a", "<s>", "</s>"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    said = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    writer.add_chat_template("{# " + "x" * size + " #}" + said)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    given = tmp_path if is_directory else path
    template = load_chat_template(given, None)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}], {}) == "<s>hi</s>"
    (tmp_path / "chat_template.jinja").write_text("another")
    template = load_chat_template(given, None)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}], {}) == "another"
