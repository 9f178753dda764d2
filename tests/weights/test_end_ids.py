"""The ids that end a text: the configs' and the tokenizer's, which chat templates write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.families import TINY
from helpers.word_model import word_checkpoint
from transformers import PreTrainedTokenizerFast

import mtpc
from mtpc.errors import RequestError
from mtpc.weights.served_model import tokenizer_ends

END = "<|im_end|>"
WORDS = {f"w{i}": i for i in range(9)}


def make(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer whose token 8 is `w8`, and 9 is END; of words, pieces or with scores."""
    if kind == "unigram":
        model: Any = tokenizers.models.Unigram([(w, -1.0) for w in WORDS], unk_id=0)
    elif kind == "bpe":
        model = tokenizers.models.BPE(WORDS, [])
    else:
        model = tokenizers.models.WordLevel(WORDS, unk_token="w0")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens([END])
    return made


NAMED: dict[str, dict[str, Any]] = {
    "a text": {"eos_token": END},
    "an object": {"eos_token": {"__type": "AddedToken", "content": END, "special": True}},
    "a word of the vocabulary": {"eos_token": "w8"},
    "an older list of added tokens": {
        "eos_token": END,
        "added_tokens_decoder": {"9": {"content": END, "special": True}},
    },
    "another's list": {"eos_token": "w8", "added_tokens_decoder": {"9": {"content": END}}},
    "null": {"eos_token": None},
    "no entry": {},
}


@pytest.mark.parametrize("kind", ["words", "bpe", "unigram"])
@pytest.mark.parametrize("name", NAMED)
def test_ends_are_those_of_transformers(tmp_path: Path, kind: str, name: str) -> None:
    make(kind).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED[name]))
    wanted = PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id
    assert tokenizer_ends(tmp_path) == (() if wanted is None else (wanted,))
    assert wanted == (
        None if name in ("null", "no entry") else 8 if "w8" in str(NAMED[name]) else 9
    )


def test_older_files_of_special_tokens(tmp_path: Path) -> None:
    make("words").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}}))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id == 9
    assert tokenizer_ends(tmp_path) == (9,)


DAMAGED: list[tuple[str, str]] = [
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", '{"eos_token": 5}'),
    ("tokenizer_config.json", '{"eos_token": ["<|im_end|>"]}'),
    ("tokenizer_config.json", '{"eos_token": "nowhere"}'),
    (
        "tokenizer_config.json",
        '{"eos_token": "a", "added_tokens_decoder": {"x": {"content": "a"}}}',
    ),
    ("tokenizer_config.json", '{"eos_token": "a", "added_tokens_decoder": [5]}'),
    ("tokenizer_config.json", '{"eos_token": "a", "added_tokens_decoder": {"5": null}}'),
    ("tokenizer.json", "{"),
    ("tokenizer.json", '{"added_tokens": 5}'),
    ("tokenizer.json", '{"model": {"vocab": {"<|im_end|>": "x"}}}'),
    ("tokenizer.json", '{"model": {"vocab": [[]]}}'),
    ("tokenizer.json", '{"model": 5}'),
]


@pytest.mark.parametrize(("file", "text"), DAMAGED)
def test_files_that_name_no_token(tmp_path: Path, file: str, text: str) -> None:
    """Whoever gives ids needs no tokenizer, so its files are no reason to refuse the model."""
    make("words").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (tmp_path / file).write_text(text)
    assert tokenizer_ends(tmp_path) == ()
    assert tokenizer_ends(tmp_path / "no such directory") == ()


@pytest.fixture(scope="module")
def ended(
    checkpoint: Callable[..., Path], cpu_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], mtpc.SpecModel]:
    """A model whose tokenizer and generation_config.json name these ends."""
    source = checkpoint("mimo")

    def get(entries: dict[str, Any], **options: Any) -> mtpc.SpecModel:
        directory = word_checkpoint(source, tmp_path_factory.mktemp("ended"))
        (directory / "tokenizer_config.json").write_text(json.dumps(entries))
        plain = {
            **TINY,
            "sampling": True,
            "backend": "cpu",
            "dtype": "float64",
            "batch_buckets": (2,),
            "cache_dir": cpu_cache,
        }
        return mtpc.compile(directory, **{**plain, "spec_tokens": 1, **options})

    return get


def test_a_text_ends_at_the_tokenizers_end(ended: Callable[..., mtpc.SpecModel]) -> None:
    """And at the config's. A token that ends the text is no part of it."""
    free = ended({})
    ids = free.generate("w7 w8", 12, ignore_eos=True).token_ids
    (own,) = free.served.stop_ids
    third = next(i for i in ids[2:] if i != own and ids.index(i) == ids[2:].index(i) + 2)
    count = ids.index(third) + 1
    spec = ended({"eos_token": f"w{third}"})
    assert spec.served.stop_ids == (own, third)
    for found in (
        spec.generate("w7 w8", 12),
        free.generate("w7 w8", 12, stop_token_ids=[third]),
        free.generate("w7 w8", 12, ignore_eos=True, stop_token_ids=(third,)),
        free.generate("w7 w8", 12, stop_ids=[third]),
        free.generate("w7 w8", 12, stop_ids=[], stop_token_ids=[third, third]),
        free.generate("w7 w8", 12, sampling=mtpc.SamplingParams(stop_token_ids=(third,))),
    ):
        assert (found.token_ids, found.finish_reason) == (ids[:count], "stop")
        assert found.text == free.served.decode(ids[: count - 1])
    assert (
        free.generate("w7 w8", 12, stop_ids=[], min_tokens=count + 1, stop_token_ids=[third])[:4]
        == free.served.decode(ids)[:4]
    )
    assert spec.generate("w7 w8", 12, ignore_eos=True).token_ids == ids


def test_greedy_programs_take_stop_tokens(ended: Callable[..., mtpc.SpecModel]) -> None:
    """They need no `sampling`. Ids that the model lacks are refused by name."""
    spec = ended({}, sampling=False)
    ids = spec.generate([7, 8], 8, ignore_eos=True)
    assert spec.generate([7, 8], 8, stop_token_ids=[ids[0]]) == ids[:1]
    with pytest.raises(RequestError, match="stop_token_ids has 96; expected ids in"):
        spec.generate([7, 8], 8, stop_token_ids=[96])
    with pytest.raises(RequestError, match="9 stop ids; at most 8"):
        spec.generate([7, 8], 8, stop_ids=[0], stop_token_ids=range(1, 9))
