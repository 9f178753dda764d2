"""What becomes of each field of transformers' GenerationConfig: honoured, refused or irrelevant.

docs/embedding-transformers.md prints this table, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import GenerationConfig

from mtpc.errors import RequestError


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        kind: "honoured" (the output is what transformers' would be), "refused" (a value that would
            change the output is an error) or "irrelevant" (no value changes the tokens here).
        how: by what it is honoured, why it is refused, or what it is about.
        neutral: of a refused field, values that ask for nothing.
        only_with: of a refused field, a field without which transformers ignores it, too.
    """

    kind: Literal["honoured", "refused", "irrelevant"]
    how: str
    neutral: tuple[Any, ...] = (None,)
    only_with: str = ""


def _honoured(how: str) -> Field:
    return Field("honoured", how)


def _refused(how: str, *neutral: Any, only_with: str = "") -> Field:
    return Field("refused", how, (None, *neutral), only_with)


def _irrelevant(how: str) -> Field:
    return Field("irrelevant", how)


_BEAMS = "one sequence is decoded a row; there are no beams"
_ASSISTED = "drafts come from the model's own MTP layers alone"
_OF_BEAMS = "of beam search, which is refused"
_OF_ASSISTED = "of assisted generation, which is refused"
_OF_ENCODERS = "of encoder-decoder models"
_FILTERS = "the step has temperature, top-k, top-p and min-p alone"
_SCORES = "scores of all tokens never leave the step; `spec.stream(logprobs=n)` reports the best n"
_MEMORY = "the step has memory of its own; transformers makes its cache, and it stays empty"
_SPEED = "how transformers runs its own forward"

FIELDS: dict[str, Field] = {
    "max_length": _honoured("limit of prompt, padding and new tokens"),
    "max_new_tokens": _honoured("limit of new tokens"),
    "min_length": _honoured("no end-of-sequence token before; padding counts, as it does there"),
    "min_new_tokens": _honoured("no end-of-sequence token before"),
    "max_time": _honoured("asked after every token of the batch, as its stopping criterion"),
    "stop_strings": _honoured(
        "with the tokenizer, by `Generator.generate`, or as a `StopStringCriteria`: the seam does "
        "not carry the tokenizer, and transformers itself then raises"
    ),
    "do_sample": _honoured("False is greedy; True needs a step compiled with `sampling=True`"),
    "num_return_sequences": _honoured("each with its own seed"),
    "temperature": _honoured("where do_sample; 0.001 to 1000"),
    "top_k": _honoured("where do_sample"),
    "top_p": _honoured("where do_sample; above 0, and not together with min_p"),
    "min_p": _honoured("where do_sample; not together with top_p: the step has the other order"),
    "repetition_penalty": _honoured("over prompt and output, padding left out; up to 10"),
    "bad_words_ids": _honoured("of single ids; longer ones are refused"),
    "suppress_tokens": _honoured("banned"),
    "sequence_bias": _honoured(
        "of single ids, up to 256 of them, -100 to 100 or -inf; longer ones are refused"
    ),
    "renormalize_logits": _honoured("changes no token, greedy or sampled"),
    "eos_token_id": _honoured("ends a row, up to 8 ids"),
    "pad_token_id": _honoured("stands in rows that ended before others"),
    "bos_token_id": _honoured("transformers begins with it where no inputs are given"),
    "return_dict_in_generate": _honoured("`sequences`; past_key_values is None"),
    "num_beams": _refused(_BEAMS, 1),
    "num_beam_groups": _refused(_BEAMS, 1),
    "diversity_penalty": _refused(_BEAMS, 0),
    "constraints": _refused(_BEAMS),
    "force_words_ids": _refused(_BEAMS),
    "penalty_alpha": _refused("contrastive search is another way of decoding", 0),
    "dola_layers": _refused("DoLa is another way of decoding"),
    "top_h": _refused(_FILTERS, only_with="do_sample"),
    "typical_p": _refused(_FILTERS, 1, only_with="do_sample"),
    "epsilon_cutoff": _refused(_FILTERS, 0, only_with="do_sample"),
    "eta_cutoff": _refused(_FILTERS, 0, only_with="do_sample"),
    "no_repeat_ngram_size": _refused("the step counts tokens, not n-grams", 0),
    "encoder_repetition_penalty": _refused("the step's penalty is that of repetition", 1),
    "encoder_no_repeat_ngram_size": _refused("the step counts tokens, not n-grams", 0),
    "forced_bos_token_id": _refused("tokens are not forced by position"),
    "forced_eos_token_id": _refused("tokens are not forced by position"),
    "begin_suppress_tokens": _refused("bans do not change with the position", []),
    "exponential_decay_length_penalty": _refused("bias does not change with the position"),
    "remove_invalid_values": _refused("non-finite logits end in NumericsError", False),
    "guidance_scale": _refused("it takes a second forward of another prompt", 1),
    "watermarking_config": _refused("the watermark is a function of the tokens before"),
    "token_healing": _refused("the seam does not carry the tokenizer that it needs", False),
    "output_scores": _refused(_SCORES, False, only_with="return_dict_in_generate"),
    "output_logits": _refused(_SCORES, False, only_with="return_dict_in_generate"),
    "output_attentions": _refused(
        "attention is never whole in memory", False, only_with="return_dict_in_generate"
    ),
    "output_hidden_states": _refused(
        "hidden states never leave the step", False, only_with="return_dict_in_generate"
    ),
    "is_assistant": _refused("an assistant drafts for another model", False),
    "prompt_lookup_num_tokens": _refused(_ASSISTED),
    "assistant_early_exit": _refused(_ASSISTED),
    "assistant_ensemble_weight": _refused("acceptance is exact, never a mixture"),
    "speculation_type": _refused(_ASSISTED),
    "use_mtp": _irrelevant("MTP is what the step does; `spec_tokens` says how much"),
    "early_stopping": _irrelevant(_OF_BEAMS),
    "length_penalty": _irrelevant(_OF_BEAMS),
    "decoder_start_token_id": _irrelevant(_OF_ENCODERS),
    "num_assistant_tokens": _irrelevant(_OF_ASSISTED),
    "num_assistant_tokens_schedule": _irrelevant(_OF_ASSISTED),
    "assistant_confidence_threshold": _irrelevant(_OF_ASSISTED),
    "max_matching_ngram_size": _irrelevant(_OF_ASSISTED),
    "assistant_lookbehind": _irrelevant(_OF_ASSISTED),
    "target_lookbehind": _irrelevant(_OF_ASSISTED),
    "use_cache": _irrelevant(_MEMORY),
    "cache_implementation": _irrelevant(
        "the step has memory of its own; but with `paged` transformers leaves `generate` before it "
        "comes to `custom_generate`"
    ),
    "cache_config": _irrelevant(_MEMORY),
    "max_cache_len": _irrelevant(_MEMORY),
    "prefill_chunk_size": _irrelevant("the step's is an option of `mtpc.compile`"),
    "compile_config": _irrelevant(_SPEED),
    "disable_compile": _irrelevant(_SPEED),
    "low_memory": _irrelevant(_SPEED),
    "continuous_batching_config": _irrelevant("of `generate_batch`"),
    "transformers_version": _irrelevant("a note on who wrote the file"),
}
"""Every field of transformers 5.17 to 5.23, but those that begin with an underscore."""


def check_fields(config: GenerationConfig) -> None:
    """Refuse what the step cannot do.

    Fields of a later transformers, which this table does not have, may only have their defaults.

    Raises:
        RequestError: a refused field asks for something; the message names it.
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
                f"is newer than mtpc, which takes its default alone: {known[name]!r}"
            )
