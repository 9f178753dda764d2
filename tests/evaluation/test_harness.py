"""lm-evaluation-harness: by our model class, and by its own client against `mtpc serve`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import TINY
from helpers.openai_client import NAME
from helpers.served import serving
from helpers.word_model import word_checkpoint

from mtpc.cli.main import main
from mtpc.evaluation.compare import Outcome
from mtpc.evaluation.engines import MtpcEngine, TransformersEngine

lm_eval = pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
KINDS: dict[str, dict[str, Any]] = {
    "choose": dict(
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="{{label}}",
        metric_list=[{"metric": "acc"}],
    ),
    "continue": dict(
        output_type="generate_until",
        doc_to_target="{{choices[0]}}",
        generation_kwargs={"until": ["w9"], "max_gen_toks": 8, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    ),
    "roll": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{question}}",
        metric_list=[{"metric": "word_perplexity"}],
    ),
}
DOCS = [
    {"question": "w3 w4 w5 w6", "choices": ["w7 w8", "w40", "w31 w63"], "label": 0},
    {"question": "w40 w41 w42", "choices": ["w9", "w10 w11 w12", "w13"], "label": 1},
    {"question": "w7", "choices": ["w8", "w9", "w10"], "label": 2},
]
K3 = dict(backend="eager", dtype="float64", batch_buckets=(4,), **{**TINY, "sampling": True})
"""Log-probabilities need steps with sampling."""


@pytest.fixture(scope="module")
def directory(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_checkpoint(checkpoint("mimo"), tmp_path_factory.mktemp("harness"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kind -> a file with a task of it, whose data set is a file, too."""
    place = tmp_path_factory.mktemp("tasks")
    data = place / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    found = {}
    for kind, config in KINDS.items():
        made = {
            "task": f"mtpc_{kind}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(place)},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **config,
        }
        path = place / f"{kind}.yaml"
        path.write_text(json.dumps(made))  # JSON is YAML.
        found[kind] = str(path)
    return found


def run(engine: Any, task: str) -> Outcome:
    from mtpc.evaluation.harness import find_tasks, run_tasks

    return run_tasks(engine, find_tasks(task), None)


def test_every_kind_of_request(directory: Path, tasks: dict[str, str]) -> None:
    """Scores and texts are transformers' own, for K = 0 and 3: whole windows, choices, texts."""
    engines: list[Any] = [TransformersEngine(directory, "float64", TINY["max_len"])]
    engines += [MtpcEngine(directory, print, spec_tokens=k, **K3) for k in (0, 3)]
    for kind, task in tasks.items():
        first, *others = [run(engine, task) for engine in engines]
        assert len(first.texts) == len(DOCS)
        for other in others:
            assert other.scores == pytest.approx(first.scores), kind
            if kind == "continue":
                assert other.texts == first.texts
    assert sum(others[1].accepted) > 0


def test_a_long_text_in_windows(directory: Path) -> None:
    """The sum over windows is transformers'."""
    from mtpc.evaluation.harness import HarnessModel

    text = " ".join(f"w{7 * i % 90 + 3}" for i in range(150))
    request = type("Request", (), {"args": (text,)})()
    engines: list[Any] = [TransformersEngine(directory, "float64", 48)]
    options = {**K3, "max_len": 48}
    engines.append(MtpcEngine(directory, print, spec_tokens=3, **options))
    (first,), (second,) = [HarnessModel(e).loglikelihood_rolling([request]) for e in engines]
    assert second == pytest.approx(first)


def test_its_own_client_against_the_server(
    directory: Path, tasks: dict[str, str], tmp_path: Path
) -> None:
    """`local-completions` asks for echo with log-probabilities, and gets what the class gives."""
    pytest.importorskip("tenacity")  # Of lm-eval[api].
    model, words = shutil.copytree(directory, tmp_path / "model"), tmp_path / "words"
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None  # The client sends no first token, the class does.
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    # Beside config.json, transformers makes the tokenizer of the model's type, without the words.
    words.mkdir()
    shutil.copy(model / "tokenizer.json", words)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w95"}
    (words / "tokenizer_config.json").write_text(json.dumps(config))
    from mtpc.evaluation.harness import HarnessModel

    engine = MtpcEngine(model, print, spec_tokens=3, **K3)
    expected = {kind: run(engine, task) for kind, task in tasks.items()}
    with serving(engine.model, model_name=NAME) as server:
        found = lm_eval.simple_evaluate(
            "local-completions",
            model_args={
                "model": NAME,
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": str(words),
                "tokenizer_backend": "huggingface",
                "custom_prefix_token_id": HarnessModel(engine).eot_token_id,
                "max_length": TINY["max_len"],
                "num_concurrent": 1,
            },
            tasks=[*tasks.values()],
            bootstrap_iters=0,
        )
    for kind, outcome in expected.items():
        samples = found["samples"][f"mtpc_{kind}"]
        if kind == "continue":
            assert [s["filtered_resps"][0] for s in samples] == outcome.texts
        name = samples[0]["metrics"][0]
        values = [s[name] for s in samples]
        numbers = [v[0] / v[1] if isinstance(v, (tuple, list)) else float(v) for v in values]
        assert numbers == pytest.approx(outcome.scores), kind


def test_by_the_command(
    directory: Path, tasks: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    small = ["--backend", "eager", "--max-len", "64", "--dtype", "float64", "--spec-tokens", "3"]
    command = ["eval", str(directory), *small, "--batch-buckets", "4", "--out", str(out)]
    assert main([*command, "--task", tasks["choose"]]) == 0
    found = json.loads(out.read_text())
    assert [row["texts_changed"] for row in found["rows"]] == [0, 0]
    assert "mtpc_choose" in found["outcomes"][0]["more"]
    capsys.readouterr()
    assert main([*command, "--task", "no_such_task"]) == 2
    assert "neither a file nor a task of lm-evaluation-harness" in capsys.readouterr().err
