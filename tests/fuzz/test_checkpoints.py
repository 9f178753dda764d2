"""Hostile checkpoints: each loads, or ends in one CheckpointError that names a file; fast.

The first tests are the regression cases by name, the last makes new ones.
"""

from __future__ import annotations

import builtins
import copy
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpc.errors import CheckpointError, MtpcError, RequestError
from mtpc.models.load import load
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.served_model import ServedModel

INDEX = "model.safetensors.index.json"
HUGE = 2**40
VALUES: tuple[Any, ...] = (
    *(None, "x", "", -1, 0, 1, 3, HUGE, 2**70, 10**400, [], {}, True, 1.5, -1e300, float("nan")),
    *([None], {"a": {}}, [1] * 5, "float32", "org/repo", "../x", "\0", "\ud800"),
)
ENTRIES = (
    *("quantization_config", "attn_implementation", "_attn_implementation", "text_config"),
    *("auto_map", "fusion_config", "per_layer_config", "to_dict", "get_text_config", "__class__"),
    *("return_dict", "rope_scaling", "rope_theta", "sliding_window", "kernel_config"),
    *("transformers_weights", "mtp_num_hidden_layers", "num_nextn_predict_layers"),
)
"""Entries that no tiny config has and that something might read."""


@pytest.fixture
def copies(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """copies(family): the tiny checkpoint in a directory of its own, its weights a hard link."""

    def get(family: str = "mimo") -> Path:
        source, directory = checkpoint(family, "random"), tmp_path / "copy"
        directory.mkdir(exist_ok=True)
        for path in directory.iterdir():
            path.unlink()
        os.link(source / "model.safetensors", directory / "model.safetensors")
        (directory / "config.json").write_text((source / "config.json").read_text())
        return directory

    return get


def edit_config(directory: Path, *names: str, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    part = config
    for name in names:
        part = part[name]
    part.update(changes)
    path.write_text(json.dumps(config))


DOCUMENTS = {
    "a list": (b"[]", "holds a list"),
    "null": (b"null", "holds null"),
    "a number": (b"7", "holds a number 7"),
    "nested": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "no UTF-8": (b'{"a": "\xff\xfe"}', "not valid JSON.*utf-8"),
    "digits": (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    "nothing": (b"", "not valid JSON"),
}


@pytest.mark.parametrize("file", ["config.json", INDEX, "generation_config.json"])
@pytest.mark.parametrize("what", DOCUMENTS)
def test_documents(copies: Callable[..., Path], file: str, what: str) -> None:
    directory, (data, message) = copies(), DOCUMENTS[what]
    (directory / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"(?s){directory / file}.*{message}"):
        load(directory, None, needs_mtp=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "MiMoForCausalLM"}, "architectures is text"),
        ({"architectures": [None]}, "architectures is a list"),
        ({"num_nextn_predict_layers": HUGE}, f"num_nextn_predict_layers is a number {HUGE}"),
        ({"num_nextn_predict_layers": 4000}, "expected 0 to 43, the tensors of the checkpoint"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is text '1'"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is a number"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is a number -2"),
        ({"hidden_size": 2**70}, "hidden_size is a number"),
        ({"text_config": []}, "text_config is a list"),
        ({"quantization_config": 3}, "quantization_config is a number 3"),
        ({"quantization_config": {"weight_block_size": 128}}, "weight_block_size 128"),
        ({"dtype": "load"}, "dtype is text 'load'; expected one of bfloat16"),
        ({"dtype": ["float32"]}, "dtype is a list"),
        ({"eos_token_id": "x"}, "eos_token_id is text 'x'"),
        ({"eos_token_id": [1, 2**63]}, "eos_token_id is a list"),
        ({"intermediate_size": 2**27}, "describes a model of .* weights"),
        (
            {"hidden_act": "nothing"},
            "hidden_act is text 'nothing', .*; expected str, such as 'silu'",
        ),
        (
            {"num_attention_heads": 0},
            r"num_attention_heads is a number 0, .*; expected int, such as",
        ),
        (
            {"rope_parameters": {"rope_theta": "x"}},
            "with rope_theta 'x'; expected a number above 0",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": HUGE}},
            "rope_parameters.partial_rotary_factor is a number .*; expected a share of 0 to 1",
        ),
        ({"max_position_embeddings": -1}, "max_position_embeddings is a number -1"),
    ],
)
def test_entries(copies: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    """Refused within a second: no count is looped over first."""
    directory, start = copies(), time.monotonic()
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message) as refused:
        load(directory, None, needs_mtp=True)
    assert str(directory) in str(refused.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("headers_only", [False, True])
def test_tensors_of_other_shapes(copies: Callable[..., Path], headers_only: bool) -> None:
    """A tensor is named with both shapes, and so are the entries that its shape is made of."""
    directory = copies()
    edit_config(directory, num_key_value_heads=None)
    said = (
        rf"{directory}/config\.json describes model\.layers\.0\.self_attn\.k_proj\.bias as "
        r"\[\d+\], by .*num_key_value_heads \(null\).*; the checkpoint's tensor is \[\d+\]"
    )
    with pytest.raises(CheckpointError, match=said):
        load(directory, None, needs_mtp=False, headers_only=headers_only)


def test_a_part_without_sizes(copies: Callable[..., Path]) -> None:
    """transformers would take those of Qwen3-Next-80B, and fill 23 GiB before it says so."""
    directory = copies("qwen3_next")
    edit_config(directory, text_config={"a": {}})
    with pytest.raises(
        CheckpointError,
        match=r"model of \d{11} weights, the most of them in .*, and .* have \d+ bytes",
    ):
        load(directory, None, needs_mtp=True)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map is null"),
        ({"weight_map": []}, "weight_map is a list"),
        ({"weight_map": {}}, "weight_map is an object"),
        ({"weight_map": {"a": 3}}, "expected a file name below the directory"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "expected a file name below"),
        ({"weight_map": {"a": "x/../../secret.safetensors"}}, "expected a file name below"),
        ({"weight_map": {"a": "/etc/secret.safetensors"}}, "expected a file name below"),
        ({"weight_map": {"a": "x\0y"}}, "expected a file name below"),
        ({"weight_map": {"a": "config.json"}}, "is not a complete safetensors file"),
        ({"weight_map": {"a": "b" * 300}}, "cannot read|named in the index but missing"),
    ],
)
def test_indexes(copies: Callable[..., Path], index: Any, message: str) -> None:
    directory = copies()
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(directory, None, needs_mtp=True)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None], name: str = "model") -> None:
    """Write other tensors in the place of the hard link."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    path = directory / f"{name}.safetensors"
    path.unlink(missing_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})


def test_dtypes_that_the_config_does_not_announce(copies: Callable[..., Path]) -> None:
    directory = copies()
    rewrite(directory, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    with pytest.raises(CheckpointError, match=r"dtype is 'float32', and most weights are float16"):
        load(directory, None, needs_mtp=True)
    load(directory, "float32", needs_mtp=True)
    edit_config(directory, dtype=None)
    assert load(directory, None, needs_mtp=True).dtype == torch.float16
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name].int()}))
    with pytest.raises(CheckpointError, match=rf"{name} is I32.*expected floating-point"):
        load(directory, "float32", needs_mtp=True)


def test_a_tensor_in_two_files(copies: Callable[..., Path]) -> None:
    """Which of them would be used is not for chance to say."""
    directory = copies()
    rewrite(directory, lambda tensors: None, name="other")
    with pytest.raises(CheckpointError, match=r"is in model\.safetensors and in other\.safet"):
        load(directory, None, needs_mtp=True)


def test_a_tokenizer_that_is_none(copies: Callable[..., Path]) -> None:
    directory = copies()
    (directory / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        ServedModel("x", 9, (), directory).encode("text")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="has no tokenizer"):
        ServedModel("x", 9, (), directory).encode("text")


STEERING: dict[str, Any] = {
    "attn_implementation": "evil/kernel",
    "_attn_implementation": "evil/kernel",
    "experts_implementation": "evil/experts",
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["evil"]},
    "fusion_config": {"evil": True},
    "kernel_config": {"RMSNorm": "evil/kernel:RMSNorm"},
    "use_kernels": True,
    "custom_generate": "evil/generate",
    "transformers_weights": "../evil.bin",
    "distributed_config": {"tp_plan": "auto"},
    "base_model_tp_plan": {"layers.*": "evil"},
    "per_layer_config": {"0": {"attn_implementation": "evil/kernel"}},
    "return_dict": False,
    "get_text_config": None,
    "_name_or_path": "evil/model",
    "_commit_hash": "0" * 40,
    "model_type": "evil",
}


@pytest.mark.parametrize("family", ["mimo", "step3p7"])
def test_no_entry_reaches_the_network_or_imports(
    copies: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading opens no socket, looks up no name, and imports nothing that an entry names."""
    directory = copies(family)
    clean = load(directory, None, needs_mtp=True)
    edit_config(directory, **STEERING)
    if family == "step3p7":
        edit_config(directory, "text_config", **STEERING)
        edit_config(directory, "vision_config", **{**STEERING, "model_type": "x"})
    for name in ("adapter_config.json", "generation_config.json"):
        (directory / name).write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    real, asked = builtins.__import__, []

    def guarded(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] in ("kernels", "flash_attn", "evil", "peft"):
            asked.append(name)
        return real(name, *args, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError(f"a connection: {args}")

    monkeypatch.setattr(builtins, "__import__", guarded)
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    loaded = load(directory, None, needs_mtp=True)
    monkeypatch.undo()
    assert asked == []
    assert loaded.config._attn_implementation == "mtpc"
    wanted = clean.weights()
    assert loaded.weights().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.weights().items())


