"""`mtpc.transformers`: what transformers' own `generate` returns, token for token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.side_by_side import EOS, RAGGED, batch, letters, same
from helpers.theorem import PROMPTS
from transformers import generation

import mtpc
from mtpc.ops.philox import gumbel
from mtpc.sampling_params import MAX_SEED

FAMILIES = [
    pytest.param(family, k, marks=[] if (family, k) == ("mimo", 2) else slow)
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
