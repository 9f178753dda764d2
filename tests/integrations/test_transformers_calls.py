"""Calls of `mtpc.transformers`: the seam, criteria, errors, threads, and the examples."""

from __future__ import annotations

import copy
import re
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from helpers.families import TINY
from helpers.places import ROOT
from helpers.plans import changed
from helpers.side_by_side import EOS, RAGGED, Streamer, batch, letters, same
from helpers.theorem import PROMPTS
from transformers import generation

import mtpc
from mtpc.config import CompileOptions
from mtpc.errors import NumericsError, OptionError, RequestError, ServingError


class Listed(generation.StoppingCriteria):
    """Ends a row at a multiple of 8, and keeps what it was asked about."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), scores))
        return input_ids[:, -1] % 8 == 0


def test_the_seam_itself(generator: Any) -> None:
    """As issue 8 has it: `custom_generate`, with the model's generate in front."""
    model, seam = generator.model, {"custom_generate": mtpc.transformers.generate}
    wanted = model.generate(**RAGGED, max_new_tokens=9)
    before = dict(vars(model))
    options = {**TINY, "backend": "eager"}
    for found in (
        model.generate(**RAGGED, max_new_tokens=9, custom_generate=generator),
        model.generate(**RAGGED, max_new_tokens=9, **seam, spec=generator.spec),
        model.generate(**RAGGED, max_new_tokens=9, **seam, spec_tokens=0, compile_options=options),
    ):
        assert torch.equal(found, wanted)
    assert vars(model) == before
    streamer = Streamer()
    model.generate(**RAGGED, max_new_tokens=2, custom_generate=generator, token_streamer=streamer)
    assert len(streamer.got) == 4


def test_use_mtp_never_runs_the_hosts_loop(generator: Any) -> None:
    """With `custom_generate`, and after `attach`: mtpc's steps run, for rows that the host's own
    loop refuses, and what would bypass them is refused by name."""
    model = generator.model
    mtp = {"use_mtp": True, "max_new_tokens": 6}
    plain = model.generate(**RAGGED, max_new_tokens=6)

    def replays(**call: Any) -> int:
        before = sum(generator.spec.stats.replays.values())
        assert torch.equal(model.generate(**RAGGED, **mtp, **call), plain)
        return sum(generator.spec.stats.replays.values()) - before

    assert replays(custom_generate=generator) > 0
    again = {**RAGGED, "num_return_sequences": 2, "do_sample": True}
    assert generator.generate(**again, **mtp).shape[0] == 2 * len(plain)
    generator.attach()
    try:
        assert replays() > 0
        assert model.generate(**again, **mtp).shape[0] == 2 * len(plain)
        with pytest.raises(RequestError, match=r"cache_implementation is 'paged'"):
            model.generate(**RAGGED, **mtp, cache_implementation="paged")
        with pytest.raises(RequestError, match="custom_generate was given"):
            model.generate(**RAGGED, **mtp, custom_generate=generator)
        with pytest.raises(RequestError, match="use generate_batch"):
            model.init_continuous_batching()
        assert model.generate_batch([[5, 9]], max_new_tokens=2)["req_0"].is_finished()
    finally:
        generator.detach()
    assert not {"generate", "generate_batch", "init_continuous_batching"} & vars(model).keys()
    generator.detach()


def test_prompts_of_any_lengths(generator: Any) -> None:
    """As the model's own continuous batching returns them: more prompts than the steps have rows
    for, each to its own end, in steps that several share."""
    prompts = [[5, 9, 17, 33], [3], [40, 41, 42], [90, 7, 61, 12, 13], [8, 8], [2, 11]]
    model, texts = generator.model, []
    for ids in prompts:
        options = {"attention_mask": torch.ones(1, len(ids)), "max_new_tokens": 9}
        texts.append(model.generate(torch.tensor([ids]), **options, eos_token_id=EOS)[0].tolist())
    assert len(set(map(len, (t[len(p) :] for t, p in zip(texts, prompts, strict=True))))) > 1
    before = sum(generator.spec.stats.replays.values())
    config = transformers.GenerationConfig(max_new_tokens=9, eos_token_id=EOS, pad_token_id=0)
    found = generator.generate_batch(prompts, config, progress_bar=True)
    assert sum(generator.spec.stats.replays.values()) - before < sum(map(len, texts))
    assert list(found) == [f"req_{i}" for i in range(len(prompts))]
    assert [one.prompt_ids + one.generated_tokens for one in found.values()] == texts
    assert all(one.is_finished() and one.error is None for one in found.values())
    config.num_return_sequences, config.do_sample = 2, True
    torch.manual_seed(5)
    several = generator.generate_batch(prompts[:2], config)
    assert list(several) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert len({tuple(one.generated_tokens) for one in several.values()}) == 4
    for arguments, words in (
        ({"record_timestamps": True}, "record_timestamps was given"),
        (
            {"generation_config": transformers.GenerationConfig(max_new_tokens=2, max_time=1.0)},
            "MaxTimeCriteria",
        ),
    ):
        with pytest.raises(RequestError, match=words):
            generator.generate_batch(prompts, **arguments)


