"""What commands and errors say to a newcomer: names and places, not the insides of Python."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.places import TESTS
from helpers.schedules import PRESSED
from safetensors.torch import load_file, save_file

from mtpc.cli import doctor
from mtpc.cli.arguments import parse
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import demo_checkpoint
from mtpc.cli.main import main
from mtpc.cli.opening import check_tokenizer
from mtpc.config import CompileOptions
from mtpc.errors import CheckpointError, OptionError
from mtpc.models.load import load
from mtpc.program.processes import WORKER, how_it_ended
from mtpc.server.chat import load_chat_template
from mtpc.store.entries import Entry


def test_doctor_says_where_the_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("0" * 32, Path("/cache/entries") / ("0" * 32), {}, "", 1)
    monkeypatch.setattr(
        "mtpc.backends.cpu_kernels.build.build_kernels", lambda *args, **options: entry
    )
    found = doctor._check_kernels().found
    assert found.endswith(f"built: /cache/entries/{'0' * 32}")
    assert "Entry(" not in found


def test_inspect_shows_what_runs(
    word_model: Path,
    cpu_cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the backend of `mtpc run`; the heading has its name."""
    monkeypatch.setenv("MTPC_CACHE_DIR", str(cpu_cache))
    for command in ("inspect", "run"):
        assert CompileOptions.parse(compile_options(parse([command]))).backend == "auto"
    assert main(["inspect", str(word_model), "--max-len", "64", "--spec-tokens", "1"]) == 0
    assert " nodes, for backend cpu" in capsys.readouterr().out


def test_the_demo_model_has_a_chat_template() -> None:
    """A conversation is its texts, one after the other."""
    template = load_chat_template(demo_checkpoint(), None)
    assert template is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A list"}]
    assert template.render(messages, {}) == "Be brief.\nA list"


def test_a_compiled_model_says_what_it_is(compiled: Callable[..., Any], checkpoint: Any) -> None:
    spec, name = compiled("mimo", 2, **PRESSED), checkpoint("mimo").name
    assert repr(spec).startswith(f"<SpecModel '{name}': spec_tokens 2, batch_buckets ")
    assert f"backend eager, {len(spec.program.steps)} steps, vocabulary of 96>" in repr(spec)


def test_a_build_that_the_system_killed() -> None:
    """Only then memory is named, with how much is needed and what to do."""
    killed = how_it_ended(-signal.SIGKILL)
    assert f"needs some {WORKER / 2**30:.1f} GiB" in killed
    assert "--jobs 1" in killed
    assert how_it_ended(1) == "status 1; what it said is on stderr"


@pytest.mark.parametrize("command", ["run", "serve", "bench", "build", "inspect"])
def test_hub_ids_on_the_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ids", "1 2"] if command in ("run", "bench") else []
    assert main([command, "tiny/NotHere", *words]) == 2
    err = capsys.readouterr().err
    assert "run: hf download tiny/NotHere" in err
    assert err.count("error:") == 1


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The system's own words, in one line."""
    (tmp_path / "text").write_text("w5 w6")
    assert main(["vocab", str(tmp_path / "text"), "--out", str(tmp_path / ("x" * 300))]) == 2
    assert "error: [Errno 36] File name too long" in capsys.readouterr().err


GGUF = TESTS / "weights/gguf/glm4_moe.gguf"
TEXT = (["run", "-p", "a"], ["chat"], ["serve"], ["bench", "-p", "a"], ["check", "-p", "a"])
"""Commands that read text, without the checkpoint."""


