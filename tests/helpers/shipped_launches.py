"""Launches of every kernel at sizes of released models, on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mtpc.backends.aiter.token_lists import BEHIND
from mtpc.backends.peer_memory import PEERS, PeerMemory, bytes_of
from mtpc.backends.targets import Target
from mtpc.backends.triton_kernels.configs import BATCH_INVARIANT
from mtpc.backends.triton_kernels.crosscompile import Specialisation
from mtpc.backends.triton_kernels.launch import Choice, Launch
from mtpc.backends.triton_kernels.plans import plan
from mtpc.backends.triton_kernels.token_lists import list_plan
from mtpc.weights.grouped import PACKED_INPUTS, Kind

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def _fake(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _indices(reqs: int, blocks: int) -> tuple[torch.Tensor, ...]:
    return (
        _fake(reqs, blocks, dtype=torch.int32),
        _fake(reqs, dtype=torch.int32),
        _fake(reqs + 1, dtype=torch.int32),
    )


def gqa(
    reqs: int,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = BF16,
    configs: str = "",
    codes: torch.dtype | None = None,
) -> list[Launch]:
    q = _fake(reqs * rows, heads[0], dims[0], dtype=dtype)
    k, v = (_fake(4096, 16, heads[1], dim, dtype=codes or dtype) for dim in dims)
    names = ("k_scale", "v_scale") if codes else ()
    scales = {name: _fake(4096, 16, heads[1], dtype=FP32) for name in names}
    given = (q, k, v, *_indices(reqs, 2048), 0.09)
    return plan("paged_attention", *given, **scales, configs=configs)[0]


def _gqa_with_sinks(
    reqs: int, rows: int, dtype: torch.dtype = BF16, softcap: float = 0.0
) -> list[Launch]:
    """gpt-oss's layer with a window: 64 heads of 64 on 8."""
    shapes = ((reqs * rows, 64, 64), (4096, 16, 8, 64), (64,))
    q, kv, sinks = (_fake(*shape, dtype=dtype) for shape in shapes)
    given = (q, kv, kv, *_indices(reqs, 2048), 0.1)
    named = {"sliding_window": 128, "softcap": softcap, "sinks": sinks}
    return plan("paged_attention", *given, **named)[0]


def mla(reqs: int, rows: int, dtype: torch.dtype = BF16, configs: str = "") -> list[Launch]:
    q, latents = (_fake(*x, 576, dtype=dtype) for x in ((reqs * rows, 128), (4096, 16)))
    return plan("latent_attention", q, latents, *_indices(reqs, 2048), 0.07, 512, configs=configs)[
        0
    ]


def _experts(
    tokens: int,
    sizes: tuple[int, int, int],
    chosen: int = 8,
    *limit: float | bool,
    dtype: torch.dtype = BF16,
    configs: str = "",
    name: str = "experts",
) -> list[Launch]:
    count, hidden, inner = sizes
    x, weights, first, down = (
        _fake(*shape, dtype=dtype)
        for shape in (
            (tokens, hidden),
            (tokens, chosen),
            (count, 2 * inner if name == "experts" else inner, hidden),
            (count, hidden, inner),
        )
    )
    ids = _fake(tokens, chosen, dtype=torch.int64)
    return plan(name, x, first, down, ids, weights, *limit, configs=configs)[0]


def _relu2_experts(tokens: int, dtype: torch.dtype = BF16, configs: str = "") -> list[Launch]:
    """Nemotron 3 Nano's: six of 128."""
    sizes = (128, 2688, 1856)
    return _experts(tokens, sizes, 6, dtype=dtype, configs=configs, name="relu2_experts")


def write(tokens: int, dtype: torch.dtype = BF16) -> list[Launch]:
    cache, rows = (_fake(*x, 8, 128, dtype=dtype) for x in ((4096, 16), (tokens,)))
    return plan("write_cache", cache, rows, _fake(tokens, dtype=torch.int64), None)[0]


