"""`mtpc check` names what is wrong with MTP layers; `mtpc graft` puts those of the base back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from safetensors.torch import load_file, save_file

from mtpc.cli.check import Sample, _judge, _print
from mtpc.cli.main import main
from mtpc.engine.stats import DraftCounts
from mtpc.errors import CheckpointError
from mtpc.models.graft import graft
from mtpc.models.load import load
from mtpc.models.mtp_faults import find_faults
from mtpc.weights import shards
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.write_quantised import quantise_checkpoint

Tensors = dict[str, torch.Tensor]
MIMO, GLM = "model.mtp_layers.0.", "model.layers.2."
JOINT = MIMO + "input_proj.weight"


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def read(directory: Path) -> tuple[Tensors, dict[str, Any]]:
    config = json.loads((directory / "config.json").read_text())
    return load_file(directory / "model.safetensors"), config


def without_mtp(tensors: Tensors, prefix: str = MIMO) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}


def changed(tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {n: change(t) if n.startswith(MIMO) and t.dim() > 1 else t for n, t in tensors.items()}


def not_a_number(tensors: Tensors) -> Tensors:
    tensors[JOINT][2, 3] = torch.nan
    return tensors


BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str, str]] = {
    "no tensors": (without_mtp, {}, "absent", "no tensor is named model.mtp_layers.0.*"),
    "no layers": (
        without_mtp,
        {"num_nextn_predict_layers": 0},
        "absent",
        "announces no MTP layers",
    ),
    "one of two": (dict, {"num_nextn_predict_layers": 2}, "absent", "and the first 1 are stored"),
    "not announced": (dict, {"num_nextn_predict_layers": 0}, "count", "announces 0 MTP layer(s)"),
    "zero": (lambda t: changed(t, torch.zeros_like), {}, "all zero", "tensors are all zero: model"),
    "NaN": (not_a_number, {}, "not finite", f"1 of 16 tensors hold NaN or infinity: {JOINT}"),
    "one lost": (
        lambda t: {n: x for n, x in t.items() if n != JOINT},
        {},
        "misfit",
        "missing projection.weight",
    ),
    "another design": (
        lambda t: {**t, MIMO + "x": torch.ones(3)},
        {},
        "misfit",
        "unexpected block.x",
    ),
    "another size": (
        lambda t: {**t, JOINT: t[JOINT][:, :64].clone()},
        {},
        "misfit",
        "projection.weight is (64, 64), expected (64, 128)",
    ),
    "float8 by a cast": (
        lambda t: changed(t, lambda x: x.to(torch.float8_e4m3fn)),
        {},
        "quantised",
        "are F8_E4M3, with no scales beside them",
    ),
}
"""What was done -> the change of tensors and of config.json, the fault's kind, what is found."""


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint(
    what: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each is named with its remedy, before any acceptance is measured."""
    change, entries, kind, problem = BROKEN[what]
    tensors, config = read(checkpoint("mimo", "random"))
    broken = write(tmp_path / "broken", change(tensors), {**config, **entries})
    assert main(["check", str(broken)]) == 1
    found, remedy = capsys.readouterr().out.splitlines()
    assert found.startswith(f"{kind}: ")
    assert problem in found
    expected = "set num_nextn_predict_layers to 1" if kind == "count" else "mtpc graft BASE"
    assert expected in remedy


def test_layers_that_were_quantised_by_accident(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """MTP layers alone, or joints that other servers read as plain weights."""
    source = checkpoint("mimo", "random")
    quantise_checkpoint(source, tmp_path / "mtp", "int8", keep=("model.layers.*",))
    (fault,) = find_faults(tmp_path / "mtp")
    assert fault.kind == "quantised"
    assert "weights of the MTP layers are quantised, and none of the target" in fault.problem
    whole = quantise_checkpoint(source, tmp_path / "whole", "int8")
    assert sum(whole.quantised.values()) > 7
    assert find_faults(tmp_path / "whole") == []
    tensors, config = read(tmp_path / "whole")
    rows = tensors[JOINT].abs().amax(1, keepdim=True) / 127
    tensors[JOINT] = (tensors[JOINT] / rows).round().to(torch.int8)
    tensors[f"{JOINT}_scale"] = rows
    config["quantization_config"]["ignore"].remove(JOINT.removesuffix(".weight"))
    (fault,) = find_faults(write(tmp_path / "joint", tensors, config))
    assert f"{JOINT} are quantised" in fault.problem


def test_an_embedding_of_another_base(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    tensors, config = read(checkpoint("glm4_moe", "random"))
    tensors[f"{GLM}embed_tokens.weight"] = torch.randn(96, 64)
    (fault,) = find_faults(write(tmp_path / "glm", tensors, config))
    assert fault.kind == "other base"
    assert "have a cosine similarity of" in fault.problem


@pytest.mark.parametrize(("rates", "code"), [((0.2, 0.1), 1), ((0.2, 0.26), 0)])
def test_acceptance_under_the_floor(
    rates: tuple[float, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best wiring counts."""
    counts = [DraftCounts([round(1000 * rate), 9], [1000, 10]) for rate in rates]
    samples = [Sample((), 1.3, drafts, [[1]], {}) for drafts in counts]
    verdict = _judge(samples, 0.25, has_drafter=False)
    _print(samples, verdict, ())
    assert bool(verdict.faults or verdict.better) == bool(code)
    found = "other base: no wiring has more than 20.0% of its first drafts accepted"
    assert (found in capsys.readouterr().out) == bool(code)
    (fault,) = _judge(samples, 0.3, has_drafter=True).faults
    assert fault.remedy.endswith("give the one that was trained for this target")


@pytest.mark.slow
def test_layers_of_another_base(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known by the drafts that they make."""
    own, config = read(checkpoint("mimo"))
    other, _ = read(checkpoint("mimo", "random"))
    mixed = {n: other[n] if n.startswith(MIMO) else t for n, t in own.items()}
    directory = write(tmp_path / "mimo", mixed, config)
    arguments = ["--ids", "3 4 5 6", "--spec-tokens", "1", "--max-len", "64", "-n", "24"]
    assert main(["check", str(directory), *arguments]) == 1
    assert "other base: no wiring has more than" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "qwen3_5", "step3p7"])
def test_graft(
    family: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fine-tune in several files gets the base's MTP tensors; all else is bit for bit its own."""
    monkeypatch.setattr(shards, "_SHARD_BYTES", 40_000)
    base = checkpoint(family, "random")
    tune = tiny.make_checkpoint(family, tmp_path / "tune", seed=5, mtp=False)
    (tune / "tokenizer.json").write_text("{}")
    assert [fault.kind for fault in find_faults(tune)] == ["absent"]
    out = tmp_path / "out"
    assert main(["graft", str(base), str(tune), str(out)]) == 0
    written, of_base, of_tune = Checkpoint(out), Checkpoint(base), Checkpoint(tune)
    added = written.stored.keys() - of_tune.stored.keys()
    said = capsys.readouterr()
    assert f"{out}: {len(added)} MTP tensors" in said.out
    assert said.err.count(" s] ") == 5  # A pipe gets a line a stage, not one a tensor.
    assert added == of_base.stored.keys() - of_tune.stored.keys() != set()
    for name in written.stored:
        source = of_base if name in added else of_tune
        assert torch.equal(written.read(name), source.read(name)), name
    assert len({header.path for header in written.stored.values()}) > 2
    assert (out / "tokenizer.json").read_text() == "{}"
    assert {p.name for p in tmp_path.iterdir()} == {"tune", "out"}
    assert len(load(out, None, needs_mtp=True).mtp_layers) == tiny.num_layers(family)
    assert find_faults(out) == []


def test_graft_replaces_broken_layers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint("mimo", "random")
    tensors, config = read(base)
    zero = write(tmp_path / "zero", changed(tensors, torch.zeros_like), config)
    assert graft(base, zero, tmp_path / "out").replaced == 16
    assert find_faults(tmp_path / "out") == []


def test_graft_onto_a_quantised_fine_tune(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The MTP layers stay plain, and quantization_config says so."""
    base = checkpoint("mimo", "random")
    tune = tiny.make_checkpoint("mimo", tmp_path / "tune", seed=5, mtp=False)
    quantise_checkpoint(tune, tmp_path / "int8", "int8")
    graft(base, tmp_path / "int8", tmp_path / "out")
    written = Checkpoint(tmp_path / "out")
    assert not [name for name in written.quantised if name.startswith(MIMO)]
    assert JOINT.removesuffix(".weight") in written.config["quantization_config"]["ignore"]
    graft(tmp_path / "out", tmp_path / "int8", tmp_path / "again")
    config = {**written.config, "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "int8/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is quantised by 'gptq', whose config cannot say"):
        graft(base, tmp_path / "int8", tmp_path / "gptq")


def test_a_vocabulary_that_grew(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Copies of the base's embedding stay behind; an embedding of its own is refused."""
    base = checkpoint("glm4_moe", "random")
    tune = tiny.make_checkpoint("glm4_moe", tmp_path / "tune", mtp=False, vocab_size=100)
    tensors, config = read(base)
    own = f"{GLM}embed_tokens.weight"
    tensors[own] = tensors["model.embed_tokens.weight"].clone()
    copied = write(tmp_path / "copied", tensors, config)
    assert graft(copied, tune, tmp_path / "out").left_out == (own,)
    assert find_faults(tmp_path / "out") == []
    tensors[own][0, 0] += 1
    moved = write(tmp_path / "moved", tensors, config)
    with pytest.raises(CheckpointError, match=r"differ in shape: lm_head.weight is F32\[96,64\]"):
        graft(moved, tune, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_grafted(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error each, and nothing is written."""
    base, plain = checkpoint("mimo", "random"), checkpoint("mimo", "plain")
    wide = tiny.make_checkpoint("mimo", tmp_path / "wide", mtp=False, intermediate_size=80)
    deep = tiny.make_checkpoint("mimo", tmp_path / "deep", mtp=False, num_hidden_layers=3)
    other = checkpoint("glm4_moe", "random")
    for arguments, message in (
        ((plain, base, "out"), "cannot be used: absent: config.json announces no MTP layers"),
        ((base, plain, "wide"), "wide exists; expected the name of a new directory"),
        (
            (base, wide, "out"),
            "model.layers.0.mlp.down_proj.weight is F32[64,96] and F32[64,80], model",
        ),
        ((base, deep, "out"), "is a mimo with 3 decoder layers, and "),
        ((base, other, "out"), "is a glm4_moe with 2 decoder layers, and "),
        ((base, plain, "no/out"), "cannot write "),
    ):
        *sources, out = arguments
        assert main(["graft", *map(str, sources), str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"wide", "deep"}
