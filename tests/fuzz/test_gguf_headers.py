"""Hostile GGUF headers: each model loads, or one error names the file; in bounded time and memory.

The `gguf` package says where the entries of a file are. The first tests are the cases by name, the
last makes new ones.
"""

from __future__ import annotations

import random
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.bounded import bounded
from helpers.places import TESTS

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models.load import load

FILES = sorted((TESTS / "weights/gguf").glob("*.gguf"))
TEXT, ARRAY = 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip
"""gguf's number of a type of fixed size -> its format of `struct`."""
NUMBERS: tuple[Any, ...] = (0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -1, -(2**31))
REALS: tuple[Any, ...] = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-45, 3.4e38, 0.5)
NAMES = (
    *("nextn_predict_layers", "attention.head_count", "attention.head_count_kv", "block_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_log_multiplier", "rope.dimension_sections"),
    *("expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_count"),
    *("expert_shared_count", "leading_dense_block_count", "expert_weights_scale"),
    *("expert_weights_norm", "feed_forward_length", "attention.key_length_mla"),
    *("attention.q_lora_rank", "attention.value_scale", "attention.sliding_window_pattern"),
    *("swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.value_length_mla"),
)
"""Entries below the architecture that a file may lack."""
OTHERS = (
    *("general.architecture", "general.alignment", "tokenizer.ggml.eos_token_id"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.tokens"),
    "tokenizer.ggml.padding_token_id",
)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(kind: int, value: Any) -> bytes:
    """A number of a type, whatever the value: what does not fit is cut off."""
    form = FORMATS[kind]
    if form in "fd":
        with_sign = float(value)
        return struct.pack("<" + form, with_sign if form == "d" or abs(with_sign) < 3.5e38 else 0.0)
    if form == "?":
        return struct.pack("B", int(value == value and value != 0))
    whole = 0 if value != value or value in (float("inf"), -float("inf")) else int(value)
    size = struct.calcsize(form)
    return (whole % 256**size).to_bytes(size, "little")


def array(kind: int, values: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(values) if count is None else count) + b"".join(values)


@dataclass(frozen=True)
class File:
    """A GGUF file in parts, of which each may be changed.

    Attributes:
        counts: of tensors and of entries, as the file announces them; None counts them.
        size: bytes of the file, the rest of which is a hole; 0 adds none.
    """

    arch: str
    entries: list[bytes]
    tensors: list[bytes]
    data: bytes
    alignment: int = 32
    counts: tuple[int | None, int | None] = (None, None)
    size: int = 0

    @property
    def header(self) -> bytes:
        found = (len(self.tensors), len(self.entries))
        said = [own if own is not None else n for own, n in zip(self.counts, found, strict=True)]
        return b"".join([b"GGUF", struct.pack("<IQQ", 3, *said), *self.entries, *self.tensors])

    def write(self, path: Path) -> Path:
        header = self.header
        padding = bytes(-len(header) % self.alignment)
        with path.open("wb") as file:
            file.write(header + padding + self.data)
            file.truncate(max(self.size, file.tell()))
        return path

    def with_entry(self, key: str, kind: int, value: bytes) -> File:
        """With this entry, in the place of one of that name or behind all."""
        rest = [one for one in self.entries if not one.startswith(text(key))]
        return replace(self, entries=[*rest, entry(key, kind, value)])


def parts_of(path: Path) -> File:
    """A file's parts, as the library finds them."""
    reader = pytest.importorskip("gguf").GGUFReader(path)
    data = path.read_bytes()

    def raw(found: Any) -> bytes:
        return data[found.offset : found.offset + sum(part.nbytes for part in found.parts)]

    fields = [found for name, found in reader.fields.items() if not name.startswith("GGUF.")]
    return File(
        bytes(reader.fields["general.architecture"].parts[-1]).decode(),
        [raw(found) for found in fields],
        [raw(tensor.field) for tensor in reader.tensors],
        data[reader.data_offset :],
    )


@pytest.fixture(scope="module")
def files() -> dict[str, File]:
    return {path.stem: parts_of(path) for path in FILES}


def refusal(path: Path) -> str | None:
    """What is said of a file that does not load; every tensor of one that does is read."""
    with bounded():
        try:
            loaded = load(path, None, needs_mtp=False, headers_only=True)
        except (CheckpointError, UnsupportedModelError) as error:
            return str(error) if str(path) in str(error) else pytest.fail(str(error))
        assert loaded.checkpoint is not None
        if loaded.checkpoint.nbytes < 1 << 20:
            for name in loaded.checkpoint.tensors:
                loaded.checkpoint.tensor(name)
    return None


def test_whole_files_load(files: dict[str, File], tmp_path: Path) -> None:
    for name, file in files.items():
        assert (
            file.write(tmp_path / "model.gguf").read_bytes()
            == (TESTS / f"weights/gguf/{name}.gguf").read_bytes()
        )
        assert refusal(tmp_path / "model.gguf") is None, name


GIB = 1 << 30


def set_(key: str, kind: int, value: Any) -> Callable[[File], File]:
    """Replace an entry; a key that begins with a point is below the architecture."""

    def change(file: File) -> File:
        name = file.arch + key if key.startswith(".") else key
        raw = text(value) if kind == TEXT else value if kind == ARRAY else number(kind, value)
        return file.with_entry(name, kind, raw)

    return change


def tensor(change: Callable[[bytes], bytes], index: int = 0) -> Callable[[File], File]:
    """Change the description of a tensor."""

    def changed(file: File) -> File:
        tensors = [*file.tensors]
        tensors[index] = change(tensors[index])
        return replace(file, tensors=tensors)

    return changed


def placed(offset: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:-8] + struct.pack("<Q", offset)


def twice(key: str) -> Callable[[File], File]:
    """An entry that is there twice."""

    def change(file: File) -> File:
        again = next(one for one in file.entries if one.startswith(text(file.arch + key)))
        return replace(file, entries=[*file.entries, again])

    return change


def sparse(kind: int, count: int, size: int) -> Callable[[File], File]:
    """An array of so many values, most of them in a hole of the file."""

    def change(file: File) -> File:
        made = file.with_entry("tokenizer.ggml.tokens", ARRAY, array(kind, [], count))
        return replace(made, tensors=[], data=b"", size=size)

    return change


def stack(count: int) -> Callable[[File], File]:
    """A stack of so many experts of one number, which are in a hole."""
    raw = text("blk.0.ffn_up_exps.weight") + struct.pack("<IQQQIQ", 3, 1, 1, count, 0, 1 << 20)
    return lambda file: replace(file, tensors=[*file.tensors, raw], size=(1 << 22) + 4 * count)


def factors(shape: int | None) -> Callable[[File], File]:
    """The factors of Llama 3's angles with another size, or all zero."""

    def change(file: File) -> File:
        name = text("rope_freqs.weight")
        index = next(i for i, raw in enumerate(file.tensors) if raw.startswith(name))
        (begin,) = struct.unpack_from("<Q", file.tensors[index], len(file.tensors[index]) - 8)
        if shape is None:
            return replace(file, data=file.data[:begin] + bytes(32) + file.data[begin + 32 :])
        size = struct.pack("<IQ", 1, shape)
        return tensor(lambda raw: name + size + raw[-12:], index)(file)

    return change


def scaled_twice(file: File) -> File:
    return set_(".rope.scaling.type", TEXT, "linear")(set_(".rope.scaling.factor", 6, 2.0)(file))


CASES: dict[str, tuple[str, Callable[[File], File], str]] = {
    "factors of zero": ("llama3", factors(None), "weight is F32.8.; expected 8 positive"),
    "too few factors": ("llama3", factors(4), "weight is F32.4.; expected 8 positive"),
    "angles scaled twice": ("llama3", scaled_twice, "type is 'linear'; expected none beside rope"),
    "factors of Qwen2's YaRN": ("qwen2", lambda f: replace(f, tensors=[
        *f.tensors, text("rope_freqs.weight") + struct.pack("<IQIQ", 1, 8, 0, len(f.data))],
        data=f.data + bytes(32)), "rope_freqs.weight is F32.8.; expected 8 positive"),
    "experts of Mixtral": ("llama", set_(".expert_count", 4, 8), "expert_used_count is missing"),
    "scores scaled": ("llama", set_(".attention.scale", 6, 0.5), "scale is 0.5; expected none"),
    "logits scaled": ("qwen2", set_(".logit_scale", 6, 8.0), "logit_scale is 8.0; expected none"),
    "a window": ("qwen3", set_(".attention.sliding_window", 4, 8), "window is 8; expected"),
    "narrow values": ("qwen3", set_(".attention.value_length", 4, 8), "length is 8; expected 16"),
    "half a head rotates": ("llama", set_(".rope.dimension_count", 4, 8), "is 8; expected 16"),
    "an odd head": ("llama", set_(".attention.key_length", 4, 15), "heads of an even width"),
    "heads wider than the model": ("llama", lambda f: set_(".attention.head_count", 4, 2**20)(
        set_(".attention.key_length", 4, 0)(f)), "expected heads of an even width"),
    "other heads": ("llama", set_(".attention.head_count", 4, 8), "in place of 64"),
    "heads by layer": ("llama", set_(".attention.head_count", ARRAY, array(
        4, [number(4, 4)] * 4)), "head_count is .4, 4, 4, 4.; expected a positive size"),
    "10^9 texts in a hole": ("glm4_moe", sparse(TEXT, 10**9, 9 * GIB), "announces 1000000000 val"),
    "10^9 bytes in a hole": ("glm4_moe", sparse(0, 10**9, 2 * GIB), "announces 1000000000 values"),
    "2^21 texts": ("glm4_moe", sparse(TEXT, 2**21 - 100, GIB), "token_embd.weight"),
    "a text of 1 GiB": ("glm4_moe", lambda f: replace(f, entries=[
        *f.entries, text("general.name2") + struct.pack("<IQ", TEXT, GIB)], tensors=[],
        size=2 * GIB), "token_embd.weight"),
    "a key of 1 GiB": ("glm4_moe", lambda f: replace(f, entries=[
        *f.entries, struct.pack("<Q", GIB)], size=2 * GIB), "a key is a text of 1073741824 bytes"),
    "2^31 tensors": ("glm4_moe", lambda f: replace(f, counts=(2**31, None), size=99 * GIB),
                     "announces 2147483648 tensors; expected at most"),
    "2^31 entries": ("glm4_moe", lambda f: replace(f, counts=(None, 2**31), size=99 * GIB),
                     "announces 2147483648 entries of metadata; expected at most"),
    "a stack of 2^30 experts": ("glm4_moe", stack(2**30), "at most 262144 tensors"),
    "a stack of one matrix": ("glm4_moe", lambda f: replace(f, tensors=[
        *(t for t in f.tensors if b"blk.1.ffn_up_exps" not in t), text("blk.1.ffn_up_exps.weight")
        + struct.pack("<IQIQ", 1, 32, 0, len(f.data)) ], data=f.data + bytes(128)),
        "expected a stack of matrices"),
    "an entry twice": ("glm4_moe", twice(".block_count"), "have 'glm4moe.block_count' twice"),
    "an array of arrays": ("glm4_moe", set_(".x", ARRAY, array(ARRAY, [])), "array of the type 9"),
    "alignment 48": ("glm4_moe", set_("general.alignment", 4, 48), "alignment is 48; expected a"),
    "alignment 0": ("glm4_moe", set_("general.alignment", 4, 0), "alignment is 0; expected a"),
    "alignment -1": ("glm4_moe", set_("general.alignment", 5, -1), "alignment is -1; expected a"),
    "alignment text": ("glm4_moe", set_("general.alignment", TEXT, "x"), "alignment is 'x'; exp"),
    "alignment flag": ("glm4_moe", set_("general.alignment", 7, 1), "alignment is True; expected"),
    "a tensor aside": ("glm4_moe", tensor(placed(8)), "begins at byte 8 of the data"),
    "two tensors at a place": ("glm4_moe", tensor(placed(0), 1), "where no other tensor is"),
    "tensors overlap": ("glm4_moe", tensor(placed(32)), "overlap at byte"),
    "no weight or bias": ("glm4_moe", tensor(lambda raw: text("blk.0.attn_q") + raw[8 + len(
        "output.weight"):]), "blk.0.attn_q is no tensor"),
    "architecture a number": ("glm4_moe", set_("general.architecture", 4, 7), "architecture '7'"),
    "eos a list": ("glm4_moe", set_("tokenizer.ggml.eos_token_id", ARRAY, array(4, [])),
                   r"eos_token_id is \[\]; expected a token id"),
    "eos a text": ("glm4_moe", set_("tokenizer.ggml.eos_token_id", TEXT, "2"), "is '2'; expected"),
    "layers a text": ("glm4_moe", set_(".nextn_predict_layers", TEXT, "x"), "is 'x'; expected a"),
    "layers a list": ("glm4_moe", set_(".nextn_predict_layers", ARRAY, array(4, [])), "positive s"),
    "groups a list": ("glm4_moe", set_(".expert_group_count", ARRAY, array(4, [])), "positive s"),
    "scale NaN": ("glm4_moe", set_(".expert_weights_scale", 6, float("nan")), "positive number"),
    "base infinite": ("glm4_moe", set_(".rope.freq_base", 12, float("inf")), "positive number"),
    "base the largest": ("glm4_moe", set_(".rope.freq_base", 6, 3.4028e38), ""),
    "rotates more than a head": ("glm4_moe", set_(".rope.dimension_count", 4, 4096), "at most 16"),
    "sections a text": ("qwen3_5", set_(".rope.dimension_sections", TEXT, "x"), "expected sizes"),
    "sections of reals": ("qwen3_5", set_(".rope.dimension_sections", ARRAY, array(6, [bytes(4)])),
                          "expected sizes"),
    "a key as wide as its angles": ("deepseek_v3", set_(".attention.key_length_mla", 4, 4), "few"),
    "multiplier a text": ("deepseek_v3", set_(".rope.scaling.yarn_log_multiplier", TEXT, ""), "po"),
    "heads of too few blocks": ("mimo_v2", set_(".attention.head_count_kv", ARRAY, array(
        4, [number(4, 2)])), "expected . values, one for each block"),
    "flags of too few blocks": ("step3p5", set_(".attention.sliding_window_pattern", ARRAY, array(
        7, [b"\1"])), "expected . values, one for each block"),
    "limits a number": ("step3p5", set_(".swiglu_clamp_exp", 6, 7.0), ". or more numbers of 0"),
    "limits of texts": ("step3p5", set_(".swiglu_clamp_exp", ARRAY, array(TEXT, [])), "an array"),
    "more blocks than numbers": ("step3p5", set_(".attention.head_count", ARRAY, array(
        4, [], 2000) + bytes(8000)), "is an array of 2000 numbers; expected"),
}  # fmt: skip
"""File, what is done to it, and what is then said; "" if it loads."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(case: str, files: dict[str, File], tmp_path: Path) -> None:
    name, change, message = CASES[case]
    said = refusal(change(files[name]).write(tmp_path / "model.gguf"))
    assert re.search(message, said or "", re.DOTALL), said
    assert bool(said) == bool(message)


def test_ids_that_no_token_has_are_no_error(files: dict[str, File], tmp_path: Path) -> None:
    """llama.cpp writes 2^32 - 1 for a token that a model lacks."""
    for name in ("eos", "bos", "padding", "eot"):
        change = set_(f"tokenizer.ggml.{name}_token_id", 4, 2**32 - 1)
        assert refusal(change(files["qwen3_5"]).write(tmp_path / "model.gguf")) is None


def test_parts_that_have_no_such_number(files: dict[str, File], tmp_path: Path) -> None:
    for number, count in ((1, 0), (3, 2), (0, 2)):
        path = files["qwen3_5"].write(tmp_path / f"a-{number:05}-of-{count:05}.gguf")
        assert "is no part of" in (refusal(path) or "")


def value(chance: random.Random, depth: int = 0) -> tuple[int, bytes]:
    """A type and a value of it, which may be cut off or announce more than there is."""
    kind = chance.choice([*FORMATS, TEXT, TEXT, ARRAY, ARRAY])
    if kind == TEXT:
        words = [b"", b"none", b"yarn", b"linear", b"x" * 5000, b"\xff\xfe", b"\0", b"mimo2"]
        return kind, text(chance.choice(words))
    if kind == ARRAY:
        if depth:
            return kind, array(ARRAY, [])
        inner = chance.choice([*FORMATS, TEXT, ARRAY, 77])
        values = [value_of(chance, inner) for _ in range(chance.choice([0, 1, 2, 3, 4, 5, 2000]))]
        count = chance.choice([*[None] * 9, 2**20, 2**31, 2**62, 2**64 - 1])
        return kind, array(inner, values, count)
    return kind, value_of(chance, kind)


def value_of(chance: random.Random, kind: int) -> bytes:
    if kind in FORMATS:
        return number(kind, chance.choice([*NUMBERS, *REALS]))
    return text("a") if kind == TEXT else bytes(12)


def mutated(file: File, chance: random.Random) -> File:
    """A file with one to three changes."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        kinds = [*[_set] * 6, *[_edit] * 3, *[_tensor] * 3, _counts, _hole]
        file = chance.choice(kinds)(file, chance)
    return file


def _set(file: File, chance: random.Random) -> File:
    """Another value of an entry that is there, or that might be."""
    known = [key_of(one) for one in file.entries]
    names = [*known, *known, *(f"{file.arch}.{name}" for name in NAMES), *OTHERS]
    return file.with_entry(chance.choice(names), *value(chance))


def key_of(raw: bytes) -> str:
    (length,) = struct.unpack_from("<Q", raw)
    return raw[8 : 8 + min(length, 200)].decode("latin-1")


def _edit(file: File, chance: random.Random) -> File:
    """An entry goes, comes twice, has another type, or has other bytes."""
    entries, place = [*file.entries], chance.randrange(len(file.entries))
    raw, kind = bytearray(entries[place]), chance.choice(["gone", "twice", "type", "bytes"])
    if kind == "bytes":
        for _ in range(chance.randint(1, 3)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
    elif kind == "type":
        start = 8 + len(key_of(entries[place]))
        raw[start : start + 4] = struct.pack("<I", chance.choice([*range(14), 2**32 - 1]))
    entries[place : place + 1] = {"gone": [], "twice": [entries[place]] * 2}.get(kind, [bytes(raw)])
    return replace(file, entries=entries) if entries else file


def _tensor(file: File, chance: random.Random) -> File:
    """A tensor goes, comes twice, or has another name, shape, type or place."""
    if not file.tensors:
        return file
    tensors, place = [*file.tensors], chance.randrange(len(file.tensors))
    raw, kind = tensors[place], chance.choice(["gone", "twice", "name", "shape", "type", "place"])
    rest = raw[8 + len(key_of(raw)) :]
    names = [key_of(one) for one in file.tensors]
    other = chance.choice([*names, "", "x", "blk.0", "blk.99999999999.attn_q.weight", "output.x",
                           "blk.0.ffn_up_exps.weight", "blk.00.attn_q.weight"])  # fmt: skip
    sizes = [chance.choice([0, 1, 2, 32, 64, 256, 2**20, 2**40, 2**63]) for _ in range(
        chance.choice([0, 1, 2, 3, 4, 5]))]  # fmt: skip
    kinds = chance.choice([*range(41), 2**32 - 1])
    offset = chance.choice([0, 1, 32, 4096, 2**31, 2**63, 2**64 - 1])
    changed = {
        "gone": [],
        "twice": [raw, raw],
        "name": [text(other) + rest],
        "shape": [text(key_of(raw)) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
                  + rest[-12:]],
        "type": [raw[:-12] + struct.pack("<I", kinds) + raw[-8:]],
        "place": [raw[:-8] + struct.pack("<Q", offset)],
    }  # fmt: skip
    tensors[place : place + 1] = changed[kind]
    return replace(file, tensors=tensors)


def _counts(file: File, chance: random.Random) -> File:
    said = [chance.choice([None, 0, 1, 10**6, 2**31, 2**63, 2**64 - 1]) for _ in range(2)]
    return replace(file, counts=(said[0], said[1]))


def _hole(file: File, chance: random.Random) -> File:
    """Gigabytes of zeros that take no place, so that counts meet no end."""
    return replace(file, size=chance.choice([GIB, 9 * GIB, 99 * GIB]))


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_headers(count: int, files: dict[str, File], tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(count):
        chance = random.Random(seed)
        name = chance.choice(sorted(files))
        path = mutated(files[name], chance).write(tmp_path / "model.gguf")
        try:
            said = refusal(path)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {name}: {type(error).__name__}: {error}") from error
        seen[re.sub(r"\d+", "0", said.replace(str(path), "")[:40]) if said else "loads"] += 1
        path.unlink()
    print(*seen.most_common(), sep="\n")
    assert count / 50 < seen["loads"] < count / 2
    assert len(seen) > 20