def far_write(pages: int) -> list[Launch]:
    """Into a cache of which more than 2 GB may lie before a row, or not."""
    slots = _fake(16, dtype=torch.int64)
    return plan("write_cache", _fake(pages, 16, 128), _fake(16, 128), slots, None)[0]


def write_for(target: Target) -> Specialisation:
    """A launch's specialisation for a target."""
    with FakeTensorMode():
        return Specialisation.of(write(16)[0], target)


def _write_codes(tokens: int, codes: torch.dtype, dtype: torch.dtype = BF16) -> list[Launch]:
    cache, rows = _fake(4096, 16, 8, 128, dtype=codes), _fake(tokens, 8, 128, dtype=dtype)
    slots, scales = _fake(tokens, dtype=torch.int64), _fake(4096, 16, 8, dtype=FP32)
    return plan("write_cache", cache, rows, slots, scales)[0]


def _rotate(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    codes: torch.dtype | None = None,
) -> list[Launch]:
    """dims: of a key, of the angles, of a value."""
    (count, kv_count), (width, turned, v_width) = heads, dims
    shapes = [(tokens, count, width), (tokens, kv_count, width), (tokens, kv_count, v_width)]
    shapes += [(tokens, turned)] * 2
    rows = [_fake(*shape, dtype=dtype) for shape in shapes]
    pool, slots = (4096, 16, kv_count), _fake(tokens, dtype=torch.int64)
    caches = [_fake(*pool, dim, dtype=codes or dtype) for dim in (width, v_width)]
    scales = [_fake(*pool, dtype=FP32) if codes else None for _ in range(2)]
    return plan("rotate_and_write", *rows, *caches, slots, *scales)[0]


def _norms(tokens: int, width: int, plus_one: bool = False, dtype=BF16) -> list[Launch]:  # type: ignore[no-untyped-def]
    """Of the residual stream, and of a draft's entry."""
    x, weight = _fake(tokens, width, dtype=dtype), _fake(width, dtype=dtype)
    options = (1e-6, plus_one)
    return [
        *plan("rms_norm", x, weight, *options)[0],
        *plan("add_rms_norm", x, x, weight, *options)[0],
        *plan("draft_entry", x, weight, x, weight, *options)[0],
    ]


def _norm_of_parts(tokens: int, joint: int, *shape: int) -> list[Launch]:
    """Of the first so many features of a projection: heads, or a latent beside its rotary part."""
    part = _fake(tokens, joint)[:, : math.prod(shape)].unflatten(1, shape)
    return plan("rms_norm", part, _fake(shape[-1]), 1e-6)[0]


def _elementwise(tokens: int, width: int, heads: int, dims: tuple[int, int]) -> list[Launch]:
    """SwiGLU's activation; rotary angles of heads, of which some features are turned."""
    angles = [_fake(tokens, dims[1]) for _ in range(2)]
    return [
        *plan("silu_and_mul", _fake(tokens, 2 * width))[0],
        *plan("rotate", _fake(tokens, heads, dims[0]), *angles)[0],
    ]


def _skinny(
    rows: int, width: int, features: int, gated: bool = False, dtype: torch.dtype = BF16
) -> list[Launch]:
    """A linear with a bias; one behind a residual sum's norm, with SwiGLU behind it or not."""
    x, weight = _fake(rows, width, dtype=dtype), _fake(features, width, dtype=dtype)
    norm = _fake(width, dtype=dtype)
    return [
        *plan("skinny_linear", x, weight, _fake(features, dtype=dtype))[0],
        *plan("norm_linear", x, x, norm, 1e-6, False, weight, None, gated)[0],
    ]


