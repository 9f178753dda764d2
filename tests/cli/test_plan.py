"""`mtpc plan`: what it says, what it refuses, and what it reads."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.scale import CONFIGS
from mtpc.cli.arguments import DEVICE_NAMES
from mtpc.cli.main import main
from mtpc.cli.parsing import counts, microseconds, size
from mtpc.scale import DEVICES


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """config(model, **changes): a directory with its released config.json, and nothing else."""

    def make(name: str, **changes: object) -> str:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
        return str(path)

    return make


def test_a_config_is_enough(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """The issue's own command, for DeepSeek-V3."""
    options = ["--devices", "8", "--memory", "141GiB", "--spec-tokens", "0,1", "--batch", "1,4096"]
    assert main(["plan", config("DeepSeek-V3"), *options]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[1]: line.split()[-2:] for line in said.splitlines() if "  " in line}
    assert lines["weights in all"] == ["90.8", "GiB"]
    assert lines["KV a token"] == ["69.8", "KiB"]
    for expected in (
        "config.json alone, without weight files; counted in the scheme fp8",
        "A rank of 8, 1 replica(s)",
        "memory as given",
        "does not fit",
        "have not been compared with hardware",
    ):
        assert expected in said


def test_headers_are_read_and_no_weight(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny checkpoint, with a file of headers whose data are holes."""
    source = checkpoint("deepseek_v3", "random")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (stored,) = source.glob("*.safetensors")
    data = stored.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    with (tmp_path / stored.name).open("wb") as file:
        file.write(header)
        file.truncate(len(data))
    assert main(["plan", str(tmp_path), "--devices", "2"]) == 0
    said = capsys.readouterr().out
    assert "from headers of its files" in said
    assert "requests of 512 tokens, ms" in said, "no more than the model has positions"
    assert re.search(r"tokens of one request that fit +512\n", re.sub(" +\n", "\n", said))


def test_weights_that_do_not_fit(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config("Qwen3-Next-80B-A3B"), "--spec-tokens", "0"]) == 1
    said = capsys.readouterr().out
    assert "the weights do not fit: a rank needs 148.7 GiB and has 131.3 GiB; let more" in said
    assert "A step of a replica" not in said


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--devices", "8"], "has 2 key/value heads for 8 ranks: more ranks than heads"),
        ({}, ["--devices", "6", "--tensor-parallel-size", "4"], "6 does not divide into replicas"),
        ({}, ["--max-len", "999999"], "max_len is 999999; the model was made for at most"),
        (
            {"num_nextn_predict_layers": 0},
            ["--spec-tokens", "1"],
            "gives 0 for the number of MTP layers",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            [],
            "quant_method 'awq', and there is no weight file",
        ),
        ({"architectures": ["OtherForCausalLM"]}, [], "are not supported"),
        ({"num_experts": "many"}, [], "config.json: num_experts is text 'many', "),
        ({"hidden_act": "none"}, [], "config.json: hidden_act is text 'none', "),
        (
            {"num_hidden_layers": 2**30},
            [],
            "num_hidden_layers is a number 1073741824",
        ),
    ],
)
def test_one_clear_error(
    changes: dict[str, object],
    options: list[str],
    message: str,
    config: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", config("Qwen3-Next-80B-A3B", **changes), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert ";" in said


def test_sizes_have_units() -> None:
    assert (size("141GiB"), size("192GB"), size("4.8TB/s")) == (
        141 * 2**30,
        192 * 10**9,
        48 * 10**11,
    )
    assert tuple(DEVICES) == DEVICE_NAMES
    for wrong in ("141", "GiB", "-1GB", "0GB", "12 Gigabytes"):
        with pytest.raises(ArgumentTypeError, match="expected a size with its unit, as 141GiB"):
            size(wrong)


def test_lists_and_times_are_checked() -> None:
    assert counts(0)("0,1 3") == [0, 1, 3]
    assert microseconds("2.5") == 2.5
    for parse, wrong in (
        *((counts(1), text) for text in ("", "0", "1,0", "auto", "-1")),
        *((microseconds, text) for text in ("-1", "nan", "inf", "")),
    ):
        with pytest.raises(ArgumentTypeError, match="is invalid; expected"):
            parse(wrong)
