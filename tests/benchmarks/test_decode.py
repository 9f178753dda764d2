"""The decode benchmark at a tiny size: its rows, its checkpoints, its arithmetic. Never a time."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import transformers

import mtpc
from benchmarks import decode, waterfall
from benchmarks.harness import machine
from benchmarks.harness.decoders import Decoded, Decoder
from benchmarks.harness.machine import BandwidthProbe
from benchmarks.harness.models import (
    HYBRID_SHAPES,
    MOE_SHAPES,
    SHAPES,
    Checkpoint,
    demo,
    text_prompts,
    write_checkpoint,
)
from benchmarks.harness.rounds import Case, decode_case, sample
from benchmarks.harness.tables import Row, to_markdown
from mtpc.models.families.nextn import GLM4_MOE

K = 1
ARGUMENTS = (
    *("--shape", "tiny", "--backend", "eager", "--spec-tokens", str(K), "--batches", "1", "2"),
    *("--workloads", "mimo-random", "mimo-accepting", "glm4-accepting"),
    *("--new-tokens", "16", "--repeats", "1", "--max-foreign", "1", "--probe-mib", "1"),
)
"""One K per workload, and no sample counts as disturbed, so that it takes seconds."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one tiny run writes; transformers' class is left as it was."""
    out = tmp_path_factory.mktemp("benchmark")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Qwen2ForCausalLM", "Glm4MoeForCausalLM"):
            patch.setattr(getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", None)
        assert decode.main([*ARGUMENTS, "--out", str(out / "results.json")]) == 0
    record = json.loads((out / "results.json").read_text())
    return {**record, "path": out / "results.json"}


@pytest.mark.slow
def test_every_engine_has_its_rows(results: dict[str, Any]) -> None:
    keys = {
        (row["model"], row["weights"], row["engine"], row["spec_tokens"], row["batch"])
        for row in results["rows"]
    }
    mimo = {
        ("mimo", weights, engine, k, batch)
        for weights in ("random", "accepting")
        for engine, k in (("transformers", 0), ("mtpc", K), ("mtpc, int8 drafts", K))
        for batch in (1, 2)
    }
    decoded = (("transformers", 1), ("mtpc", 1), ("mtpc", 2))  # transformers drafts for one.
    glm4 = {("glm4_moe", "accepting", engine, K, batch) for engine, batch in decoded}
    assert keys == mimo | glm4
    text = to_markdown(results, decode.table(results))
    assert text.count("\n| mimo ") == len(mimo)


@pytest.mark.slow
def test_every_batch_is_set_beside_the_one_that_transformers_drafts_for(
    results: dict[str, Any],
) -> None:
    rows = results["rows"]
    (peer,) = (r for r in rows if (r["model"], r["engine"]) == ("glm4_moe", "transformers"))
    for row, ratio in zip(rows, _column(rows, "over use_mtp"), strict=True):
        over = f"{row['tokens_per_s'] / peer['tokens_per_s']:.2f}x"
        assert ratio == (over if row["model"] == peer["model"] else "-")


@pytest.mark.slow
def test_the_record_holds_no_path(results: dict[str, Any]) -> None:
    """Where files were is no part of a measurement; everything else that was asked for is."""
    assert results["benchmark"] == "decode"
    assert not {"out", "csv", "markdown", "workdir", "vllm_python"} & results["arguments"].keys()
    assert results["arguments"]["batches"] == [1, 2]
    assert str(results["path"].parent) not in results["path"].read_text()


@pytest.mark.slow
def test_acceptance_is_what_the_weights_force(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        if row["spec_tokens"] == 0:
            assert row["acceptance_rate"] is None
        elif row["weights"] == "accepting":
            assert row["acceptance_rate"] == 1.0
        else:
            assert row["acceptance_rate"] < 0.2


@pytest.mark.slow
def test_mtpc_times_whole_steps(results: dict[str, Any]) -> None:
    """Where all drafts are accepted, two tokens a step and request, but for the last step; steps
    before all are prefilled, or after one has ended, are not counted. There are none here: the
    warm-up left the prompts' first pages, and what remains of two fits into one prefill step."""
    rows = [r for r in results["rows"] if r["engine"] == "mtpc" and r["weights"] == "accepting"]
    for row in rows:
        (taken,) = row["taken"]
        steps, tokens = taken["steps"], taken["tokens"]
        assert steps == 8
        assert tokens == row["batch"] * (2 * steps - 1)


def test_step_bytes_are_the_checkpoints(tmp_path: Path) -> None:
    """The two families' layers of one shape weigh nearly the same, the MTP layers too."""
    shape = SHAPES["tiny"]
    mimo = write_checkpoint(tmp_path / "mimo", "mimo", shape, accepting=False)
    glm4 = write_checkpoint(tmp_path / "glm4", "glm4_moe", shape, accepting=False)
    head = 2 * shape.hidden_size * shape.vocab_size
    assert mimo.head_bytes == glm4.head_bytes == head
    assert mimo.target_bytes == pytest.approx(glm4.target_bytes, rel=0.02)
    assert mimo.draft_bytes == pytest.approx(glm4.draft_bytes, rel=0.02)
    assert mimo.step_bytes(3) == mimo.target_bytes + 4 * head + 3 * mimo.draft_bytes
    stored = (mimo.directory / "model.safetensors").stat().st_size
    assert mimo.target_bytes + mimo.draft_bytes + 2 * head == pytest.approx(stored, rel=0.02)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.slow)]
)
def test_step_bytes_count_experts_once(family: str, tmp_path: Path) -> None:
    """One token reads the experts it chooses; many tokens read all, as if the layers were dense."""
    shape = MOE_SHAPES["tiny"]
    checkpoint = write_checkpoint(tmp_path, family, shape, accepting=True)
    expert = 3 * 2 * shape.hidden_size * 32
    assert checkpoint.expert_bytes == (4 * expert, 4 * expert)
    everything = checkpoint.target_bytes + checkpoint.head_bytes
    assert checkpoint.step_bytes(0) == everything - 2 * expert
    assert checkpoint.step_bytes(0, batch=2) == everything - expert
    assert checkpoint.step_bytes(0, batch=64) == everything
    one_draft = checkpoint.draft_bytes + checkpoint.head_bytes - 2 * expert
    assert checkpoint.step_bytes(1) == everything - expert + one_draft
    sizes = dict(spec_tokens=1, max_len=64, batch_buckets=[2], sampling=False)
    model = mtpc.compile(tmp_path, backend="eager", **sizes)
    model.generate([[1, 2, 3], [4, 5]], max_new_tokens=8)
    assert model.stats.acceptance_rate == 1.0


