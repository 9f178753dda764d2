"""The prefill benchmark at a tiny size: its rows and its arithmetic. Never a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from benchmarks import context, memory, prefill
from benchmarks.harness.models import SHAPES
from benchmarks.harness.tables import Row
from benchmarks.peers import vllm_host
from benchmarks.peers.llama_decoder import LlamaDecoder, LlamaTimes

PROMPT_TOKENS = 40
ARGUMENTS = (
    *("--shape", "tiny", "--backend", "eager", "--spec-tokens", "1", "--chunks", "16", "64"),
    *(
        "--prompt-tokens",
        str(PROMPT_TOKENS),
        "9",
        "--peer-context",
        "9",
        "--repeats",
        "2",
        "--max-foreign",
        "1",
    ),
    *("--probe-mib", "1"),
)
"""No sample counts as disturbed, so that it takes seconds."""


@pytest.mark.slow
def test_every_engine_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers.Qwen2ForCausalLM, "_keys_to_ignore_on_load_unexpected", None, raising=False
    )
    assert prefill.main([*ARGUMENTS, "--out", str(tmp_path / "p.json")]) == 0
    rows = json.loads((tmp_path / "p.json").read_text())["rows"]
    engines = [(row["engine"], row["spec_tokens"]) for row in rows]
    ours = [("mtpc, chunks of 16", 1), ("mtpc, chunks of 64", 1)]
    assert engines == [*ours, ("transformers", 0), *ours]
    assert [row["prompt_tokens"] for row in rows] == [PROMPT_TOKENS] * 2 + [9] * 3
    for row in rows:
        for sample in row["taken"]:
            # No page was reused: every sample is of a whole prompt.
            assert (sample["steps"], sample["tokens"]) == (1, row["prompt_tokens"])


@pytest.mark.parametrize(
    "benchmark", [(prefill, "--prompt-tokens"), (context, "--contexts")], ids=lambda b: b[1]
)
def test_peers_need_a_context(
    benchmark: tuple[Any, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is not longer than `--peer-context`, or nothing of a peer would be measured."""
    module, option = benchmark
    words = [option, "40", "50", "--peer-context", "9", "--vllm-python", "python"]
    with pytest.raises(SystemExit):
        module.main(words)
    assert "every context is longer than --peer-context, which is 9" in capsys.readouterr().err


def _row(length: int, engine: str, seconds: float) -> Row:
    """Of 50 tokens, of a target of 3 GB."""
    shape = SHAPES["tiny"]
    size = 3 * 10**9 + 2 * shape.hidden_size * shape.vocab_size
    row = dict(prompt_tokens=length, engine=engine, spec_tokens=0, step_bytes=size)
    figures = dict(ms_per_step=1e3 * seconds, tokens_per_s=50 / seconds)
    return {**row, **figures, "samples": 1, "discarded": 0, "disturbed": False}


def test_cells() -> None:
    """50 tokens of 1.5 billion weights in a second: 150 GFLOP/s."""
    rows = [_row(50, "transformers", 1.0), _row(50, "vLLM", 0.5), _row(60, "vLLM", 0.5)]
    first, second, longer = prefill.table({"arguments": {"shape": "tiny"}, "rows": rows}).cells
    assert first == ["50", "transformers", "0", "1000.0", "50", "150", "1.00x", "0.50x", "-", "1+0"]
    assert second == ["50", "vLLM", "0", "500.0", "100", "300", "2.00x", "1.00x", "-", "1+0"]
    assert longer[-4:] == ["-", "1.00x", "-", "1+0"]


def test_llama_is_timed_by_its_prompt() -> None:
    """Its program decodes a token, too, whose time does not count."""
    asked = list[Any]()

    class Program(LlamaDecoder):
        def run(self, *sizes: int) -> LlamaTimes:
            asked.append(sizes)
            return LlamaTimes(prompt_s=2.0, decode_s=9.0)

    done = Program(Path(), Path(), "BF16", threads=1).prefill([[1, 2, 3]])
    assert asked == [(1, 3, 1)]
    assert (done.seconds, done.tokens) == (2.0, 3)


def test_vllm_takes_prompts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its side of the pipe, over an engine that takes three steps a request."""

    class Engine:
        def __init__(self) -> None:
            self.left, self.log = 0, list[Any]()

        def add_request(self, name: str, prompt: dict[str, Any], params: dict[str, Any]) -> None:
            assert self.left == 0, "the one before is not done"
            self.left = 3
            self.log.append((prompt["prompt_token_ids"], params["max_tokens"]))

        def has_unfinished_requests(self) -> bool:
            return self.left > 0

        def step(self) -> None:
            self.left -= 1

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    engine = Engine()
    done = vllm_host.first_tokens(engine, [[1, 2], [3]])
    assert engine.log == [([1, 2], 1), ([3], 1)]
    assert done.keys() == {"seconds", "cpu_s"}


@pytest.mark.slow
def test_memory_is_written(tmp_path: Path) -> None:
    """Both starts, with what a process must hold and what it took while it packed."""
    out = tmp_path / "memory.json"
    arguments = ["--shape", "tiny", "--spec-tokens", "1", "--batch-buckets", "1"]
    assert memory.main([*arguments, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["start"] for row in rows] == ["just compiled", "warm"]
    for row in rows:
        assert 0 < row["state_bytes"] < row["resident_bytes"] <= row["peak_bytes"]
        assert row["ratio"] == pytest.approx(
            row["resident_bytes"] / (row["weights_bytes"] + row["state_bytes"])
        )