def test_the_call_decides_what_is_compiled(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that `generate` compiles with follow rows and length of the call."""
    asked: list[dict[str, Any]] = []

    def record(model: Any, **options: Any) -> mtpc.SpecModel:
        asked.append(options)
        return generator.spec

    monkeypatch.setattr(mtpc.transformers.generator, "compile", record)
    ids = torch.tensor([PROMPTS[3]] * 3)
    seam = {"custom_generate": mtpc.transformers.generate}
    generator.model.generate(ids, **seam, max_new_tokens=2)
    generator.model.generate(ids[:1], **seam, max_new_tokens=2, do_sample=True, spec_tokens="auto")
    with pytest.raises(RequestError, match="5004 tokens"):
        generator.model.generate(ids, **seam, max_new_tokens=5000)
    assert asked == [
        {"spec_tokens": 3, "batch_buckets": (4,)},
        {"spec_tokens": "auto", "batch_buckets": (1,)},
        {"spec_tokens": 3, "batch_buckets": (4,), "max_len": 5004},
    ]
    assert all(CompileOptions.parse(options) for options in asked)


@pytest.mark.parametrize("eos", [None, EOS])
def test_criteria_of_the_user(eos: Any, generator: Any) -> None:
    """They are asked of the same batches, in the same order; with no end-of-sequence criterion
    rows go on until the last has ended, as there."""
    plain, ours = Listed(), Listed()
    arguments = {**RAGGED, "max_new_tokens": 24, "eos_token_id": eos, "pad_token_id": 0}
    wanted = generator.model.generate(**arguments, stopping_criteria=[plain])
    found = generator.generate(**arguments, stopping_criteria=[ours])
    assert torch.equal(found, wanted)
    assert wanted.shape[1] < RAGGED["input_ids"].shape[1] + 24
    assert ours.seen == plain.seen


def test_criteria_of_transformers_that_the_user_gives(generator: Any) -> None:
    for criterion in (
        generation.EosTokenCriteria(EOS),
        generation.MaxLengthCriteria(RAGGED["input_ids"].shape[1] + 3),
        generation.MaxLengthCriteria(2),
    ):
        criteria = generation.StoppingCriteriaList([criterion])
        same(generator, **RAGGED, max_new_tokens=20, pad_token_id=0, stopping_criteria=criteria)


@pytest.mark.parametrize(
    ("breaks", "error"), [("criterion", ZeroDivisionError), ("streamer", KeyError)]
)
def test_what_the_user_gave_raises(breaks: str, error: type, generator: Any) -> None:
    """The error arrives, nothing is left in the engine, and the next call is as ever."""

    class Broken(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) == 4:
                raise KeyError("streamer")

    def criterion(ids: torch.Tensor, scores: Any) -> Any:
        return torch.tensor(1 // (RAGGED["input_ids"].shape[1] + 4 - ids.shape[1]) > 1)

    given: dict[str, Any] = (
        {"streamer": Broken()} if breaks == "streamer" else {"stopping_criteria": [criterion]}
    )
    with pytest.raises(error):
        generator.generate(**RAGGED, max_new_tokens=20, **given)
    assert not generator.spec.engine.has_work
    same(generator, **RAGGED, max_new_tokens=8)


def test_a_row_that_somebody_aborts(generator: Any) -> None:
    engine = generator.spec.engine

    def abort(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        engine.abort(engine.running[-1].request_id)
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(ServingError, match="was aborted"):
        generator.generate(**RAGGED, max_new_tokens=20, stopping_criteria=[abort])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 60}, r"15 \+ max_new_tokens 60 = 75 tokens; max_len is 64"),
        ({"input_ids": torch.tensor([[3, 96]]), "attention_mask": None}, "prompt id 96"),
        ({"eos_token_id": list(range(9)), "pad_token_id": 0}, "9 stop ids; at most 8"),
        ({"suppress_tokens": [200]}, "banned_ids has 200"),
    ],
)
def test_errors_before_anything_ran(
    arguments: dict[str, Any], message: str, generator: Any
) -> None:
    streamer, replays = Streamer(), sum(generator.spec.stats.replays.values())
    rows = batch(PROMPTS[9], PROMPTS[1])
    with pytest.raises(RequestError, match=message):
        generator.generate(**{**rows, "max_new_tokens": 4, **arguments}, streamer=streamer)
    assert sum(generator.spec.stats.replays.values()) == replays
    assert streamer.got == []


def test_other_models(generator: Any, compiled: Callable[..., Any]) -> None:
    """A Generator serves the model it was made of; what can be told of a spec is checked."""
    model = generator.model
    other = copy.deepcopy(model)
    with pytest.raises(RequestError, match="Generator of another model object"):
        other.generate(**RAGGED, custom_generate=generator)
    with pytest.raises(RequestError, match="another model object; compile this one"):
        mtpc.transformers.Generator(other, spec=generator.spec)
    with pytest.raises(OptionError, match="spec_tokens was given together with spec"):
        mtpc.transformers.Generator(model, spec=generator.spec, spec_tokens=1)
    other.resize_token_embeddings(90)
    with pytest.raises(RequestError, match="compiled for 96 token ids, the model has 90"):
        mtpc.transformers.Generator(other, spec=generator.spec)
    for name in ("assistant_model", "custom_generate"):
        with pytest.raises(RequestError, match=f"{name} was given"):
            generator.generate(**RAGGED, **{name: model})
    with pytest.raises(RequestError, match=r"cache_implementation is 'paged'.*never calls mtpc"):
        generator.generate(**RAGGED, cache_implementation="paged")


def test_greedy_steps_refuse_sampling(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option's name."""
    greedy = changed(generator.spec.options, sampling=False, token_mask=False)
    monkeypatch.setattr(generator.spec.engine, "options", greedy)
    with pytest.raises(RequestError, match="compile with sampling=True"):
        generator.generate(**RAGGED, do_sample=True, max_new_tokens=2)
    same(generator, **RAGGED, max_new_tokens=2)


def test_threads(generator: Any) -> None:
    """Calls from several threads share the engine; a text streamer's reader ends."""
    rows = [batch(*PROMPTS[i : i + 2]) for i in range(3, 9)]
    wanted = [generator.model.generate(**r, max_new_tokens=12, pad_token_id=0) for r in rows]
    streamer = transformers.TextIteratorStreamer(letters(), timeout=60)
    streamed = {"max_new_tokens": 6, "streamer": streamer, "eos_token_id": None}
    first = {"input_ids": torch.tensor([PROMPTS[6]])}
    with ThreadPoolExecutor(4) as pool:
        text = pool.submit("".join, streamer)
        last = pool.submit(generator.generate, **first, **streamed)
        jobs = [
            pool.submit(generator.generate, **r, max_new_tokens=12, pad_token_id=0) for r in rows
        ]
        assert all(torch.equal(j.result(), w) for j, w in zip(jobs, wanted, strict=True))
        assert text.result() == letters().decode(last.result()[0])


def test_nonfinite_logits(generator: Any) -> None:
    """They end in mtpc's error; weights are shared: what the model has is what is computed."""
    norm = generator.model.get_decoder().norm.weight
    kept = norm.detach().clone()
    try:
        with torch.no_grad():
            norm.fill_(float("nan"))
        with pytest.raises(NumericsError, match="NaN"):
            generator.generate(**RAGGED, max_new_tokens=4)
    finally:
        with torch.no_grad():
            norm.copy_(kept)
    generator.spec.engine.reset_prefix_cache()
    same(generator, **RAGGED, max_new_tokens=4)


def test_the_example_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/embedding-transformers.md's example runs as it stands there, on the eager backend."""
    page = (ROOT / "docs" / "embedding-transformers.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    written = "spec_tokens=2, max_len=256)"
    assert example.count(written) == 1
    small = 'spec_tokens=1, max_len=256, backend="eager", batch_buckets=(2,))'
    exec(example.replace(written, small), {})
    out = capsys.readouterr().out
    assert out.startswith("The with statement is used to")
    assert "acceptance" in out


@pytest.mark.slow
def test_the_example_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "examples" / "transformers_generate.py"
    arguments = ["--backend", "eager", "--spec-tokens", "1", "--max-new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(script), run_name="__main__")
    assert exit.value.code == 0
    assert "tokens equal            True" in capsys.readouterr().out