def mutated(directory: Path, chance: random.Random) -> str:
    """Change a checkpoint in a random way; returns what was done."""
    kind = chance.choice(["entry", "entry", "entry", "entries", "bytes", "index", "header"])
    config = json.loads((directory / "config.json").read_text())
    if kind in ("entry", "entries"):
        parts = [config, *(value for value in config.values() if isinstance(value, dict))]
        for _ in range(1 if kind == "entry" else 3):
            part = chance.choice(parts)
            part[chance.choice([*part, *ENTRIES])] = copy.deepcopy(chance.choice(VALUES))
        (directory / "config.json").write_text(json.dumps(config))
    elif kind == "index":
        names = [*Checkpoint(directory).tensors]
        files = ["model.safetensors", *(value for value in VALUES if value is not None)]
        weights = {chance.choice(names): chance.choice(files) for _ in range(3)}
        (directory / INDEX).write_text(json.dumps({"weight_map": weights}))
    else:
        path = directory / ("config.json" if kind == "bytes" else "model.safetensors")
        data, size = bytearray(path.read_bytes()), 4000
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(size, len(data)))] = chance.randrange(256)
        path.unlink()
        path.write_bytes(data)
    return kind


def refusals(directory: Path) -> Iterator[str]:
    """The message of the error that loading ends in, if it does."""
    try:
        load(directory, None, needs_mtp=True)
    except MtpcError as error:
        yield str(error)


def test_random_checkpoints(copies: Callable[..., Path], chances: Callable[..., Any]) -> None:
    """Only mtpc's errors, each soon, and each names what it is about."""
    seen = set()
    for chance in chances():
        directory = copies(chance.choice(["mimo", "glm4_moe", "qwen3_next"]))
        kind, start = mutated(directory, chance), time.monotonic()
        for message in refusals(directory):
            seen.add(kind)
            assert str(directory) in message, (chance, message)
        assert time.monotonic() - start < 20, chance
    assert len(seen) > 2, "hardly anything was refused: nothing was tested"
