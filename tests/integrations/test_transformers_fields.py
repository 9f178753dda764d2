"""What `mtpc.transformers` refuses of `generate`'s arguments, by name, with nothing compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.places import ROOT
from transformers import DynamicCache, generation
from transformers.generation import GenerationConfig

import mtpc
from mtpc.errors import RequestError
from mtpc.integrations.transformers.inputs import check_model_arguments
from mtpc.models.seams import CACHE

PAGE = ROOT / "docs" / "embedding-transformers.md"
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
MASK = torch.ones_like(IDS)
EOS = 1


@pytest.fixture(scope="module")
def model() -> Any:
    """It is loaded from nowhere, so that compiling it fails: an error comes before that."""
    return tiny.build_target("glm4_moe")


def refuse(model: Any, message: str, **arguments: Any) -> None:
    arguments = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4, **arguments}
    with pytest.raises(RequestError, match=message):
        model.generate(**arguments, custom_generate=mtpc.transformers.generate)


def accept(model: Any, **arguments: Any) -> None:
    """It gets as far as compiling."""
    arguments = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4, **arguments}
    arguments["compile_options"] = {"backend": "eager"}
    with pytest.raises(mtpc.errors.CheckpointError, match="expected a local directory"):
        model.generate(**arguments, custom_generate=mtpc.transformers.generate)


REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["any"],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 1,
    "begin_suppress_tokens": [3],
    "exponential_decay_length_penalty": (2, 1.1),
    "remove_invalid_values": True,
    "guidance_scale": 1.5,
    "watermarking_config": generation.WatermarkingConfig(),
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
}


def test_every_refused_field_has_its_case() -> None:
    kinds = {name: field.kind for name, field in mtpc.transformers.FIELDS.items()}
    refused = {name for name, kind in kinds.items() if kind == "refused"}
    assert refused == REFUSED.keys() | {"token_healing"}
    assert set(kinds.values()) == {"honoured", "refused", "irrelevant"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, model: Any) -> None:
    """By the field's name; and where it takes another field to have an effect, only with that."""
    needs = mtpc.transformers.FIELDS[name].only_with
    with_it = {needs: True} if needs else {}
    value = REFUSED[name]
    rows = {"input_ids": IDS[:1], "attention_mask": None} if "assistant" in name else {}
    refuse(model, rf"GenerationConfig\.{name} is ", **rows, **with_it, **{name: value})
    if needs:
        accept(model, **{name: value})


def test_token_healing(model: Any) -> None:
    """transformers itself asks for the tokenizer, which it keeps from a callable."""
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(
            IDS,
            token_healing=True,
            custom_generate=mtpc.transformers.generate,
            tokenizer=None,
        )


def test_the_table_holds_every_field() -> None:
    """Of the installed transformers."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields == mtpc.transformers.FIELDS.keys()


def test_fields_of_a_later_transformers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that the table lacks may keep its default and no more."""
    known = {name: field for name, field in mtpc.transformers.FIELDS.items() if name != "top_h"}
    monkeypatch.setattr(mtpc.transformers.fields, "FIELDS", known)
    accept(model, do_sample=True)
    refuse(model, r"GenerationConfig\.top_h is 0.3; this field .* newer", do_sample=True, top_h=0.3)
    config = GenerationConfig(max_new_tokens=4, something_of_mine=7)
    accept(model, generation_config=config, max_new_tokens=None)


def test_the_lists_in_the_docs() -> None:
    """What is honoured, word for word what the code says; the others by their names."""
    page, fields = PAGE.read_text(), mtpc.transformers.FIELDS.items()
    rows = [f"| `{name}` | {field.how} |" for name, field in fields if field.kind == "honoured"]
    assert "\n".join(rows) in page
    for kind in ("refused", "irrelevant"):
        (listed,) = re.findall(rf"(?ms)^\*\*{kind.capitalize()}\*\*(.*?)\.\s", page)
        names = {name for name, field in fields if field.kind == kind}
        assert set(re.findall(r"`(\w+)`", listed)) == names


def _case(value: Any) -> str:
    """Names without addresses: test processes must agree on them."""
    return re.sub(r" at 0x\w+", "", str(value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bad_words_ids": [[3], [4, 5]]}, r"bad_words_ids has the sequence \(4, 5\)"),
        ({"sequence_bias": {(4, 5): 1.0}}, r"sequence_bias has the sequence \(4, 5\)"),
        ({"sequence_bias": {(4,): 200.0}}, r"200.0; .* \(sequence_bias is logit_bias here\)"),
        ({"repetition_penalty": 11.0}, "repetition_penalty is 11.0"),
        ({"do_sample": True, "temperature": 5000.0}, "temperature is 5000.0"),
        ({"do_sample": True, "top_p": 0.0}, "top_p is 0.0"),
        ({"do_sample": True, "top_p": 0.9, "min_p": 0.1}, "top_p and min_p are both given"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, "row 1 .*pad on the left"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "row 0 .*pad on the left"),
        ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, "row 0 .*pad on the left"),
        ({"position_ids": torch.tensor([[0, 1, 3]])}, "position_ids are not those"),
        ({"prefix_allowed_tokens_fn": lambda i, ids: [3]}, "PrefixConstrainedLogitsProcessor"),
    ],
    ids=_case,
)
def test_values(arguments: dict[str, Any], message: str, model: Any) -> None:
    refuse(model, message, **arguments)