@pytest.mark.slow
def test_accepting_weights_of_a_hybrid_model_accept_all_drafts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5", HYBRID_SHAPES["tiny"], accepting=True)
    model = mtpc.compile(tmp_path, spec_tokens=3, backend="eager", max_len=64, batch_buckets=[2])
    model.generate([[1, 2, 3], [4, 5]], max_new_tokens=12)
    assert model.stats.acceptance_rate == 1.0


class _Bandwidth(BandwidthProbe):
    """Reads as many bytes a second, in any case."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth

    def read(self) -> float:
        return self._bandwidth


class _Launched(Decoder):
    """A decoder that starts anew when asked to, and notes what it was asked."""

    engine = "mtpc"

    def __init__(self, spec_tokens: int = 0, seconds: float = 1.0, launches: int = 1) -> None:
        self.spec_tokens, self.seconds, self.launches = spec_tokens, seconds, launches
        self.log: list[str] = []

    def decode(self, prompts: Any, new_tokens: int = 8) -> Decoded:
        self.log.append(f"decode {len(prompts)} of {len(prompts[0])}")
        return Decoded(10, 20, self.seconds, 0.5)

    def renew(self) -> bool:
        self.launches += 1
        self.log.append("renew")
        return True


def _case(decoder: _Launched, batch: int = 1, bandwidth: float = 950.0, **more: Any) -> Case:
    weights = Checkpoint(Path(), GLM4_MOE, 900, 50, 50, 70)
    row, size = dict(model="mimo", weights="random"), weights.step_bytes(decoder.spec_tokens)
    probe = _Bandwidth(bandwidth)
    return decode_case(row, decoder, decoder.decode, [[1] * 4] * batch, size, probe, **more)


def _row(
    *samples: tuple[float, float], k: int = 0, launches: int = 1, bandwidth: float = 950.0
) -> Row:
    """Of samples that took so many seconds, and during which others used that share."""
    decoder = _Launched(k, launches=launches)
    case = _case(decoder, bandwidth=bandwidth)
    for decoder.seconds, share in samples:
        case.samples.append({**case.take(), "foreign_share": share})
    return case.result(max_foreign=0.1)


def _column(rows: list[Row], heading: str) -> list[str]:
    table = decode.table({"rows": rows})
    return [line[list(table.columns).index(heading)] for line in table.cells]


def test_disturbed_samples_are_dropped() -> None:
    row = _row((20.0, 0.0), (90.0, 0.5), (20.0, 0.1))
    assert (row["samples"], row["discarded"], row["disturbed"]) == (2, 1, False)
    assert len(row["taken"]) == 3
    assert row["ms_per_step"] == 2000.0
    assert row["roofline_ms"] == pytest.approx(1000.0)
    assert row["efficiency"] == pytest.approx(0.5)


def test_a_row_says_when_all_was_disturbed() -> None:
    row = _row((20.0, 0.5))
    assert (row["samples"], row["discarded"], row["disturbed"]) == (1, 0, True)


@pytest.mark.parametrize(("free", "is_short"), [(2_000_000, True), (2_500_000, False)])
def test_a_lack_of_memory_is_said(
    free: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four servers beside four programs did not fit into 24 GiB: steps took 800 ms for 80."""
    fields = {"MemTotal": "24000000", "MemAvailable": str(free)}
    monkeypatch.setattr(
        machine, "system_field", lambda path, pattern: fields[pattern.split(":")[0]]
    )
    message = machine.memory_shortage()
    assert (message is not None) == is_short
    if message is not None:
        assert message.startswith("only 1.9 of 22.9 GiB of memory are left")