def _invariant(rows: int, width: int, features: int, dtype: torch.dtype = BF16) -> list[Launch]:
    """A linear with a bias; as many products as there are heads; sums of rows."""
    x, weight = _fake(rows, width, dtype=dtype), _fake(features, width, dtype=dtype)
    parts = _fake(rows, 16, 128, dtype=dtype).transpose(0, 1), _fake(16, 512, 128, dtype=dtype)
    return [
        *plan("batch_invariant_linear", x, weight, _fake(features, dtype=dtype))[0],
        *plan("batch_invariant_linear", *parts, None)[0],
        *plan("row_sum", x)[0],
    ]


def _choose(reqs: int, rows: int, dtype: torch.dtype = BF16) -> list[Launch]:
    """DeepSeek-V3.2: 64 heads of 128, 2,048 of up to 32,768 positions."""
    query = _fake(reqs * rows, 64, 128, dtype=dtype)
    weights, keys = _fake(reqs * rows, 64, dtype=FP32), _fake(4096, 16, 128, dtype=dtype)
    return plan("choose_slots", query, weights, keys, *_indices(reqs, 2048), 2048)[0]


def _slots(
    tokens: int, heads: int, chosen: int, entries: int, dtype: torch.dtype = BF16
) -> list[Launch]:
    """DeepSeek-V4: keys of 512, a window of 128; `chosen` entries, or as many as there are."""
    query, fresh, ring, older = (
        _fake(*shape, 512, dtype=dtype)
        for shape in ((tokens, heads), (tokens,), (9, 130), (9, entries))
    )
    int64, flag = torch.int64, torch.bool
    masks = (_fake(tokens, 130, dtype=flag), _fake(tokens, tokens, dtype=flag))
    listed = _fake(tokens, chosen, dtype=torch.int32) if chosen else None
    slots, counts = (_fake(tokens, dtype=int64) for _ in range(2))
    rows = (query, fresh, ring, slots, *masks, _fake(heads, dtype=dtype))
    return plan("slot_attention", *rows, 0.04, 128, older, counts, listed)[0]


def _delta(
    reqs: int, rows: int, heads: tuple[int, int] = (16, 32), drafts: int = 3, dtype=BF16
) -> list[Launch]:  # type: ignore[no-untyped-def]
    """Qwen3-Next: key and value heads of 128, a convolution over four rows."""
    channels = (2 * heads[0] + heads[1]) * 128
    weights = (_fake(channels, 4, dtype=dtype), _fake(heads[1]), _fake(heads[1]))
    state = _state(reqs, rows, channels + 2 * heads[1], (heads[1], 128, 128), drafts, dtype)
    return plan("gated_delta_rule", state[0], *weights, *state[1:])[0]


