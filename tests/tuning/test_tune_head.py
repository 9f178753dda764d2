"""`mtpc tune-head`: what it trains and writes, what an interrupted run keeps, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bounded import full_disk
from helpers.killed import in_a_child, kill_at
from helpers.told import told
from helpers.word_model import word_checkpoint, write_text
from safetensors.torch import load_file, save, save_file
from torch.nn import functional
from torch.torch_version import TorchVersion

from mtpc.cli.main import main
from mtpc.engine.stats import DraftCounts
from mtpc.errors import CheckpointError, OptionError
from mtpc.tuning.chain import Teacher, TrainedModel
from mtpc.tuning.products import ROUNDED_EXPERTS
from mtpc.tuning.run import Plan, Tuning, _write_prepared
from mtpc.tuning.store import CHUNK_ROWS, Rows, TargetRows
from mtpc.tuning.texts import Texts
from mtpc.tuning.train import HeadLoss, Schedule, Training, draft_losses
from mtpc.weights import shards
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.json_file import INDEX
from mtpc.weights.write_quantised import quantise_checkpoint

PLAN = Plan(Schedule(6, None, 4, 1e-2, 0), length=16, continuations=8, prompts=2, new_tokens=8)
SMALL = ["--length", "16", "--continuations", "8", "--prompts", "2", "-n", "8"]
"""As PLAN has it: a length, and with it the steps' form, of all tests here."""


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def words(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained GLM-4-MoE whose vocabulary is words, and whose MTP layer joins at random."""
    base = word_checkpoint(checkpoint("glm4_moe"), tmp_path_factory.mktemp("words"))
    tensors = load_file(base / "model.safetensors")
    joint = tensors["model.layers.2.eh_proj.weight"]
    drawn = torch.randn(joint.shape, generator=torch.Generator().manual_seed(1))
    tensors["model.layers.2.eh_proj.weight"] = 0.1 * drawn
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that follow each other as in what the target has learned."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def options(cpu_cache: Path) -> dict[str, Any]:
    """Steps are compiled once, and then come from the cache."""
    return dict(spec_tokens=2, backend="cpu", batch_buckets=(4,), cache_dir=cpu_cache)


@pytest.fixture(scope="module")
def flags(cpu_cache: Path) -> list[str]:
    return [*SMALL, "--spec-tokens", "2", *("--backend", "cpu", "--batch-buckets", "4"),
            *("--cache-dir", str(cpu_cache))]  # fmt: skip


@pytest.fixture(scope="module")
def tuning(words: Path, text: Path, options: dict[str, Any]) -> Callable[..., Tuning]:
    """tuning(out): a run that can begin."""

    def get(out: Path, checkpoint: Path = words, plan: Plan = PLAN) -> Tuning:
        return Tuning(checkpoint, [text], [], out, plan, options)

    return get


def test_the_command_trains_mtp_tensors_only(
    words: Path,
    text: Path,
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every other byte is the base's; more drafts of unseen text are accepted."""
    out, found = tmp_path / "out", tmp_path / "found.json"
    command = ["tune-head", str(words), str(text), "--out", str(out), "--json", str(found)]
    more = ["--steps", "40", "--batch", "8", "--learning-rate", "1e-2"]
    assert main([*command, *flags, *more]) == 0
    assert "Accepted drafts on held-out text" in capsys.readouterr().out
    tuned = json.loads(found.read_text())
    rates = [
        sum(tuned[when]["accepted"]) / sum(tuned[when]["drafted"]) for when in ("before", "after")
    ]
    assert rates[1] > rates[0] + 0.1
    assert not (tmp_path / "out.tuning").exists()
    assert {path.name for path in out.iterdir()} == {path.name for path in words.iterdir()}
    for path in words.iterdir():
        if path.suffix != ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes()
    old, new = (load_file(directory / "model.safetensors") for directory in (words, out))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed
    assert all(name.startswith("model.layers.2.") for name in changed)
    mtp = {name for name in old if name.startswith("model.layers.2.")}
    assert mtp - changed == {"model.layers.2.mlp.gate.e_score_correction_bias"}
    assert {name: t.dtype for name, t in old.items()} == {n: t.dtype for n, t in new.items()}


def model_of(
    base: Path, count: int, dtype: str | None = None, vocabulary: torch.Tensor | None = None
) -> tuple[Teacher, TrainedModel]:
    files = Checkpoint(base)
    teacher = Teacher(files, dtype=dtype)
    return teacher, TrainedModel(files, count, teacher, vocabulary=vocabulary)


def test_gradients_reach_mtp_tensors_only(words: Path) -> None:
    """The target has none; of the layers, all but copies of embedding and head."""
    teacher, model = model_of(words, 3)
    loss, right = draft_losses(model, told(teacher.model, torch.arange(32).view(2, 16)))
    loss.backward()
    assert right.shape == (3,)
    assert all(parameter.grad is None for parameter in model.loaded.target.parameters())
    unreached = [name for name, parameter in model.trained.items() if parameter.grad is None]
    assert unreached == []


@pytest.mark.parametrize("said", [1, 9, 12, 15])
def test_what_the_target_does_not_say_does_not_count(words: Path, said: int) -> None:
    """Of the last positions alone: as of all, where the choices before are no drafts' tokens."""
    teacher, model = model_of(words, 3, "float64", torch.arange(1, 96))
    ids = torch.arange(32).view(2, 16)
    whole = told(teacher.model, ids)
    part = Rows(ids, whole.fed, whole.tokens[:, -said:], whole.logprobs[:, -said:])
    whole.tokens[:, :-said, 0] = 0
    losses, right = zip(*(draft_losses(model, rows) for rows in (part, whole)), strict=True)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    rows = 16 - 3 - max(16 - said - 1, 0)
    if rows > 0:
        torch.testing.assert_close(right[0] * rows, right[1] * 13)


@pytest.mark.parametrize("values", [33, 1 << 24])
def test_the_loss_is_cross_entropy(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients of states and head, a row at a time and together; of the rows, one has
    logits that differ by thousands, one a certain distribution, and one does not count."""
    monkeypatch.setattr("mtpc.tuning.train.LOGIT_VALUES", values)
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(9, 7, generator=generator).double()
    states[0] *= 1e3
    head = torch.randn(33, 7, generator=generator).double()
    places = torch.stack([torch.randperm(33, generator=generator)[:5] for _ in range(9)])
    shares = torch.rand(9, 5, generator=generator).double()
    places[2, 3], shares[2, 3] = -1, 0
    shares[1] = functional.one_hot(torch.tensor(0), 5)
    shares = shares / shares.sum(-1, keepdim=True)
    shares[4], places[4, 0] = 0, -1
    given = [x.clone().requires_grad_() for x in (states, head)]
    loss, hits = HeadLoss.apply(*given, places, shares)
    found = torch.autograd.grad(3 * loss, given)
    other = [x.clone().requires_grad_() for x in (states, head)]
    logits = other[0] @ other[1].T
    wanted = torch.zeros(9, 33).double().scatter_add(1, places.clamp(min=0), shares)
    rows = torch.arange(9) != 4
    expected = functional.cross_entropy(logits[rows], wanted[rows])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found, torch.autograd.grad(3 * expected, other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(hits, (logits.argmax(-1) == places[:, 0]) & rows)


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "deepseek_v3"])
def test_products_in_float32_of_weights_in_bfloat16(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the processor multiplies no 16 bits: the drafts of the same weights in float32.

    Released glm4_moe and deepseek_v3 store the target's head once more. It is not trained.
    """
    monkeypatch.setenv("MTPC_CPU_LEVEL", "portable")
    base = shutil.copytree(checkpoint(family), tmp_path / "base")
    halves = {name: tensor.bfloat16() for name, tensor in weights_of(base).items()}
    for norm in [name for name in halves if name.endswith("shared_head.norm.weight")]:
        halves[norm.replace("norm", "head")] = halves["lm_head.weight"].clone()
    save_file(halves, base / "model.safetensors", metadata={"format": "pt"})
    some = torch.arange(3, 90)
    pairs = [model_of(base, 3, dtype, some) for dtype in ("bfloat16", "float32")]
    assert pairs[0][1].trained.keys() == pairs[1][1].trained.keys()
    ids = torch.arange(32).view(2, 16)
    rows = told(pairs[0][0].model, ids)
    assert rows.fed.dtype == torch.bfloat16
    found = [
        [
            functional.linear(*model.head_rows(depth, state))
            for depth, state in enumerate(model.draft_states(ids, rows.fed.float()))
        ]
        for _, model in pairs
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape[-1] == len(some)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    draft_losses(pairs[0][1], rows)[0].backward()
    head = pairs[0][1].loaded.target.get_output_embeddings().weight
    assert head.grad is None


def test_rounded_experts_equal_transformers(words: Path) -> None:
    """Values and gradients, for experts with no token, with some, and with all."""
    _, model = model_of(words, 1)
    layer = model.loaded.mtp_layers[0]
    experts: Any = next(m for m in layer.modules() if hasattr(m, "_apply_gate")).double()
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(70, experts.down_proj.shape[1], generator=generator).double()
    count = experts.down_proj.shape[0]
    chosen = torch.stack([torch.zeros(70), torch.randint(1, count - 1, (70,))], 1).long()
    weights = torch.rand(70, 2, generator=generator).double()
    found = []
    for implementation in ("eager", ROUNDED_EXPERTS):
        experts.config._experts_implementation = implementation
        given = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        wanted = [*given, experts.gate_up_proj, experts.down_proj]
        out = experts(given[0], chosen, given[1])
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_shards_and_dtype_are_kept(
    words: Path, tuning: Callable[..., Tuning], tmp_path: Path
) -> None:
    """bfloat16 in several files; those without MTP tensors are the same bytes."""
    tensors = {n: t.bfloat16() for n, t in load_file(words / "model.safetensors").items()}
    base = shutil.copytree(words, tmp_path / "base")
    (base / "model.safetensors").unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    halves = {"a.safetensors": False, "b.safetensors": True}
    places = {}
    for name, is_mtp in halves.items():
        part = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.") == is_mtp}
        save_file(part, base / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    (base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    tuned = tuning(tmp_path / "out", base).run()
    assert len(tuned.tensors) == sum(name == "b.safetensors" for name in places.values())
    one, other = (path / "a.safetensors" for path in (base, tmp_path / "out"))
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_ino != other.stat().st_ino
    written = load_file(tmp_path / "out" / "b.safetensors")
    assert all(t.dtype == tensors[n].dtype for n, t in written.items())
    assert any(not torch.equal(t, tensors[n]) for n, t in written.items())


in_a_fork = pytest.mark.skipif(
    TorchVersion(torch.__version__) >= (2, 15),
    reason="torch 2.15 has no gradients in a copy of a process that had some",
)


@in_a_fork
@pytest.mark.parametrize("call", [1, 3])
def test_a_killed_training_goes_on(
    call: int, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes its first or third state, the last is whole: the same weights."""
    texts = torch.randint(6, 96, (9, 12), generator=torch.Generator().manual_seed(2))

    def begin(name: str) -> tuple[TrainedModel, Training]:
        teacher, model = model_of(words, 2)
        source = TargetRows(tmp_path, texts[:, :3])
        whole = iter(texts.split(CHUNK_ROWS))
        source.fill(lambda known: told(teacher.model, next(whole)), lambda share: None)
        return model, Training(model, source, 2, PLAN.schedule, tmp_path / name)

    def train() -> None:
        begin("state.pt")[1].run(print)

    monkeypatch.setattr("mtpc.tuning.train.MEASURE_STEPS", 2)
    plain = begin("plain.pt")
    plain[1].run(print)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", kill_at(call))
        patch.setattr("mtpc.tuning.train.SAVE_SECONDS", 0)
        in_a_child(train)
    resumed = begin("state.pt")
    assert resumed[1].progress.step == call - 1
    resumed[1].run(print)
    for name, parameter in plain[0].trained.items():
        assert torch.equal(parameter, resumed[0].trained[name]), name


@in_a_fork
def test_a_killed_run_goes_on(
    tuning: Callable[..., Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes the texts, and then the checkpoint: the same checkpoint in the end."""
    whole = tuning(tmp_path / "whole").run()
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill_at(1))
        in_a_child(lambda: tuning(out).run())
    with monkeypatch.context() as patch:
        patch.setattr(shards.shutil, "copyfile", kill_at(2))
        in_a_child(lambda: tuning(out).run(resume=True))
    assert not out.exists()
    other = replace(PLAN, length=PLAN.length + 1)
    said = f"was begun with length {PLAN.length}, and now it is {PLAN.length + 1}"
    with pytest.raises(OptionError, match=said):
        tuning(out, plan=other).run(resume=True)
    tuned = tuning(out).run(resume=True)
    assert (tuned.before, tuned.after) == (whole.before, whole.after)
    assert tuned.progress.step == 6
    expected = weights_of(tmp_path / "whole")
    for name, tensor in weights_of(out).items():
        assert torch.equal(tensor, expected[name]), name


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "8 bytes": lambda data: data[:8],
    "half": lambda data: data[: len(data) // 2],
    "all but one": lambda data: data[:-1],
    "other bytes": lambda data: bytes(255 - byte for byte in data),
    "another tensor file": lambda data: save({"x": torch.ones(1)}),
    "another state": lambda data: saved({"progress": {"x": 1}}),
    "a list": lambda data: saved([1]),
    "no tensors": lambda data: saved({**restored(data), "trained": {}}),
    "other tensors": lambda data: saved(
        {**restored(data), "trained": dict.fromkeys(restored(data)["trained"], torch.ones(7))}
    ),
    "no moments": lambda data: saved({**restored(data), "optimizer": {}}),
}


def saved(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def restored(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(BytesIO(data), weights_only=True)
    return found


def test_a_damaged_run_is_not_resumed(
    tuning: Callable[..., Tuning], words: Path, tmp_path: Path
) -> None:
    """Its texts and its state, damaged in any way: one error that names the file and a way out."""
    run = tuning(tmp_path / "out")
    run.directory.mkdir()
    texts = torch.randint(6, 96, (9, 12))
    state, prepared = run.directory / "state.pt", run.directory / "prepared.safetensors"
    _, model = model_of(words, 2)
    given = (TargetRows(run.directory, texts), 2, PLAN.schedule, state)
    Training(model, *given).save()
    kept = (Texts(texts, 2, texts.clone()), DraftCounts([1], [2]))
    _write_prepared(prepared, *kept, run._settings())
    whole = {path: path.read_bytes() for path in (state, prepared)}
    resume: dict[Path, Callable[[], Any]] = {
        state: lambda: Training(model, *given),
        prepared: lambda: run.run(resume=True),
    }
    for path, data in whole.items():
        for name, damage in DAMAGE.items():
            if path == prepared and name in ("no tensors", "other tensors", "no moments"):
                continue
            path.write_bytes(damage(data))
            said = rf"cannot read {path}: .*remove {run.directory} to begin anew"
            with pytest.raises(CheckpointError, match=said):
                resume[path]()
        path.write_bytes(data)
    assert sorted(path.name for path in run.directory.iterdir()) == [prepared.name, state.name]


def test_a_full_disk_while_a_run_is_kept(
    tuning: Callable[..., Tuning], words: Path, tmp_path: Path
) -> None:
    """The last state stays, and nothing beside it."""
    texts = torch.randint(6, 96, (9, 12))
    source = TargetRows(tmp_path, texts)
    training = Training(model_of(words, 2)[1], source, 2, PLAN.schedule, tmp_path / "s.pt")
    training.save()
    before = (tmp_path / "s.pt").read_bytes()
    said = r"cannot write .*: .*; free space, and continue with --resume"
    with full_disk(), pytest.raises(CheckpointError, match=said):
        training.save()
    with full_disk(), pytest.raises(CheckpointError, match=said):
        _write_prepared(tmp_path / "p.safetensors", Texts(texts, 2, texts.clone()), None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["s.pt"]
    assert (tmp_path / "s.pt").read_bytes() == before


def no_mtp(words: Path, base: Path) -> None:
    tensors = weights_of(words)
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.2.")}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})


def quantised(words: Path, base: Path) -> None:
    shutil.rmtree(base)
    quantise_checkpoint(words, base, "int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_mtp, "cannot be tuned: absent: no tensor is named model.layers.2.*"),
        (quantised, "of the MTP layers of .* are quantised: model.layers.2.*; expected plain ones"),
    ],
)
def test_checkpoints_that_cannot_be_tuned(
    change: Callable[..., None],
    message: str,
    words: Path,
    tuning: Callable[..., Tuning],
    tmp_path: Path,
) -> None:
    base = shutil.copytree(words, tmp_path / "base")
    change(words, base)
    with pytest.raises(CheckpointError, match=message):
        tuning(tmp_path / "out", base)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "cannot read nowhere.txt"),
        (["empty.txt"], "empty.txt is empty; expected text that suits the model"),
        (["short.txt"], "the text to learn from has"),
        (["text.txt", "--held-out", "short.txt"], "the text held out has"),
        (["text.txt", "--spec-tokens", "0"], "spec_tokens is 0; expected a number of drafts"),
        (["text.txt", "--spec-tokens", "15"], "spec_tokens is 15; expected a number of drafts"),
        (
            ["text.txt", "--spec-tokens", "auto"],
            "spec_tokens is 0,1,2,3; expected",
        ),
        (["text.txt", "--out", "taken"], "taken exists; expected the name of a new directory"),
        (["text.txt", "--out", "begun"], "is of a run that has not ended; give --resume"),
        (["text.txt", "--resume"], "to resume; expected that of an interrupted run"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    words: Path,
    text: Path,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line each, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(text, "text.txt")
    Path("empty.txt").write_text(" \n")
    Path("short.txt").write_text("w7 w8")
    Path("taken").mkdir()
    Path("begun.tuning").mkdir()
    before = sorted(tmp_path.iterdir())
    common = ["tune-head", str(words), *flags, "--steps", "1", "--out", "out"]
    assert main([*common, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error:") == 1
    assert sorted(tmp_path.iterdir()) == before