def test_a_peer_of_many_launches_counts_at_its_best() -> None:
    row = _row((20.0, 0.0), (10.0, 0.0), (5.0, 0.5), launches=3)
    assert (row["ms_per_step"], row["samples"], row["discarded"]) == (1000.0, 2, 1)


def test_each_round_has_a_launch_of_its_own() -> None:
    """Once for all batches, and warmed up before anything is measured."""
    decoder = _Launched()
    cases = [_case(decoder, batch) for batch in (1, 2)]
    assert list(sample(cases, 2, 10.0, lambda _: None)) == [1, 2]
    once = ["decode 1 of 4", "decode 2 of 4"] * 2
    assert decoder.log == [*once, "renew", *once]
    assert [len(case.samples) for case in cases] == [2, 2]


@pytest.mark.parametrize("stays_warm", [True, False])
def test_a_warm_up_is_short_and_only_of_what_stays_warm(stays_warm: bool) -> None:
    decoder = _Launched()
    decoder.stays_warm = stays_warm
    list(sample([_case(decoder, warm_up_tokens=2)], 1, 10.0, lambda _: None))
    assert decoder.log == ["decode 1 of 2"] * stays_warm + ["decode 1 of 4"]


def test_prompts_of_the_demo_are_text() -> None:
    checkpoint = demo()
    prompts = text_prompts(checkpoint.directory, 3, 32)
    assert [len(prompt) for prompt in prompts] == [32] * 3
    assert len({tuple(prompt) for prompt in prompts}) == 3
    read = transformers.AutoTokenizer.from_pretrained(checkpoint.directory).decode
    assert all(any(read(prompt) in page for page in topics.values()) for prompt in prompts)


def test_speedup_is_over_plain_decoding() -> None:
    rows = [_row((20.0, 0.0)), _row((10.0, 0.0), k=2)]
    assert _column(rows, "over plain") == ["1.00x", "2.00x"]


def test_a_ratio_says_where_memory_was_faster() -> None:
    """At 950 and 1,900 bytes a second the same decoder takes half the time, not half the work."""
    rows = [{**_row((20.0, 0.0)), "engine": "vLLM"}, _row((10.0, 0.0), bandwidth=1900.0)]
    assert _column(rows, "over vLLM") == ["1.00x", "2.00x (memory 2.00x)"]


@pytest.mark.slow
def test_the_waterfall_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is a share of the whole step, and together they are all of it."""
    monkeypatch.setattr(
        transformers.Qwen2ForCausalLM, "_keys_to_ignore_on_load_unexpected", None, raising=False
    )
    out = tmp_path / "waterfall.json"
    arguments = ["--shape", "tiny", "--spec-tokens", "1", "--batches", "2", "--steps", "4"]
    assert waterfall.main([*arguments, "--out", str(out)]) == 0
    whole, limit, *parts = json.loads(out.read_text())["rows"]
    assert (whole["part"], limit["part"]) == ("whole step", "limit")
    assert {"paged_attention", "rotate_and_write", "the rest"} <= {part["part"] for part in parts}
    assert limit["ms"] + sum(part["ms"] for part in parts) == pytest.approx(whole["ms"])
    assert parts == sorted(parts, key=lambda part: -part["ms"])