def without_vocabulary(path: Path) -> None:
    path.write_bytes(GGUF.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.nokens"))


@pytest.mark.parametrize("words", TEXT, ids=lambda words: words[0])
@pytest.mark.parametrize("is_file", [False, True], ids=["directory", "file"])
def test_a_gguf_model_without_tokenizer(
    words: list[str], is_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is compiled, and not that it has no config.json."""
    without_vocabulary(tmp_path / "a.gguf")
    place = tmp_path / "a.gguf" if is_file else tmp_path
    assert main([words[0], str(place), *words[1:]]) == 2
    said = capsys.readouterr().err
    assert f"error: {place} has no tokenizer.json; " in said
    assert "config.json" not in said.replace("tokenizer.json", "")
    assert "trace" not in said


def test_the_vocabulary_of_a_gguf_model_in_a_directory(tmp_path: Path) -> None:
    """It was refused for want of a config.json."""
    shutil.copy(GGUF, tmp_path)
    check_tokenizer(tmp_path, ["text"])


def bare(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"architectures": ["LlamaForCausalLM"]}')
    return directory


LORA = "it is a LoRA adapter .*AutoPeftModelForCausalLM.*merge_and_unload.*mtpc graft BASE"
BINARY = r"weights are in pytorch_model\*.bin: convert them, by: python -c"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], LORA),
        (["adapter_config.json", "adapter_model.safetensors", "config.json"], LORA),
        (["pytorch_model.bin"], BINARY),
        (["pytorch_model.bin", "config.json"], BINARY),
        (["pytorch_model-00001-of-00002.bin", "config.json"], BINARY),
        (["checkpoint-5/config.json"], "/checkpoint-5 has one: give that"),
        (["snapshots/abc/config.json"], "/snapshots/abc has one: give that"),
        (["config.json"], "copy or download the checkpoint again"),
        ([], "copy or download the checkpoint again"),
    ],
    ids=str,
)
def test_directories_of_other_forms(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(bare(tmp_path, *names), None, needs_mtp=False)


def test_a_file_in_the_place_of_its_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"give its directory, {tmp_path}$"):
        load(bare(tmp_path, "config.json") / "config.json", None, needs_mtp=False)


@pytest.fixture
def tiny(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("mimo"), tmp_path / "a model's"))


def test_what_is_said_of_pickled_weights_converts_them(tiny: Path) -> None:
    """The command itself is run, on two files, one with a tensor that is there twice."""
    tensors = load_file(tiny / "model.safetensors")
    first = {"other": tensors["lm_head.weight"], "lm_head.weight": tensors.pop("lm_head.weight")}
    torch.save(first, tiny / "pytorch_model-00001-of-00002.bin")
    torch.save(tensors, tiny / "pytorch_model-00002-of-00002.bin")
    (tiny / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as refused:
        load(tiny, None, needs_mtp=True)
    _, _, words = str(refused.value).partition("python -c ")
    subprocess.run([sys.executable, "-c", *shlex.split(words)], check=True)
    assert len(load(tiny, None, needs_mtp=True).mtp_layers) == 1


def test_a_missing_head_names_the_entry(tiny: Path) -> None:
    """Of a missing tensor besides it, the entry would be no way out."""
    said = r'lm_head.weight; .*head is the embedding, set "tie_word_embeddings": true'
    tensors = load_file(tiny / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load(tiny, None, needs_mtp=False)
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    load(tiny, None, needs_mtp=False)
    (tiny / "config.json").write_text(json.dumps(config))
    del tensors["model.norm.weight"]
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"correct its config\.json$"):
        load(tiny, None, needs_mtp=False)


def test_weights_of_64_bits(tiny: Path) -> None:
    """They were taken for floating-point numbers of 6 bits."""
    tensors = load_file(tiny / "model.safetensors")
    save_file({n: t.double() for n, t in tensors.items()}, tiny / "model.safetensors")
    assert load(tiny, "float32", needs_mtp=True).dtype == torch.float32
    with pytest.raises(CheckpointError, match="dtype is 'float32', and most weights are float64"):
        load(tiny, None, needs_mtp=True)


@pytest.mark.parametrize(
    ("said", "near"),
    [
        ("int4", "'int4-g32' or 'int4-g128'"),
        ("INT4", "'int4-g32' or 'int4-g128'"),
        ("int4-g64", "'int4-g32'"),
        ("int", "'int4-g32' or 'int4-g128' or 'int8-g128' or 'int8'"),
        ("fp8_e4m3", "'fp8'"),
        ("Int8", "'int8-g128' or 'int8'"),
        ("awq", None),
        ("", None),
    ],
)
def test_schemes_of_other_names(said: str, near: str | None) -> None:
    hint = f" (the nearest is {near})" if near else ""
    with pytest.raises(OptionError) as refused:
        CompileOptions.parse({"quantize": said})
    assert str(refused.value).startswith(f"quantize is {said!r}{hint}; expected one of iq4_nl, ")


@pytest.mark.parametrize(
    "words",
    ["quantize {model} {out} --scheme int8 --calibration {text}", "vocab {text} --out {out}"],
)
def test_a_text_that_is_none(
    words: str, word_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are not UTF-8: one line, and no file is written."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_bytes(b"w5 \xff")
    assert main(words.format(model=word_model, out=out, text=text).split()) == 2
    assert f"error: cannot read {text}: 'utf-8' codec" in capsys.readouterr().err
    assert not out.exists()