def test_arguments_of_the_forward(model: Any) -> None:
    """What transformers makes by itself is taken; what would change the logits is not."""
    accept(model, position_ids=torch.tensor([[0, 1, 2], [0, 1, 2]]))
    padded = torch.tensor([[0, 1, 1], [1, 1, 1]])
    accept(model, attention_mask=padded, position_ids=torch.tensor([[9, 0, 1], [0, 1, 2]]))
    accept(model, attention_mask=padded.bool())
    accept(model, use_cache=False, logits_to_keep=1)
    embeds = model.get_input_embeddings()(IDS)
    refuse(model, r"input_ids has shape \(2, 0\)", input_ids=None, inputs_embeds=embeds)
    cache = DynamicCache()
    model(IDS[:, :2], **{CACHE: cache})
    refuse(model, f"{CACHE} was given", **{CACHE: cache}, use_cache=True)
    refuse(model, "'inputs_embeds' is not supported", inputs_embeds=embeds)
    refuse(model, "'cu_seq_lens_q' is not supported", cu_seq_lens_q=torch.tensor([0, 3]))


def test_text_for_a_multimodal_model() -> None:
    """transformers encodes images before the loop; for text alone what it hands on is empty."""
    padding = torch.zeros(1, dtype=torch.int64)
    check_model_arguments({"mm_encoder_outputs": {}}, padding)
    with pytest.raises(RequestError, match="'mm_encoder_outputs' is not supported"):
        check_model_arguments({"mm_encoder_outputs": {"image": torch.ones(1)}}, padding)
    grids = torch.arange(3).expand(4, 1, 3)
    check_model_arguments({"position_ids": grids}, padding)
    with pytest.raises(RequestError, match="position_ids"):
        check_model_arguments({"position_ids": grids + torch.eye(4)[:, :1, None].long()}, padding)


def _kind(processor: Any) -> str:
    return type(processor).__name__


class Shift(generation.SuppressTokensLogitsProcessor):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([Shift([3])], "the logits processor Shift cannot run inside the step"),
        ([lambda ids, scores: scores], "the logits processor function cannot run"),
        ([generation.RepetitionPenaltyLogitsProcessor(1.2, 2)], "prompt_ignore_length 2"),
        ([generation.TopKLogitsWarper(5, filter_value=-9.0)], "filter_value -9.0"),
        ([generation.TopPLogitsWarper(0.5, min_tokens_to_keep=2)], "min_tokens_to_keep 2"),
        ([generation.MinLengthLogitsProcessor(9, [7])], r"ids \[7\], rows end with \[1\]"),
        (
            [
                generation.TemperatureLogitsWarper(0.5),
                generation.RepetitionPenaltyLogitsProcessor(2.0),
            ],
            "RepetitionPenaltyLogitsProcessor stands after TemperatureLogitsWarper",
        ),
        (
            [generation.TopKLogitsWarper(1), generation.SuppressTokensLogitsProcessor([3])],
            "SuppressTokensLogitsProcessor stands after TopKLogitsWarper",
        ),
        (
            [generation.SequenceBiasLogitsProcessor({(3,): 1.0})] * 2,
            "",
        ),
    ],
    # Not by their text, which has an address: test processes must agree on names.
    ids=lambda value: value if isinstance(value, str) else "-".join(map(_kind, value)),
)
def test_processors(processors: list[Any], message: str, model: Any) -> None:
    """Classes, numbers and orders that the step does not have."""
    given = generation.LogitsProcessorList(processors)
    if message:
        refuse(model, message, logits_processor=given)
    else:
        accept(model, logits_processor=given)  # transformers takes one object once.


def test_order_of_config_and_user(model: Any) -> None:
    """A bias of the user's comes after the config's penalty there, before it in the step."""
    bias = generation.LogitsProcessorList([generation.SequenceBiasLogitsProcessor({(3,): 1.0})])
    accept(model, logits_processor=bias)
    refuse(
        model,
        "SequenceBiasLogitsProcessor stands after RepetitionPenaltyLogitsProcessor",
        logits_processor=bias,
        repetition_penalty=1.2,
    )


def test_the_step_says_what_it_can() -> None:
    """The page names every processor class that is read."""
    named = set(re.findall(r"`(\w+(?:Processor|Warper|Normalization))`", PAGE.read_text()))
    assert {kind.__name__ for kind in mtpc.transformers.READERS} <= named
