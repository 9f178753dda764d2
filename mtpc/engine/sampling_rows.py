"""A request's sampling parameters: checks, rows of the shared state, and log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mtpc.engine.request import Request
from mtpc.errors import RequestError
from mtpc.layout.specs import SAMPLING_INTS
from mtpc.plan import Plan
from mtpc.program.program import Program
from mtpc.sampling_params import FLOATS, SamplingParams, TokenLogprobs

BIAS_IDS, OUTPUT_COUNTS = "state.bias_ids", "state.output_counts"


def check_sampling(request: Request, options: Plan, vocab_size: int) -> None:
    """Refuse sampling parameters that cannot be served.

    Raises:
        RequestError: the program was compiled without `sampling`, or for fewer log-probabilities;
            an id is outside the vocabulary; every token is banned; or `min_tokens` is unreachable.
    """
    params = request.sampling
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling is {params!r}; expected mtpc.SamplingParams")
    if params.is_plain:
        return
    if not options.sampling:
        raise RequestError(
            "the request asks for sampling (temperature, filters, penalties, masks, logprobs or "
            "min_tokens); the model was compiled for greedy decoding only: compile with "
            "sampling=True"
        )
    if params.logprobs is not None and params.logprobs > options.max_logprobs:
        raise RequestError(
            f"logprobs is {params.logprobs}; the model was compiled for at most "
            f"{options.max_logprobs}: compile with a larger max_logprobs"
        )
    for name, token_id in params.named_ids():
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} has {token_id}; expected ids in 0..{vocab_size - 1}")
    if len(params.banned_ids) >= vocab_size:
        raise RequestError("banned_ids holds the whole vocabulary; allow at least one token")
    if params.min_tokens > request.max_new_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, above max_new_tokens {request.max_new_tokens}"
        )
    # Stops are masked until min_tokens, so another token must be allowed.
    allowed = range(vocab_size) if params.allowed_ids is None else params.allowed_ids
    barred = {*params.banned_ids, *request.ends}
    if params.min_tokens and not any(token_id not in barred for token_id in allowed):
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but only stop tokens are allowed: allow others"
        )


def write_sampling_rows(program: Program, request: Request, slot: int) -> None:
    """Write a request's sampling rows when it is placed in a slot."""
    shared = program.shared
    if SAMPLING_INTS not in shared:
        return
    rows = sampling_rows(request.sampling, request.prompt_ids, request.output_ids, shared)
    for name, row in rows.items():
        program.write(shared[name][slot], row)


def sampling_rows(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    shared: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """What a request's slot must hold in the buffers of `sampling_specs`, by their names.

    The slot still holds the values of its last request. The rows of a vocabulary's size (bits and
    counts) are there only if the request has masks or penalties; otherwise `state.sampling_ints`
    says that the step must not read them. The counts come from `output_ids`, so a request that is
    placed again after a preemption gets its counts back.

    Args:
        params: with a seed.
        prompt_ids: of the request.
        output_ids: of the request, so far.
        shared: the buffers, whose sizes count.

    Returns:
        Tensors on the CPU. Each is the beginning of its row; the rest of the row is not read.
    """
    first_stop = len(prompt_ids) + params.min_tokens if params.min_tokens else 0
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    ints = (
        params.seed or 0,
        params.top_k,
        first_stop,
        params.has_mask,
        params.has_penalties,
        num_logprobs,
    )
    floats = [float(getattr(params, name)) for name in FLOATS]
    pairs = dict(params.logit_bias)
    vocab_size = shared[OUTPUT_COUNTS].shape[1]
    bias_ids = torch.full((shared[BIAS_IDS].shape[1],), -1)
    bias_ids[: len(pairs)] = torch.tensor([*pairs], dtype=torch.int64)
    rows = {
        SAMPLING_INTS: torch.tensor([int(value) for value in ints]),
        "state.sampling_floats": torch.tensor(floats, dtype=torch.float64),
        BIAS_IDS: bias_ids,
    }
    if pairs:
        rows["state.bias_values"] = torch.tensor([*pairs.values()], dtype=torch.float64)
    if params.has_mask:
        allowed = range(vocab_size) if params.allowed_ids is None else params.allowed_ids
        bits = pack_bits(set(allowed) - set(params.banned_ids), vocab_size)
        rows["state.allowed_tokens"] = bits
    if params.has_penalties:
        rows["state.prompt_tokens"] = pack_bits(prompt_ids, vocab_size)
        counts = torch.zeros(vocab_size, dtype=torch.int32)
        for token_id, count in Counter(output_ids).items():
            counts[token_id] = count
        rows[OUTPUT_COUNTS] = counts
    return rows


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    """A mask row: int32 [ceil(V / 32)]. Token v is bit v mod 32 of word v // 32."""
    bits = torch.zeros((vocab_size + 31) // 32 * 32, dtype=torch.int64)
    bits[torch.tensor(list(token_ids), dtype=torch.int64)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def read_logprobs(
    buffers: Mapping[str, Tensor], row: int, emitted: list[int], request: Request
) -> list[TokenLogprobs] | None:
    """The log-probabilities of the tokens that a step emitted in a row, one entry per token; None
    if the request did not ask for them."""
    wanted = request.sampling.logprobs
    if wanted is None:
        return None
    count = len(emitted)
    own = buffers["batch.out_logprobs"][row, :count].tolist()
    ids = buffers["batch.out_top_ids"][row, :count, :wanted].tolist()
    top = buffers["batch.out_top_logprobs"][row, :count, :wanted].tolist()
    return [
        TokenLogprobs(token_id, own[i], tuple(zip(ids[i], top[i], strict=True)))
        for i, token_id in enumerate(emitted)
    ]
