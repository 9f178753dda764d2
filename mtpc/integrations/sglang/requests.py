"""What a request asks of mtpc's workers in SGLang, and how one ends that asks for more."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from mtpc.errors import RequestError
from mtpc.integrations.sglang.algorithm import NAME, STEP_NAME
from mtpc.sampling_params import FLOATS, SamplingParams


def end(
    req: Any,
    message: str,
    status: HTTPStatus = HTTPStatus.BAD_REQUEST,
    kind: str = "BadRequestError",
) -> None:
    """End a request; its client gets the message as SGLang's own, by default for a bad request."""
    if not req.finished():
        req.to_finish = FINISH_ABORT(message, status, kind)


def end_broken(requests: Iterable[Any]) -> None:
    """End requests whose logits were not finite."""
    for req in requests:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        end(req, "the logits were not finite", status, "InternalServerError")


def end_sampled(requests: Iterable[Any]) -> None:
    """End requests that ask for sampling, where SGLang's verification takes the argmax only.

    SGLang reads temperature 0 as a top_k of 1. Its verification samples on a GPU, and on a CPU it
    takes the argmax whatever a request asks.
    """
    for req in requests:
        if req.sampling_params.top_k > 1:
            end(
                req,
                f"--speculative-algorithm {NAME} on a CPU takes the most probable token: found a "
                "request with sampling, expected temperature 0 (or start SGLang without "
                "speculation)",
            )


def sampling_or_end(req: Any) -> SamplingParams:
    """How mtpc's steps choose a request's tokens; one that they do not serve ends."""
    try:
        return sampling_of(req)
    except RequestError as error:
        end(req, f"--speculative-algorithm {STEP_NAME}: {error}")
        return SamplingParams()


def sampling_of(req: Any) -> SamplingParams:
    """A request's `SamplingParams` of SGLang as mtpc's.

    Filters are those of SGLang's verification: top_p applies to what top_k keeps.

    Raises:
        RequestError: it asks for what the steps do not do, or a value is out of mtpc's range.
    """
    params, asked = req.sampling_params, refused(req)
    if asked:
        raise RequestError(
            f"the request asks for {asked[0]}, which mtpc's steps in SGLang do not do: leave it "
            "out, or start SGLang with MTPC"
        )
    numbers = {name: getattr(params, name) for name in FLOATS}
    if params.top_k == 1:  # SGLang's way to say temperature 0.
        numbers["temperature"] = 0.0
    return SamplingParams(
        **numbers,
        top_k=0 if params.top_k in (1, TOP_K_ALL) else params.top_k,
        seed=params.sampling_seed,
        logit_bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
    )


def refused(req: Any) -> list[str]:
    """What a request asks for and mtpc's steps in SGLang do not do."""
    params = req.sampling_params
    # SGLang cuts by top_p before min_p, and applies the repetition penalty between other penalties
    # and the bias; mtpc cuts by min_p first, and applies them after the bias and before the others.
    is_cut_twice = params.top_k > 1 and params.min_p and params.top_p < 1
    shifts = params.frequency_penalty or params.presence_penalty or params.logit_bias
    asked = {
        "min_p together with top_p": is_cut_twice,
        "repetition_penalty together with other penalties or logit_bias": (
            params.repetition_penalty != 1 and shifts
        ),
        "min_new_tokens": params.min_new_tokens,
        "a logit processor": req.custom_logit_processor,
        "log-probabilities": req.return_logprob,
        "a grammar": req.grammar,
        "hidden states": req.return_hidden_states,
        "embeddings": req.input_embeds or req.multimodal_inputs,
        "an adapter (LoRA)": req.lora_id,
    }
    return [what for what, is_asked in asked.items() if is_asked]
