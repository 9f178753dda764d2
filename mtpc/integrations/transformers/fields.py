"""How mtpc treats each field of transformers' GenerationConfig: honoured, refused or irrelevant.

docs/embedding-transformers.md has what is honoured, and the names of the others; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers import GenerationConfig

from mtpc.errors import RequestError


@dataclass(frozen=True)
class Field:
    """How mtpc treats one field.

    Attributes:
        kind: "honoured" (the output is the same as transformers'), "refused" (a value that would
            change the output is an error) or "irrelevant" (no value changes the tokens).
        how: how the field is honoured, why it is refused, or what it concerns.
        neutral: the values of a refused field that change nothing and are accepted.
        only_with: another field that a refused field needs; without it, transformers and mtpc
            ignore the refused field.
    """

    kind: Literal["honoured", "refused", "irrelevant"]
    how: str
    neutral: tuple[Any, ...] = (None,)
    only_with: str = ""


_honoured, _irrelevant = partial(Field, "honoured"), partial(Field, "irrelevant")


def _refused(how: str, *neutral: Any, only_with: str = "") -> Field:
    return Field("refused", how, (None, *neutral), only_with)


_BEAMS = "each row decodes one sequence; there are no beams"
_ASSISTED = "drafts come only from the model's own MTP layers"
_OF_BEAMS = "concerns beam search, which is refused"
_OF_ASSISTED = "concerns assisted generation, which is refused"
_FILTERS = "the step supports only temperature, top-k, top-p and min-p"
_SCORES = "the step does not return all scores; `spec.stream(logprobs=n)` reports the best n"
_MEMORY = "the step has its own KV cache; transformers' cache stays empty"
_SPEED = "concerns transformers' own forward"

FIELDS: dict[str, Field] = {
    "max_length": _honoured("limit of prompt, padding and new tokens together"),
    "max_new_tokens": _honoured("limit of new tokens"),
    "min_length": _honoured(
        "no end-of-sequence token before this length, which includes padding as in transformers"
    ),
    "min_new_tokens": _honoured("no end-of-sequence token before this many new tokens"),
    "max_time": _honoured("its stopping criterion is checked after every token of the batch"),
    "stop_strings": _honoured(
        "with a tokenizer given to `Generator.generate`, or as a `StopStringCriteria`; otherwise "
        "transformers raises, because it does not pass the tokenizer to `custom_generate`"
    ),
    "do_sample": _honoured(
        "False is greedy; True needs a step compiled with `sampling` (the default)"
    ),
    "num_return_sequences": _honoured("each sequence has its own seed"),
    "temperature": _honoured("with do_sample; 0.001 to 1000"),
    "top_k": _honoured("with do_sample"),
    "top_p": _honoured("with do_sample; above 0, and not together with min_p"),
    "min_p": _honoured(
        "with do_sample; not together with top_p, because the step applies them in another order"
    ),
    "repetition_penalty": _honoured("over the prompt without padding and the output; up to 10"),
    "bad_words_ids": _honoured("single ids; longer sequences are refused"),
    "suppress_tokens": _honoured("the tokens are banned"),
    "sequence_bias": _honoured(
        "up to 256 single ids, -100 to 100 or -inf; longer sequences are refused"
    ),
    "renormalize_logits": _honoured("changes no token, greedy or sampled"),
    "eos_token_id": _honoured("ends a row; up to 8 ids"),
    "pad_token_id": _honoured("fills rows that end before others"),
    "bos_token_id": _honoured("transformers begins with it if no inputs are given"),
    "return_dict_in_generate": _honoured("returns `sequences`; its cache is None"),
    "num_beams": _refused(_BEAMS, 1),
    "num_beam_groups": _refused(_BEAMS, 1),
    "diversity_penalty": _refused(_BEAMS, 0),
    "constraints": _refused(_BEAMS),
    "force_words_ids": _refused(_BEAMS),
    "penalty_alpha": _refused("contrastive search is another decoding method", 0),
    "dola_layers": _refused("DoLa is another decoding method"),
    "top_h": _refused(_FILTERS, only_with="do_sample"),
    "typical_p": _refused(_FILTERS, 1, only_with="do_sample"),
    "epsilon_cutoff": _refused(_FILTERS, 0, only_with="do_sample"),
    "eta_cutoff": _refused(_FILTERS, 0, only_with="do_sample"),
    "no_repeat_ngram_size": _refused("the step counts tokens, not n-grams", 0),
    "encoder_repetition_penalty": _refused("the step only has the repetition penalty", 1),
    "encoder_no_repeat_ngram_size": _refused("the step counts tokens, not n-grams", 0),
    "forced_bos_token_id": _refused("the step does not force tokens by position"),
    "forced_eos_token_id": _refused("the step does not force tokens by position"),
    "begin_suppress_tokens": _refused("the step's bans do not depend on the position", []),
    "exponential_decay_length_penalty": _refused("the step's bias does not depend on the position"),
    "remove_invalid_values": _refused("non-finite logits raise NumericsError", False),
    "guidance_scale": _refused("it needs a second forward with another prompt", 1),
    "watermarking_config": _refused("the watermark depends on previous tokens"),
    "token_healing": _refused(
        "it needs the tokenizer, which transformers does not pass to `custom_generate`", False
    ),
    "output_scores": _refused(_SCORES, False, only_with="return_dict_in_generate"),
    "output_logits": _refused(_SCORES, False, only_with="return_dict_in_generate"),
    "output_attentions": _refused(
        "the step does not store attention weights", False, only_with="return_dict_in_generate"
    ),
    "output_hidden_states": _refused(
        "the step does not return hidden states", False, only_with="return_dict_in_generate"
    ),
    "is_assistant": _refused("an assistant drafts for another model", False),
    "prompt_lookup_num_tokens": _refused(_ASSISTED),
    "assistant_early_exit": _refused(_ASSISTED),
    "assistant_ensemble_weight": _refused("the step accepts drafts exactly, without a mixture"),
    "speculation_type": _refused(_ASSISTED),
    "use_mtp": _irrelevant("the step always uses MTP; `spec_tokens` sets the number of drafts"),
    "early_stopping": _irrelevant(_OF_BEAMS),
    "length_penalty": _irrelevant(_OF_BEAMS),
    "decoder_start_token_id": _irrelevant("concerns encoder-decoder models"),
    "num_assistant_tokens": _irrelevant(_OF_ASSISTED),
    "num_assistant_tokens_schedule": _irrelevant(_OF_ASSISTED),
    "assistant_confidence_threshold": _irrelevant(_OF_ASSISTED),
    "max_matching_ngram_size": _irrelevant(_OF_ASSISTED),
    "assistant_lookbehind": _irrelevant(_OF_ASSISTED),
    "target_lookbehind": _irrelevant(_OF_ASSISTED),
    "use_cache": _irrelevant(_MEMORY),
    "cache_implementation": _irrelevant(
        "the step has its own KV cache; `Generator.generate` refuses `paged`, with which "
        "transformers does not call `custom_generate`"
    ),
    "cache_config": _irrelevant(_MEMORY),
    "max_cache_len": _irrelevant(_MEMORY),
    "prefill_chunk_size": _irrelevant("an option of `mtpc.compile` sets the step's chunk size"),
    "compile_config": _irrelevant(_SPEED),
    "disable_compile": _irrelevant(_SPEED),
    "low_memory": _irrelevant(_SPEED),
    "continuous_batching_config": _irrelevant("concerns `generate_batch`"),
    "transformers_version": _irrelevant("the version that wrote the file"),
}
"""Every field of transformers 5.17 to 5.24, except those that begin with an underscore."""


def check_fields(config: GenerationConfig) -> None:
    """Refuse values that the step does not support.

    A field of a later transformers, which `FIELDS` lacks, must have its default value.

    Raises:
        RequestError: a field has an unsupported value. The message names the field.
    """
    for name, field in FIELDS.items():
        value = getattr(config, name, None)
        if field.kind != "refused" or value in field.neutral:
            continue
        if not field.only_with or getattr(config, field.only_with, None):
            neutral = " or ".join(repr(v) for v in field.neutral)
            raise RequestError(
                f"GenerationConfig.{name} is {value!r}; mtpc takes {neutral}: {field.how}"
            )
    known = vars(GenerationConfig())
    for name in known.keys() - FIELDS.keys():
        value = getattr(config, name, None)
        if not name.startswith("_") and value != known[name]:
            raise RequestError(
                f"GenerationConfig.{name} is {value!r}; this field of the installed transformers "
                f"is newer than mtpc, which takes only its default: {known[name]!r}"
            )
