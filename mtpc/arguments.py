"""Types of keyword arguments, so that type checkers find a misspelt name or a wrong type.

A test compares the names with the fields of `CompileOptions` and `SamplingParams`, which say what
each means. Their checks also run without a type checker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class CompileArguments(TypedDict, total=False):
    """Keyword arguments of `mtpc.compile`: see `mtpc.CompileOptions`."""

    spec_tokens: int | Literal["auto"]
    num_speculative_tokens: int | Literal["auto"]
    spec_tiers: Iterable[int]
    row_budgets: int | Iterable[int]
    batch_buckets: int | Iterable[int]
    max_len: int | None
    page_size: int
    num_pages: int | None
    prefill_chunk: int | None
    busy_prefill_chunk: int | None
    prefill_rows: int | None
    prefix_caching: bool
    snapshot_bytes: int
    snapshot_distance: int
    kv_offload_dir: str | Path | None
    kv_offload_bytes: int
    async_scheduling: bool | None
    batch_invariant: bool
    backend: str
    dtype: str | None
    kv_cache_dtype: str
    quantize: str | None
    tensor_parallel_size: int
    synthetic_acceptance_rates: Sequence[float]
    synthetic_acceptance_length: float | str | None
    sampling: bool
    max_logprobs: int
    token_mask: bool | None
    images: bool
    hidden_state_layers: Iterable[int]
    verify_passes: bool
    strict: bool
    disabled_passes: Iterable[str]
    enabled_passes: Iterable[str]
    draft_vocab: int | Iterable[int]
    draft: str | Path | None
    wiring: Mapping[str, str | bool] | Iterable[tuple[str, str | bool]]
    cache_dir: str | Path | None
    use_cache: bool
    build_in_background: bool
    frozen: bool
    require_sha256: str | None


class SamplingArguments(TypedDict, total=False):
    """Keyword arguments of `generate` that are fields of `mtpc.SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    logprobs: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...]
    allowed_ids: Iterable[int] | None
    banned_ids: Iterable[int]
    min_tokens: int
    stop_token_ids: Iterable[int]
