"""What a request asks of `StepWorker`, and the check of it where vLLM admits requests."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from mtpc.errors import RequestError
from mtpc.sampling_params import FLOATS, SamplingParams


class StepRequests(LogitsProcessor):
    """A name for vLLM's option `logits_processors`, for its hook `validate_params` alone.

    vLLM calls the hook with each request's parameters and answers with status 400 where it raises.
    It makes no logits processor: `StepWorker` has no logits to hand out.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what mtpc's steps in vLLM do not do.

        Raises:
            RequestError: see `sampling_of`; a ValueError, as vLLM expects.
        """
        sampling_of(sampling_params)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        raise NotImplementedError("StepWorker has no logits; this class checks requests alone")

    def apply(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        raise NotImplementedError

    def update_state(self, batch_update: Any) -> None:
        raise NotImplementedError


def sampling_of(params: Any) -> SamplingParams:
    """vLLM's `SamplingParams` as mtpc's, which define and order what they share in the same way.

    Raises:
        RequestError: they ask for what the steps do not do, or a value is out of mtpc's range.
    """
    asked = refused(params)
    if asked:
        raise RequestError(
            f"the request asks for {asked[0]}, which mtpc's steps in vLLM do not do: leave it "
            "out, or start vLLM without worker_cls"
        )
    return SamplingParams(
        **{name: getattr(params, name) for name in FLOATS},
        top_k=max(params.top_k, 0),  # -1 keeps all tokens, too.
        seed=params.seed,
        logit_bias=params.logit_bias or (),
        allowed_ids=params.allowed_token_ids,
    )


def refused(params: Any) -> list[str]:
    """What vLLM's `SamplingParams` ask for and mtpc's steps in vLLM do not do."""
    logprobs = params.logprobs, params.prompt_logprobs, params.logprob_token_ids
    asked = {
        "min_tokens": params.min_tokens,
        "log-probabilities": (*logprobs, params.prompt_logprob_token_ids) != (None,) * 4,
        "a grammar": params.structured_outputs,
        "bad_words": params.bad_words,
        "watermarking": params.watermarking,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "trace_decode_token_ids": params.trace_decode_token_ids,
    }
    return [what for what, is_asked in asked.items() if is_asked]
