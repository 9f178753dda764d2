"""`mtpc.transformers`: what transformers' own `generate` returns, token for token."""

from __future__ import annotations

import copy
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from conftest import TINY
from test_theorem import PROMPTS
from transformers import generation

import mtpc
from mtpc.config import CompileOptions
from mtpc.errors import NumericsError, OptionError, RequestError, ServingError
from mtpc.ops.philox import gumbel
from mtpc.sampling_params import MAX_SEED

ROOT = Path(__file__).parent.parent
EOS = [8, 24, 45]
"""Ids that the trained models emit often: rows end apart."""


def batch(*prompts: list[int]) -> dict[str, torch.Tensor]:
    """Left-padded, as a tokenizer does it."""
    length = max(map(len, prompts))
    pads = [length - len(prompt) for prompt in prompts]
    rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (length - pad) for pad in pads]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


RAGGED = batch(PROMPTS[5], PROMPTS[2], PROMPTS[8])


class Streamer(generation.BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


class Listed(generation.StoppingCriteria):
    """Ends a row at a multiple of 11, and keeps what it was asked about."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), scores))
        return input_ids[:, -1] % 11 == 0


@pytest.fixture
def generator(hf_generator: Callable[..., Any]) -> Iterator[Any]:
    made = hf_generator("mimo", 2)
    yield made
    engine = made.spec.engine
    assert not engine.has_work
    assert engine.slots.num_free == engine.program.max_reqs


def same(generator: Any, **arguments: Any) -> torch.Tensor:
    """Both loops' output and streams, compared."""
    plain, ours = Streamer(), Streamer()
    wanted = generator.model.generate(**arguments, streamer=plain)
    found = generator.generate(**arguments, streamer=ours)
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype
    assert ours.got == plain.got
    assert ours.got[-1] == "end"
    return found


FAMILIES = [
    pytest.param(family, k, marks=[] if (family, k) in (("mimo", 2), ("qwen3_next", 3)) else slow)
    for slow in [pytest.mark.slow]
    for family in ("mimo", "glm4_moe", "deepseek_v3", "qwen3_next", "step3p7", "mimo_v2")
    for k in (1, 2, 3)
]
FAMILIES.append(pytest.param("qwen3_5", 2, marks=pytest.mark.slow))


@pytest.mark.parametrize(("family", "spec_tokens"), FAMILIES)
def test_tokens(family: str, spec_tokens: int, hf_generator: Callable[..., Any]) -> None:
    """Batches of 1 to 5 ragged rows (the bucket holds 4); drafts of all kinds occurred."""
    generator = hf_generator(family, spec_tokens)
    for rows in (PROMPTS[3:4], PROMPTS[:2], PROMPTS[6:9], PROMPTS[8:12], PROMPTS[2:7]):
        same(generator, **batch(*rows), max_new_tokens=24, pad_token_id=0)
    same(generator, **batch(*PROMPTS[4:8]), max_new_tokens=24, eos_token_id=EOS, pad_token_id=0)
    stats = generator.spec.stats
    assert 0 < stats.accepted[-1] <= stats.accepted[0] < stats.drafted[0]
    if spec_tokens > 1:
        assert stats.accepted[-1] < stats.accepted[0]


@pytest.mark.slow
def test_rows_of_deepseek_v4(hf_generator: Callable[..., Any]) -> None:
    """Against each row alone: transformers counts its compressed blocks from the padding on, so
    that a row's text depends on how much padding it has."""
    generator, differ = hf_generator("deepseek_v4", 2), 0
    for prompts in (PROMPTS[3:4], PROMPTS[6:9], PROMPTS[8:12]):
        rows, new = batch(*prompts), {"max_new_tokens": 24, "pad_token_id": 0}
        length = rows["input_ids"].shape[1]
        found = generator.generate(**rows, **new)[:, length:]
        padded = generator.model.generate(**rows, **new)[:, length:]
        for row, prompt in enumerate(prompts):
            alone = generator.model.generate(**batch(prompt), **new)[0, len(prompt) :]
            assert torch.equal(found[row, : len(alone)], alone)
            assert not found[row, len(alone) :].any()
            differ += not torch.equal(padded[row, : len(alone)], alone)
    assert differ, "transformers' padding is harmless now: put the family into FAMILIES"


HONOURED: dict[str, list[dict[str, Any]]] = {
    "max_length": [{"max_length": 20}, {}],
    "max_new_tokens": [{"max_new_tokens": 1}, {"max_new_tokens": 13}],
    "min_length": [{"min_length": 26, "eos_token_id": EOS, "max_new_tokens": 20}],
    "min_new_tokens": [
        {"min_new_tokens": 9, "eos_token_id": EOS, "max_new_tokens": 20},
        {"min_new_tokens": 30, "eos_token_id": EOS, "max_new_tokens": 12},
    ],
    "max_time": [{"max_time": 0.0}, {"max_time": 3600.0}],
    "do_sample": [{"do_sample": False, "temperature": 0.3, "top_k": 1, "min_p": 0.5}],
    "repetition_penalty": [{"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}],
    "bad_words_ids": [{"bad_words_ids": [[8], [14], [65], [49]]}],
    "suppress_tokens": [{"suppress_tokens": [8, 14, 24]}],
    "sequence_bias": [
        {"sequence_bias": {(20,): 4.0, (33,): -5.0, (8,): float("-inf")}},
        {"sequence_bias": [[[20], 2.5]], "repetition_penalty": 1.4, "bad_words_ids": [[14]]},
    ],
    "renormalize_logits": [{"renormalize_logits": True, "repetition_penalty": 1.3}],
    "eos_token_id": [{"eos_token_id": EOS}, {"eos_token_id": 8}, {"eos_token_id": None}],
    "pad_token_id": [{"eos_token_id": EOS, "pad_token_id": 7}],
    "bos_token_id": [{"bos_token_id": 5, "input_ids": None, "attention_mask": None}],
}
"""Greedy ones; the others have tests of their own, see OTHERS."""
OTHERS = {
    "stop_strings": "test_stop_strings",
    "num_return_sequences": "test_sampling",
    "temperature": "test_sampling",
    "top_k": "test_sampling",
    "top_p": "test_sampling",
    "min_p": "test_sampling",
    "return_dict_in_generate": "test_output_object",
}
IRRELEVANT: dict[str, Any] = {
    "use_mtp": True,
    "early_stopping": True,
    "length_penalty": 3.0,
    "decoder_start_token_id": 4,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 4,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {},
    "max_cache_len": 64,
    "prefill_chunk_size": 3,
    "compile_config": generation.CompileConfig(),
    "disable_compile": True,
    "low_memory": True,
    "continuous_batching_config": None,
    "transformers_version": "5.0.0",
}


def test_every_field_has_its_test() -> None:
    """A field that is declared honoured, or irrelevant, without a case here fails."""
    kinds = {name: field.kind for name, field in mtpc.transformers.FIELDS.items()}
    honoured = {name for name, kind in kinds.items() if kind == "honoured"}
    assert honoured == HONOURED.keys() | OTHERS.keys()
    assert all(test in globals() for test in OTHERS.values())
    assert {name for name, kind in kinds.items() if kind == "irrelevant"} == IRRELEVANT.keys()


@pytest.mark.parametrize("field", HONOURED)
def test_honoured(field: str, generator: Any) -> None:
    outputs = [same(generator, **{**RAGGED, "pad_token_id": 0, **c}) for c in HONOURED[field]]
    if field in ("do_sample", "renormalize_logits", "max_time"):
        return
    # The case would be worth nothing where the field changed nothing.
    neutral = {"eos_token_id": EOS} if field in ("pad_token_id", "min_new_tokens") else {}
    plain = generator.model.generate(**RAGGED, **neutral, max_new_tokens=20)
    assert not torch.equal(outputs[0], plain)


@pytest.mark.parametrize("field", IRRELEVANT)
def test_irrelevant(field: str, generator: Any) -> None:
    config = generation.GenerationConfig(max_new_tokens=6, **{field: IRRELEVANT[field]})
    plain = generator.model.generate(**RAGGED, max_new_tokens=6)
    assert torch.equal(generator.generate(**RAGGED, generation_config=config), plain)


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


def test_the_call_decides_what_is_compiled(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that `generate` compiles with follow rows, length and sampling of the call."""
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
        {"spec_tokens": 3, "batch_buckets": (4,), "sampling": False},
        {"spec_tokens": "auto", "batch_buckets": (1,), "sampling": True},
        {"spec_tokens": 3, "batch_buckets": (4,), "sampling": False, "max_len": 5004},
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


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 0},
    {"temperature": 1.6},
    {"top_k": 4, "temperature": 1.2},
    {"top_p": 0.7, "top_k": 30},
    {"min_p": 0.15, "top_k": 9, "repetition_penalty": 1.5},
    {"top_k": 12, "suppress_tokens": [8, 14], "sequence_bias": {(20,): 2.0}, "top_p": 0.9},
    {"num_return_sequences": 2, "eos_token_id": EOS, "min_new_tokens": 4},
]


@torch.no_grad()
@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampling(case: dict[str, Any], generator: Any) -> None:
    """Each token is the argmax of what transformers' own processors leave of the logits, plus
    the seed's noise: so its distribution is transformers' own."""
    model, new, processors = generator.model, 6, []

    def capture(model: Any, input_ids: torch.Tensor, **prepared: Any) -> torch.Tensor:
        processors.append(prepared["logits_processor"])
        return input_ids

    arguments = {**RAGGED, "max_new_tokens": new, "do_sample": True, "pad_token_id": 0, **case}
    rows = model.generate(**arguments, custom_generate=capture)
    length, skipped = rows.shape[1], (RAGGED["attention_mask"] == 0).sum(1)
    skipped = skipped.repeat_interleave(case.get("num_return_sequences", 1))
    torch.manual_seed(11)
    found = generator.generate(**arguments)
    torch.manual_seed(11)
    seeds = torch.randint(0, MAX_SEED, (len(rows),))
    torch.manual_seed(11)
    assert torch.equal(generator.generate(**arguments), found)
    assert not torch.equal(generator.generate(**arguments), found)
    running = torch.ones(len(rows), dtype=torch.bool)
    for column in range(length, found.shape[1]):
        before = found[:, :column]
        each = [model(before[i : i + 1, pad:]).logits[0, -1] for i, pad in enumerate(skipped)]
        scores = processors[0](before, torch.stack(each).float())
        noise = gumbel(seeds, column - skipped, scores.shape[1])
        wanted = torch.where(running, (scores.double() + noise).argmax(1), 0)
        assert torch.equal(found[:, column], wanted)
        running &= ~torch.isin(wanted, torch.tensor(case.get("eos_token_id", [1])))


def test_processors_of_the_user(generator: Any) -> None:
    """Those that the step has are read, in transformers' own order."""
    for given in (
        [generation.SuppressTokensLogitsProcessor([8, 14])],
        [generation.RepetitionPenaltyLogitsProcessor(1.6)],
        [generation.SequenceBiasLogitsProcessor({(20,): 3.0})],
        [generation.TopKLogitsWarper(1), generation.LogitNormalization()],
        [generation.MinNewTokensLengthLogitsProcessor(9, 4, EOS)],
    ):
        processors = generation.LogitsProcessorList(given)
        arguments = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": 0}
        same(generator, **RAGGED, **arguments, logits_processor=processors)


def test_output_object(generator: Any) -> None:
    arguments = {**RAGGED, "max_new_tokens": 5, "return_dict_in_generate": True}
    wanted, found = generator.model.generate(**arguments), generator.generate(**arguments)
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.past_key_values is None
    assert found.scores is None


def letters() -> Any:
    """A tokenizer of one character a token."""
    alphabet = [chr(code) for code in range(33, 127)] + ["\u0100", "\u0101"]
    bpe = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("place", ["argument", "config", "model"])
def test_stop_strings(place: str, generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two characters that the first row says; wherever the strings stand."""
    free = generator.model.generate(**RAGGED, max_new_tokens=20, pad_token_id=0)
    length, tokenizer = RAGGED["input_ids"].shape[1], letters()
    stop = "".join(chr(33 + int(token)) for token in free[0, length + 5 : length + 7])
    tokens = {"max_new_tokens": 20, "pad_token_id": 0}
    arguments: dict[str, Any] = {**tokens, "stop_strings": [stop]}
    if place == "config":
        arguments = {"generation_config": generation.GenerationConfig(**arguments)}
    if place == "model":
        arguments = tokens
        monkeypatch.setattr(generator.model.generation_config, "stop_strings", stop)
    wanted = generator.model.generate(**RAGGED, **arguments, tokenizer=tokenizer)
    found = generator.generate(**RAGGED, **arguments, tokenizer=tokenizer)
    assert torch.equal(found, wanted)
    assert found[0, length + 7 :].tolist() == [0] * (found.shape[1] - length - 7)
    with pytest.raises(ValueError, match="tokenizer"):
        generator.generate(**RAGGED, **arguments)


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


def test_greedy_steps_refuse_sampling(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option's name; it is on where the model's own generation config samples."""
    greedy = replace(generator.spec.options, sampling=False)
    monkeypatch.setattr(generator.spec.engine, "options", greedy)
    with pytest.raises(RequestError, match="compile with sampling=True"):
        generator.generate(**RAGGED, do_sample=True, max_new_tokens=2)
    same(generator, **RAGGED, max_new_tokens=2)
    asks = mtpc.transformers.generator._asks_for_sampling
    config = generation.GenerationConfig
    assert not asks(None)
    assert not asks(config(temperature=0.5))
    assert asks(config(do_sample=True))
    assert asks(config(repetition_penalty=1.1))
    assert not asks(config(min_length=0, suppress_tokens=None))
    for fields in (
        {"suppress_tokens": [5]},
        {"bad_words_ids": [[5]]},
        {"sequence_bias": {(5,): -2.0}},
        {"min_length": 3},
        {"min_new_tokens": 3},
    ):
        assert asks(config(**fields)), fields


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