def _state(
    reqs: int,
    rows: int,
    fields: int,
    matrices: tuple[int, int, int],
    drafts: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Rows of a recurrence, its state, and its requests."""
    slots, int32 = reqs + 1, torch.int32
    return (
        _fake(reqs * rows, fields, dtype=dtype),
        _fake(slots, *matrices, dtype=FP32),
        _fake(slots, 3 + drafts, fields, dtype=dtype),
        *(_fake(slots, dtype=int32), _fake(reqs, dtype=torch.int64)),
        *(_fake(count, dtype=int32) for count in (reqs, reqs + 1, reqs)),
    )


def _scan(
    reqs: int, rows: int, heads: int = 64, drafts: int = 3, dtype: torch.dtype = BF16
) -> list[Launch]:
    """Nemotron 3: heads of 64, a state of 128 in 8 groups, a convolution over four rows."""
    channels = heads * 64 + 2 * 8 * 128
    convolution = (_fake(channels, 4, dtype=dtype), _fake(channels, dtype=dtype))
    of_heads = (_fake(heads, dtype=dtype) for _ in range(3))
    state = _state(reqs, rows, channels + heads, (heads, 128, 64), drafts, dtype)
    return plan("mamba2_scan", state[0], *convolution, *of_heads, *state[1:], 8)[0]


def _codes(kind: Kind, group: int, *shape: int) -> tuple[torch.Tensor, ...]:
    """Codes and scales of a weight, or of a stack of them."""
    *stack, features, inputs = shape
    tiles, steps = -(-features // 32), inputs // PACKED_INPUTS[kind]
    dtype = torch.float8_e4m3fn if kind == "float8" else torch.uint8
    return (
        _fake(*stack, tiles, steps, 32, 4, dtype=dtype),
        _fake(*stack, tiles, inputs // group, 32),
    )


def _grouped(
    tokens: int, kind: Kind, group: int, shape: tuple[int, int], dtype: torch.dtype = BF16
) -> list[Launch]:
    x = _fake(tokens, shape[1], dtype=dtype)
    return plan("grouped_linear", x, *_codes(kind, group, *shape), None, shape[0])[0]


def _grouped_experts(
    tokens: int,
    kind: Kind,
    groups: tuple[int, int],
    sizes: tuple[int, int, int],
    picks: int = 8,
    dtype: torch.dtype = BF16,
) -> list[Launch]:
    """(experts, hidden, inner) = `sizes`; groups of the way up and of the way down."""
    experts, hidden, inner = sizes
    wide = _codes(kind, groups[0], experts, 2 * inner, hidden)
    narrow = _codes(kind, groups[1], experts, hidden, inner)
    ids, shares = _fake(tokens, picks, dtype=torch.int64), _fake(tokens, picks, dtype=dtype)
    x = _fake(tokens, hidden, dtype=dtype)
    return plan("grouped_experts", x, *wide, None, *narrow, None, ids, shares)[0]


def _biased_experts(tokens: int, dtype: torch.dtype = BF16) -> list[Launch]:
    """gpt-oss-120b's: four of 128 experts of 2,880 features of 2,880, MXFP4 as codes of 8 bits."""
    count, width, inner = 128, 2880, 2880
    wide = _codes("int8", 32, count, 2 * inner, width)
    narrow = _codes("int8", 32, count, width, inner)
    biases = _fake(count, 2 * inner), _fake(count, width)
    x, ids = _fake(tokens, width, dtype=dtype), _fake(tokens, 4, dtype=torch.int64)
    weights = (*wide, biases[0], *narrow, biases[1])
    shares = _fake(tokens, 4, dtype=dtype)
    return plan("grouped_biased_experts", x, *weights, ids, shares, 7.0, 1.702)[0]


def _sinkhorn(tokens: int, streams: int) -> list[Launch]:
    return plan("sinkhorn", _fake(tokens, streams, streams, dtype=torch.float32), 20, 1e-6)[0]


def _sample(
    tokens: int,
    vocab: int,
    with_mask: bool = False,
    dtype: torch.dtype = BF16,
    rows_each: int = 1,
) -> list[Launch]:
    """Bias of up to 256 tokens, 8 stop tokens; `rows_each` a request."""
    int64, float64, words = torch.int64, torch.float64, -(-vocab // 32)
    rows = [_fake(count, dtype=int64) for count in (tokens, tokens, tokens // rows_each)]
    numbers = (_fake(65, 6, dtype=float64), _fake(65, 6, dtype=int64))
    bias = (_fake(65, 256, dtype=int64), _fake(65, 256, dtype=float64))
    known = [_fake(65, width, dtype=torch.int32) for width in (words, words, vocab)]
    mask = _fake(tokens, words, dtype=torch.int32) if with_mask else None
    stops = _fake(65, 8, dtype=int64)
    logits = _fake(tokens, vocab, dtype=dtype)
    return plan("sample", logits, *rows, *numbers, *bias, *known, stops, mask)[0]


def _accept(reqs: int, rows: int, is_prompt: bool = False) -> list[Launch]:
    """Acceptance of all rows, eight stop tokens a request; or that of a prefill step."""
    int32, int64, flag = torch.int32, torch.int64, torch.bool
    choices = (_fake(reqs * rows, dtype=int64), _fake(reqs * rows, dtype=flag))
    lengths = (_fake(reqs + 1, dtype=int32), _fake(reqs, dtype=int32), _fake(reqs, dtype=flag))
    limits = (_fake(65, dtype=int32), _fake(65, 8, dtype=int64), _fake(reqs, dtype=int64))
    prompts = [_fake(reqs, dtype=flag) for _ in range(2 * is_prompt)]
    ids = _fake(reqs * rows, dtype=int64)
    reports = (_fake(reqs, rows, dtype=int64), *(_fake(reqs, dtype=int32) for _ in range(3)))
    return plan("accept", *reports, *choices, ids, *lengths, *limits, *prompts)[0]


def _record(reqs: int, rows: int, vocab: int, dtype: torch.dtype = BF16) -> list[Launch]:
    """The 20 most probable tokens of each row."""
    ids, emitted = _fake(reqs, rows, dtype=torch.int64), _fake(reqs, dtype=torch.int32)
    slots, counts = _fake(reqs, dtype=torch.int64), _fake(65, vocab, dtype=torch.int32)
    own = _fake(reqs, rows, dtype=torch.float64)
    top = [_fake(reqs, rows, 20, dtype=dtype) for dtype in (torch.int64, torch.float64)]
    ints = _fake(65, 6, dtype=torch.int64)
    logits = _fake(reqs * rows, vocab, dtype=dtype)
    counted = plan("count_tokens", counts, ids, emitted, slots)[0]
    return [
        *counted,
        *plan("write_logprobs", own, *top, logits, ids, emitted, slots, ints)[0],
    ]


def _exchange(
    name: str, tokens: int, width: int, ranks: int, dtype: torch.dtype = BF16
) -> list[Launch]:
    """A sum or a gather of ranks that share memory."""
    own, addresses = _fake(bytes_of(ranks), dtype=torch.uint8), _fake(ranks, dtype=torch.int64)
    PEERS["shipped"] = PeerMemory(0, own, addresses)
    sizes = (ranks,) if name == "gather_ranks" else ()
    return plan(name, _fake(tokens, width, dtype=dtype), *sizes, "shipped", None)[0]


SHIPPED: dict[str, Callable[[], list[Launch]]] = {
    "GLM-4.5 (96/8 heads of 128), 1 x 5 rows": lambda: gqa(1, 5, (96, 8), (128, 128)),
    "GLM-4.5, 1 x 5 rows, float16": lambda: gqa(1, 5, (96, 8), (128, 128), FP16),
    "GLM-4.5, prompt of 512": lambda: gqa(1, 512, (96, 8), (128, 128)),
    "MiMo-7B (32/8 heads of 128), 64 x 1 rows": lambda: gqa(64, 1, (32, 8), (128, 128)),
    "MiMo-V2 (64/4 heads of 192, 128), 4 x 5 rows": lambda: gqa(4, 5, (64, 4), (192, 128)),
    "window, cap and sinks, 4 x 5 rows, float16": lambda: _gqa_with_sinks(4, 5, FP16, 30.0),
    "gpt-oss's window and sinks, 1 x 5 rows": lambda: _gqa_with_sinks(1, 5),
    "gpt-oss's window and sinks, prompt of 512": lambda: _gqa_with_sinks(1, 512),
    "int8 keys and values of GLM-4.5, 1 x 5 rows": lambda: gqa(
        1, 5, (96, 8), (128, 128), codes=INT8
    ),
    "fp8 keys and values of GLM-4.5, prompt of 512, float16": lambda: gqa(
        1, 512, (96, 8), (128, 128), FP16, codes=FP8
    ),
    "fp8 keys and values of MiMo-7B, 64 x 1 rows": lambda: gqa(
        64, 1, (32, 8), (128, 128), codes=FP8
    ),
    "int8 keys and values of MiMo-V2, 4 x 5 rows, float16": lambda: gqa(
        4, 5, (64, 4), (192, 128), FP16, codes=INT8
    ),
    "batch-invariant attention to fp8 of GLM-4.5, prompt of 512": lambda: gqa(
        1, 512, (96, 8), (128, 128), configs=BATCH_INVARIANT, codes=FP8
    ),
    "DeepSeek-V3, 1 x 5 rows, float16": lambda: mla(1, 5, FP16),
    "DeepSeek-V3, 64 x 1 rows": lambda: mla(64, 1),
    "aiter's lists of 64 x 32,768 tokens": lambda: [
        list_plan(*_indices(64, 2048)[:2], 16, BEHIND)[0]
    ],
    "DeepSeek-V3 experts, 5 rows": lambda: _experts(5, (256, 7168, 2048)),
    "GLM-4.5-Air experts, 5 rows, float32": lambda: _experts(5, (128, 4096, 1408), dtype=FP32),
    "GLM-4.5-Air experts, 64 rows": lambda: _experts(64, (128, 4096, 1408)),
    "GLM-4.5-Air experts, prompt of 1024": lambda: _experts(1024, (128, 4096, 1408)),
    "GLM-4.5-Air experts, prompt of 2048": lambda: _experts(2048, (128, 4096, 1408)),
    "Step-3.7's bounded experts, 5 rows, float16": lambda: _experts(
        5, (288, 4096, 1280), 8, 7.0, dtype=FP16
    ),
    "DeepSeek-V4's bounded experts, 64 rows": lambda: _experts(
        64, (256, 4096, 2048), 6, 10.0, True
    ),
    "Qwen3-Next's state, 1 x 5 rows, float16": lambda: _delta(1, 5, drafts=4, dtype=FP16),
    "Qwen3-Next's state, 64 x 1 rows without drafts": lambda: _delta(64, 1, drafts=0),
    "Qwen3-Next's state, prompt of 512": lambda: _delta(1, 512),
    "Qwen3.5's state (48 heads), float32": lambda: _delta(4, 4, (16, 48), dtype=torch.float32),
    "Nemotron 3 Nano's state, 1 x 5 rows": lambda: _scan(1, 5, drafts=4),
    "Nemotron 3 Nano's state, 64 x 1 rows without drafts, float16": lambda: _scan(
        64, 1, drafts=0, dtype=FP16
    ),
    "Nemotron 3 Nano's state, prompt of 512": lambda: _scan(1, 512),
    "Nemotron 3 Nano's state, 8 prompts of 256 without drafts, float16": lambda: _scan(
        8, 256, drafts=0, dtype=FP16
    ),
    "Nemotron 3 Super's state (128 heads), 4 x 4 rows, float32": lambda: _scan(
        4, 4, 128, dtype=FP32
    ),
    "Nemotron 3 Super's state (128 heads), prompt of 512, float32": lambda: _scan(
        1, 512, 128, dtype=FP32
    ),
    "Nemotron 3 Nano's experts, 5 rows": lambda: _relu2_experts(5),
    "Nemotron 3 Nano's experts, prompt of 1024, float16": lambda: _relu2_experts(1024, FP16),
    "Nemotron 3 Nano's experts, 5 rows, float32": lambda: _relu2_experts(5, FP32),
    "batch-invariant experts of Nemotron 3 Nano, 4 rows": lambda: _relu2_experts(
        4, configs=BATCH_INVARIANT
    ),
    "int8 head of GLM-4.5, 1 row": lambda: _grouped(1, "int8", 4096, (151_552, 4096)),
    "int8 head of GLM-4.5, 5 rows, float16": lambda: _grouped(
        5, "int8", 4096, (151_552, 4096), FP16
    ),
    "int8 projection, 64 rows": lambda: _grouped(64, "int8", 8192, (4096, 8192)),
    "int8 experts of GLM-4.5-Air, 1 row, float16": lambda: _grouped_experts(
        1, "int8", (4096, 1408), (128, 4096, 1408), dtype=FP16
    ),
    "int8 experts of DeepSeek-V3, 64 rows": lambda: _grouped_experts(
        64, "int8", (7168, 2048), (256, 7168, 2048)
    ),
    "gpt-oss's experts, 4 rows": lambda: _biased_experts(4),
    "gpt-oss's experts, prompt of 1024, float16": lambda: _biased_experts(1024, FP16),
    "int4 projection in groups of 32, 4 rows": lambda: _grouped(4, "int4", 32, (4096, 4096)),
    "int4 projection in groups of 128, 64 rows, float16": lambda: _grouped(
        64, "int4", 128, (4096, 4096), FP16
    ),
    "DeepSeek-V3's float8 projection, 4 rows": lambda: _grouped(4, "float8", 128, (7168, 2048)),
    "DeepSeek-V3's float8 experts, 5 rows": lambda: _grouped_experts(
        5, "float8", (128, 128), (256, 7168, 2048)
    ),
    "DeepSeek-V4's MXFP4 experts as bytes, 5 rows": lambda: _grouped_experts(
        5, "int8", (32, 32), (256, 4096, 2048), 6
    ),
    "DeepSeek-V4's MXFP4 experts as bytes, 64 rows, float16": lambda: _grouped_experts(
        64, "int8", (32, 32), (256, 4096, 2048), 6, FP16
    ),
    "int4 experts of GLM-4.5-Air, 64 rows": lambda: _grouped_experts(
        64, "int4", (32, 32), (128, 4096, 1408)
    ),
    "DeepSeek-V3.2's indexer, 4 x 5 rows": lambda: _choose(4, 5),
    "the indexer in float16, 1 x 5 rows": lambda: _choose(1, 5, FP16),
    "DeepSeek-V4's attention to chosen entries, 4 rows": lambda: _slots(4, 64, 512, 8192),
    "DeepSeek-V4's attention to all entries, prompt of 512, float16": lambda: _slots(
        512, 128, 0, 1024, FP16
    ),
    "acceptance, 1 x 5 rows": lambda: _accept(1, 5),
    "acceptance, 64 x 1 rows": lambda: _accept(64, 1),
    "acceptance beside prompts, 4 x 4 rows": lambda: _accept(4, 4, True),
    "DeepSeek-V3's router, 4 rows": lambda: plan("group_topk", _fake(4, 256, dtype=FP32), 8, 8, 4)[
        0
    ],
    "the widest router in groups, 64 rows": lambda: plan(
        "group_topk", _fake(64, 1024, dtype=FP32), 16, 8, 4
    )[0],
    "GLM-4.5-Air's router, 5 rows": lambda: plan("topk", _fake(5, 128, dtype=FP32), 8)[0],
    "the widest router, prompt of 512, float16": lambda: plan(
        "topk", _fake(512, 1024, dtype=FP16), 16
    )[0],
    "the largest of GLM-4.5's logits, 5 rows": lambda: plan("row_max", _fake(5, 151_552))[0],
    "the largest of float32 logits, 64 rows": lambda: plan("row_max", _fake(64, 8192, dtype=FP32))[
        0
    ],
    "four streams, 16 rows": lambda: _sinkhorn(16, 4),
    "choice among GLM-4.5's tokens, 1 x 5 rows, float16": lambda: _sample(
        5, 151_552, dtype=FP16, rows_each=5
    ),
    "choice by float32 logits, 16 rows": lambda: _sample(16, 32_768, dtype=torch.float32),
    "DeepSeek-V3's sum of 8 ranks, 4 rows": lambda: _exchange("sum_ranks", 4, 7168, 8),
    "a sum of 3 ranks in float32": lambda: _exchange("sum_ranks", 1, 4097, 3, FP32),
    "largest logits and ids of 8 ranks, 4 rows": lambda: _exchange(
        "gather_ranks", 2, 4, 8, torch.float64
    ),
    "choice among masked tokens, 64 rows": lambda: _sample(64, 129_280, True),
    "counts and log-probabilities, 4 x 5 rows": lambda: _record(4, 5, 151_552),
    "the same of float16": lambda: _record(4, 5, 151_552, FP16),
    "DeepSeek-V3's norms (7168), 4 rows": lambda: _norms(4, 7168),
    "DeepSeek-V3's norms, 5 rows, float16": lambda: _norms(5, 7168, dtype=FP16),
    "Qwen3-Next's norms (2048, 1 + weight), 64 rows": lambda: _norms(64, 2048, True),
    "the widest norms, float32": lambda: _norms(1, 16_384, dtype=torch.float32),
    "GLM-4.5's norm of heads, prompt of 512": lambda: _norm_of_parts(512, 14_336, 96, 128),
    "DeepSeek-V3's norm of latents, 4 rows": lambda: _norm_of_parts(4, 576, 512),
    "a joint projection of the 8B shape, 1 row": lambda: _skinny(1, 4096, 6144),
    "gate and up of the 8B shape, 4 rows": lambda: _skinny(4, 4096, 2 * 13_696, True),
    "a down projection of the 8B shape, 2 rows, float16": lambda: _skinny(
        2, 13_696, 4096, dtype=FP16
    ),
    "batch-invariant projection of the 8B shape, 1 row": lambda: _invariant(1, 4096, 6144),
    "batch-invariant gate and up of the 8B shape, prompt of 512": lambda: _invariant(
        512, 4096, 2 * 13_696
    ),
    "batch-invariant down projection of the 0.5B shape, float16": lambda: _invariant(
        17, 4864, 896, FP16
    ),
    "batch-invariant router of DeepSeek-V3, float32": lambda: _invariant(4, 7168, 256, FP32),
    "batch-invariant attention of GLM-4.5, prompt of 512": lambda: gqa(
        1, 512, (96, 8), (128, 128), configs=BATCH_INVARIANT
    ),
    "batch-invariant attention of MiMo-V2, 4 x 1 rows": lambda: gqa(
        4, 1, (64, 4), (192, 128), configs=BATCH_INVARIANT
    ),
    "batch-invariant attention of DeepSeek-V3, 64 x 1 rows": lambda: mla(
        64, 1, configs=BATCH_INVARIANT
    ),
    "batch-invariant experts of GLM-4.5-Air, 4 rows": lambda: _experts(
        4, (128, 4096, 1408), configs=BATCH_INVARIANT
    ),
    "GLM-4.5's activation and rotary of half a head, 4 rows": lambda: _elementwise(
        4, 12_288, 96, (128, 64)
    ),
    "cache write, 16 rows": lambda: write(16),
    "cache write, 5 rows, float16": lambda: write(5, FP16),
    "write of int8, 16 rows": lambda: _write_codes(16, INT8),
    "write of fp8, 5 rows, float32": lambda: _write_codes(5, FP8, FP32),
    "GLM-4.5's rotary of half a head into fp8, 5 rows": lambda: _rotate(
        5, (96, 8), (128, 64, 128), codes=FP8
    ),
    "MiMo-V2's rotary of a third into int8, prompt of 512, float16": lambda: _rotate(
        512, (64, 4), (192, 64, 128), FP16, INT8
    ),
    "GLM-4.5's rotary of half a head, 5 rows, float16": lambda: _rotate(
        5, (96, 8), (128, 64, 128), FP16
    ),
    "MiMo-V2's rotary of a third, 16 rows": lambda: _rotate(16, (64, 4), (192, 64, 128)),
    "MiMo-7B's rotary, prompt of 512": lambda: _rotate(512, (32, 8), (128, 128, 128)),
}


def kernel_choices() -> dict[str, Choice]:
    """The kernels that have several configurations, by name."""
    launches = [launch for shipped in SHIPPED.values() for launch in shipped()]
    return {launch.name: launch.choice for launch in launches if launch.choice.changes}
