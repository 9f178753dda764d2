"""`mtpc train-draft`: drafters from nothing, in both forms, on a tiny model that can be learnt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.killed import in_a_child, kill_at
from helpers.told import told
from helpers.word_model import word_checkpoint, write_text
from safetensors.torch import load_file
from transformers import AutoConfig

import mtpc
from mtpc.cli import train_arguments
from mtpc.cli.main import main
from mtpc.errors import CheckpointError, OptionError
from mtpc.tuning import run as run_module
from mtpc.tuning.chain import Teacher
from mtpc.tuning.forms import FORMS
from mtpc.tuning.run import Plan, Tuning
from mtpc.tuning.store import write_rows
from mtpc.tuning.train import Schedule, Training
from mtpc.weights.checkpoint import Checkpoint

PLAN = Plan(Schedule(6, None, 4, 1e-2, 0), 16, 20, 2, 8, vocabulary=64)
MIMO = ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "self_attn.q_proj"]
EAGLE = ["fc", "norm", "lm_head", "midlayer.hidden_norm", "midlayer.self_attn.q_proj"]
NAMES = {
    "mtp": {f"model.mtp_layers.0.{name}.weight" for name in MIMO},
    "eagle3": {"d2t", "t2d", *(f"{name}.weight" for name in EAGLE)},
}
"""Some of the tensors of each form, as released checkpoints name them."""
ARCHITECTURES = {"mtp": ["MiMoForCausalLM"], "eagle3": ["LlamaForCausalLMEagle3"]}


@pytest.fixture(scope="module")
def words(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained Qwen2 without drafts, with a tied head, whose vocabulary is words."""
    return word_checkpoint(checkpoint("qwen2"), tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that follow each other as in what the target has learned."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def options(cpu_cache: Path) -> dict[str, Any]:
    return dict(spec_tokens=2, backend="cpu", batch_buckets=(4,), cache_dir=cpu_cache)


@pytest.fixture
def training(words: Path, text: Path, options: dict[str, Any]) -> Callable[..., Tuning]:
    """training(out, form): a run that can begin."""

    def get(out: Path, form: str = "mtp", plan: Plan = PLAN, **changes: Any) -> Tuning:
        return Tuning(words, [text], [], out, plan, {**options, **changes}, form=form)

    return get


@pytest.mark.parametrize("form", ["mtp", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_the_command_trains_a_drafter(
    form: str,
    words: Path,
    text: Path,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acceptance rises on text that is not trained on, and the text is plain decoding's."""
    monkeypatch.setattr("mtpc.tuning.train.MEASURE_STEPS", 5)
    out, found = tmp_path / "out", tmp_path / "found.json"
    command = ["train-draft", str(words), str(text), "--form", form, "--out", str(out)]
    small = ["--length", "16", "--continuations", "20", "--prompts", "2", "-n", "8"]
    more = ["--steps", "40", "--batch", "8", "--learning-rate", "1e-2", "--vocabulary", "64"]
    flags = ["--spec-tokens", "2", "--batch-buckets", "4", "--backend", "cpu"]
    cache = ["--cache-dir", str(options["cache_dir"]), "--json", str(found)]
    assert main([*command, *small, *more, *flags, *cache]) == 0
    tuned = json.loads(found.read_text())
    held_out = [point["right"] for point in tuned["progress"]["held_out"]]
    assert held_out[-1][0] > held_out[0][0] + 0.1
    assert held_out[-1][0] > 0.5
    assert not (tmp_path / "out.tuning").exists()
    stored = load_file(out / "model.safetensors")
    assert NAMES[form] <= stored.keys()
    # vLLM reads the config with transformers, and chooses its loader by the architecture.
    assert AutoConfig.from_pretrained(out).architectures == ARCHITECTURES[form]
    assert not any("embed" in name for name in stored)
    plain = mtpc.compile(words, **{**options, "max_len": 72, "spec_tokens": 0})
    drafted = mtpc.compile(words, **{**options, "max_len": 72, "draft": out})
    prompts = [list(range(10, 20)), list(range(40, 70))]
    assert drafted.generate(prompts, 40, ignore_eos=True) == plain.generate(
        prompts, 40, ignore_eos=True
    )
    assert drafted.stats.accepted[0] > 0
    listed = out / "draft_vocab.txt"
    learned = tuple(map(int, listed.read_text().split())) if form == "mtp" else ()
    assert drafted.options.draft_vocab == learned  # Drafts read that part of the head alone.
    assert len(learned) in (0, 64)


def test_the_target_writes_and_says_at_once(
    words: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    """Texts, what drafters are fed and what is probable, beside transformers' forward of them."""
    target = Teacher(Checkpoint(words)).model
    model = mtpc.compile(
        words, **{**options, "spec_tokens": 0}, max_len=32, max_logprobs=64,
        hidden_state_layers=[len(target.get_decoder().layers)],
    )  # fmt: skip
    known = torch.tensor([[7, 8, 9], [40, 41, 42]])
    rows = write_rows(model, known, 16)
    wanted = told(target, rows.ids, said=14)
    assert torch.equal(rows.ids[:, :3], known)
    assert torch.equal(rows.ids[:, 3:], rows.tokens[:, :-1, 0])
    torch.testing.assert_close(rows.fed, wanted.fed, rtol=0, atol=1e-4)
    torch.testing.assert_close(rows.logprobs, wanted.logprobs, rtol=0, atol=1e-4)
    same = (rows.tokens[..., :8] == wanted.tokens[..., :8]).float().mean()
    assert same > 0.95  # Equals may stand in another order.


def test_a_list_of_other_tokens_is_refused(
    words: Path, training: Callable[..., Tuning], tmp_path: Path
) -> None:
    training(tmp_path / "out").run()
    for line, match in (
        ("96", "names token 96; the target has 96"),
        ("x", "expected a token id a line"),
    ):
        (tmp_path / "out" / "draft_vocab.txt").write_text(f"3\n{line}\n")
        with pytest.raises(CheckpointError, match=match):
            mtpc.compile(words, draft=tmp_path / "out", spec_tokens=1)


def test_ctrl_c_says_how_to_go_on(
    words: Path,
    text: Path,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(self: Training) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "_step", interrupted)
    command = ["train-draft", str(words), str(text), "--out", str(tmp_path / "out")]
    small = ["--length", "16", "--continuations", "4", "--prompts", "2"]
    cache = ["--backend", "cpu", "--cache-dir", str(options["cache_dir"])]
    assert main([*command, *small, *cache]) == 130
    assert "out.tuning keeps what was made: go on with --resume" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_eagle3_head_names_the_frequent_tokens(
    training: Callable[..., Tuning], tmp_path: Path
) -> None:
    """d2t and t2d say the same, and the rows of the head are the target's."""
    training(tmp_path / "out", "eagle3").run()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    ids = stored["d2t"] + torch.arange(64)
    assert torch.equal(stored["t2d"].nonzero().flatten(), ids)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (64, 96)
    assert stored["lm_head.weight"].shape == (64, config["hidden_size"])


@pytest.mark.parametrize("call", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on(
    call: int, training: Callable[..., Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it keeps the beginnings, what the target wrote, or a new drafter: the same
    bytes.

    What was begun with fewer continuations and steps goes on with more, as if begun with those.
    """
    training(tmp_path / "whole").run()
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill_at(call, Path.replace))
        less = replace(PLAN, continuations=3, schedule=replace(PLAN.schedule, steps=2))
        in_a_child(lambda: training(out, plan=less).run())
    assert not out.exists()
    training(out).run(resume=True)
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_disk_bounds_what_is_kept(
    training: Callable[..., Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer texts are read, of a file that is larger than they need; too few are refused."""
    kept: list[int] = []
    write = run_module.copy_replacing

    def weigh(*given: Any) -> None:
        files = (tmp_path / "out.tuning").glob("target-*")
        kept.append(sum(path.stat().st_size for path in files))
        write(*given)

    monkeypatch.setattr(run_module, "copy_replacing", weigh)
    plan = replace(PLAN, disk=200_000)
    tuned = training(tmp_path / "out", plan=plan).run()
    assert kept[0] < 200_000
    assert 2 <= tuned.texts[0] < 30
    with pytest.raises(OptionError, match="disk is 9 bytes, and what the target says of one text"):
        training(tmp_path / "other", plan=replace(PLAN, disk=9))


def test_a_draft_is_not_given(training: Callable[..., Tuning], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"draft is .*; leave it out: a new drafter is trained"):
        training(tmp_path / "out", draft=tmp_path)


def test_the_command_knows_all_forms() -> None:
    assert set(train_arguments.FORMS) == set(FORMS)
