"""`model.generate_batch`: prompts of any lengths in, an output for each request out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from mtpc import Engine
from mtpc.engine.request import Request
from mtpc.engine.stream import check_all, stream
from mtpc.errors import RequestError, ServingError
from mtpc.integrations.transformers.stopping import StopPlan

_WITHOUT_EFFECT = ("continuous_batching_config", "progress_bar", "warmup")
"""Arguments of `generate_batch` that concern transformers' own batching, or a bar."""


def batch_arguments(arguments: dict[str, Any]) -> dict[str, int]:
    """Those of the arguments of `generate_batch` that `generate` takes.

    Raises:
        RequestError: an argument would change what is returned, or is unknown.
    """
    limit = arguments.pop("max_new_tokens", None)
    for name, value in arguments.items():
        if value and name not in _WITHOUT_EFFECT:
            raise RequestError(
                f"{name} was given to generate_batch; mtpc takes max_new_tokens, and ignores "
                f"{', '.join(_WITHOUT_EFFECT)}: leave it out"
            )
    return {} if limit is None else {"max_new_tokens": limit}


def refuse_host_criteria(plans: Iterable[StopPlan]) -> None:
    """Refuse stopping criteria that the host would check, as transformers does with batching.

    Raises:
        RequestError: a plan has one.
    """
    for plan in plans:
        for criterion in plan.host_criteria:
            raise RequestError(
                f"{type(criterion).__name__} ends rows by what the host computes; generate_batch "
                "takes limits of length and end-of-sequence tokens: use generate"
            )


def decode_batch(
    engine: Engine, by_prompt: Sequence[Sequence[Request]]
) -> dict[str, GenerationOutput]:
    """Serve all requests together.

    Args:
        engine: the engine. Other callers may use it at the same time.
        by_prompt: for each prompt, a request for each of its sequences; not added yet.

    Returns:
        See `Generator.generate_batch`.

    Raises:
        RequestError: a request cannot be served. None has run.
        CapacityError: a request needs more pages than the pool has. None has run.
        NumericsError: the model produced non-finite logits.
        ServingError: another caller aborted a request.
    """
    requests = [request for several in by_prompt for request in several]
    check_all(engine, requests)
    # transformers' order: a prompt's further sequences, then its first one.
    names = [
        name
        for prompt, several in enumerate(by_prompt)
        for name in (
            *(f"req_{prompt}__child#{i}" for i in range(len(several) - 1)),
            f"req_{prompt}",
        )
    ]
    for output in stream(engine, requests, [None] * len(requests)):
        if output.finish_reason == "aborted":
            raise ServingError(f"{names[output.index]} was aborted while generate_batch ran")
    return {
        name: GenerationOutput(
            name, list(request.prompt_ids), list(request.output_ids), status=RequestStatus.FINISHED
        )
        for name, request in zip(names, requests, strict=True)
    }


def refuse_manager(*_: Any, **__: Any) -> NoReturn:
    """In the place of a model's `init_continuous_batching`.

    Raises:
        RequestError: always.
    """
    raise RequestError(
        "a manager of continuous batching decodes by itself and never calls mtpc, to which this "
        "model is attached; use generate_batch or `mtpc serve`, or detach the model first"
    )
