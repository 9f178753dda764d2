"""How long chunks of prompts are, and how many requests share a step, unless it is said."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.plans import of_backend, plan_of


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [({}, 64), ({"prefill_chunk": 16}, 16), ({"prefill_chunk": 512}, 64),
     ({"prefill_chunk": 512, "busy_prefill_chunk": 128}, 128)],
)  # fmt: skip
def test_how_long_a_busy_chunk_is(chunks: dict[str, int], tokens: int) -> None:
    assert plan_of(**chunks).busy_prefill_chunk == tokens


@pytest.mark.parametrize(
    ("options", "stored", "tokens"),
    [
        ({}, "bfloat16", 512),
        ({"backend": "cpu", "dtype": "bfloat16"}, "float32", 512),
        ({"dtype": "float32"}, "bfloat16", 64),
        ({}, "float16", 64),
        ({}, None, 64),
        ({"backend": "eager"}, "bfloat16", 64),
        ({"disabled_passes": ("skip-idle-rows",)}, "bfloat16", 64),
        ({"prefill_chunk": 32}, "bfloat16", 32),
    ],
)
def test_chunks_are_large_where_steps_cost_what_their_tokens_do(
    options: dict[str, Any], stored: str | None, tokens: int
) -> None:
    settled = of_backend(stored=stored or "", **options)
    assert settled.prefill_chunk == tokens
    assert settled.busy_prefill_chunk == min(tokens, 64)
    rows, each = settled.prefill_shape
    assert rows * each == tokens


@pytest.mark.parametrize(
    ("options", "tokens", "busy"),
    [
        ({}, 512, 512),
        ({"prefill_chunk": 256}, 256, 256),
        ({"busy_prefill_chunk": 64}, 512, 64),
        ({"dtype": "float32"}, 512, 512),
    ],
)
def test_a_gpu_computes_prompts_in_large_chunks(
    options: dict[str, Any], tokens: int, busy: int
) -> None:
    """All rows of a step are computed there, whoever waits."""
    settled = of_backend("cuda", "bfloat16", **options)
    assert (settled.prefill_chunk, settled.busy_prefill_chunk) == (tokens, busy)


@pytest.mark.parametrize(
    ("buckets", "rows"), [((1,), 8), ((1, 2, 4, 8), 8), ((3,), 8), ((16,), 16), ((24,), 32)]
)
def test_one_prefill_step_serves_small_programs(buckets: tuple[int, ...], rows: int) -> None:
    """Where rows that are not used cost nothing; elsewhere each program has its own."""
    skips, all_run = (
        of_backend(batch_buckets=buckets, dtype=dtype) for dtype in ("bfloat16", "float32")
    )
    assert skips.prefill_shape == (rows, 512 // rows)
    assert all_run.prefill_shape[0] == plan_of(batch_buckets=buckets).prefill_shape[0]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (8, 8)),
        ({"batch_buckets": (1, 3), "prefill_chunk": 8}, (4, 2)),
        ({"batch_buckets": (1,)}, (1, 64)),
        ({"batch_buckets": (5,), "prefill_chunk": 7, "spec_tokens": 0}, (7, 1)),
        ({"batch_buckets": (5,), "prefill_chunk": 24, "spec_tokens": 1}, (6, 4)),
        ({"batch_buckets": (8,), "prefill_chunk": 67}, (1, 67)),
        ({"batch_buckets": (64,), "spec_tokens": 3}, (16, 4)),
        ({"batch_buckets": (20,), "prefill_chunk": 15}, (5, 3)),
        ({"prefill_rows": 16}, (16, 4)),
        ({"prefill_rows": 1}, (1, 64)),
    ],
)
def test_how_many_requests_share_a_step(options: dict[str, Any], shape: tuple[int, int]) -> None:
    """Unless it is said: a row for each of the largest bucket, if all of it could decode in there;
    and a divisor, not much larger than that."""
    assert plan_of(**options).prefill_shape == shape
