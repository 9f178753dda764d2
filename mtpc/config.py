"""Options of `mtpc.compile` and their checks. Only this module reads environment variables."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtpc.acceptance import settle
from mtpc.errors import OptionError
from mtpc.option_checks import (
    check_buckets,
    check_directory,
    check_draft_vocab,
    check_int,
    check_names,
    check_scheme,
    check_tiers,
    settle_token_mask,
    unknown_option,
)
from mtpc.wiring import Rules, check_rules

MAX_SPEC_TOKENS = 16
"""The largest number of drafts per step. In published measurements no draft that deep is accepted,
and every draft costs a full pass of the draft layer."""

AUTO, AUTO_TIERS = "auto", (0, 1, 2, 3)
"""The value of `spec_tokens` with which the engine chooses K, and its default of `spec_tiers`."""
COPY = "copy"
"""The value of `draft` with which drafts are copies of a request's own text."""
DEFAULT_MAX_LEN = 4096
LEAST_ROWS = 8
"""The least number of rows of a prefill step if kernels skip unused rows. All programs of up to so
many requests then share one prefill step."""
SHARING_PROMPTS = 4
"""A prefill step may have this many rows even if fewer requests could decode in it."""
DEFAULT_PREFILL_CHUNK = 64
"""Tokens of a prefill step if unused tokens cost as much as used ones; and prompt tokens of a
prefill step that decoding requests join."""
LARGE_PREFILL_CHUNK = 512
"""Tokens of a prefill step if kernels skip unused tokens; larger steps gain nothing
(docs/performance.md). Also on GPUs, where smaller steps are bound by reading the weights."""
DEFAULT_SNAPSHOT_BYTES = 1 << 30
"""13 snapshots of Qwen3-Next-80B, whose recurrent state is the largest of the released models."""
DEFAULT_OFFLOAD_BYTES = 4 << 30
"""The pages of 340,000 tokens of a 0.5B model, or of 30,000 tokens of an 8B model."""
SKIP_IDLE_ROWS = "skip-idle-rows"
"""The name of the pass on which the default of `prefill_chunk` depends. It is defined here, because
this module must not import the passes, which import torch."""
DTYPES = ("bfloat16", "float16", "float32", "float64")

KV_CACHE_DTYPES = ("auto", "int8", "fp8")
"""Values of `kv_cache_dtype`; `mtpc.models.caches` defines them."""

_ONE_RANK_ONLY = ("kv_offload_dir", "build_in_background")
"""Options that `tensor_parallel_size` > 1 refuses."""
ALIASES = {"num_speculative_tokens": "spec_tokens"}


@dataclass(frozen=True)
class CompileOptions:
    """Options of `mtpc.compile`.

    Attributes:
        spec_tokens: K, the number of drafts per step; 0 is plain decoding, and the default of
            models that have neither MTP layers nor another drafter. "auto" compiles steps
            for each K in `spec_tiers`. The engine then chooses K as it runs, from the times of the
            steps and the accepted drafts, and this field holds the largest K.
        spec_tiers: with "auto", the values of K to choose from; () is 0 to 3.
        batch_buckets: numbers of requests to capture steps for, ascending. A batch is padded to the
            smallest bucket that holds it.
        max_len: longest sequence (prompt and new tokens), in tokens. None is 4096, or the model's
            limit if that is smaller: its max_position_embeddings, or what rope_scaling gives.
        page_size: tokens per KV page.
        num_pages: pages in the KV pool. None is enough for the largest bucket at max_len.
        prefill_chunk: tokens of one prefill step: those of one prompt or several, and K + 1 for
            each request that decodes in it. None is 512 on GPUs, and if kernels skip unused rows
            (cpu, bfloat16), because short prompts then cost no more; otherwise 64.
        busy_prefill_chunk: the largest number of prompt tokens in a prefill step while other
            requests decode. None is `prefill_chunk` on GPUs, elsewhere `prefill_chunk` but at most
            64. A smaller number makes these steps shorter if kernels skip unused rows (cpu,
            bfloat16).
        prefill_rows: requests that may share one prefill step, prompts and decoding requests
            together; a divisor of `prefill_chunk`. With 1, prompts run one by one, and decoding
            waits for each chunk. None chooses a divisor: enough for the largest bucket if each
            request can have K + 1 tokens, but less than twice as many; otherwise fewer, if possible
            four. If kernels skip unused rows, it counts the largest bucket as at least 8, so that
            programs with small buckets share one prefill step.
        prefix_caching: reuse KV pages, and snapshots of state that is not in pages, of prompts and
            outputs that begin with the same tokens; see docs/engine.md.
        snapshot_bytes: the most bytes of snapshots. Only models with state outside of pages take
            them: recurrent state, rings of sliding windows, compressed entries.
        snapshot_distance: tokens from one snapshot of a long prompt to the next. It is rounded up
            to whole pages.
        kv_offload_dir: directory for pages and snapshots that are evicted, and for all of them when
            the model is closed (`SpecModel.close`); requests of later processes take them over.
            None keeps nothing. See docs/engine.md.
        kv_offload_bytes: the most bytes of files in `kv_offload_dir`.
        async_scheduling: launch a step before the results of the step before it are read, so that a
            GPU does not wait for the host. The text is the same and arrives one step later. It
            gains nothing on a cpu, where the launch does the work itself. None is True on one GPU
            without `kv_offload_dir`, if the model keeps all of its past in pages, else False.
        batch_invariant: on GPUs, text that does not depend on K, batch or chunk; see docs/gpu.md.
        backend: "cpu", "cuda" (NVIDIA and AMD GPUs), "eager", "null" or "auto". "auto" is cuda for
            a model object on a GPU, else cpu. If no C++ compiler works, it falls back from cpu to
            eager, which the stats show and `strict` forbids.
        dtype: dtype of the weights of a directory ("bfloat16", "float32", ...); None keeps the
            checkpoint's. A model object keeps its own.
        kv_cache_dtype: what pages of K and V hold: "auto", the model's dtype; or codes of one byte
            with a scale for each token and head, "int8" or "fp8" (e4m3). Latents, rings of sliding
            windows, recurrent state and compressed entries keep their dtype. See docs/engine.md.
        quantize: a scheme that quantises the weights of linear layers and experts as they are
            loaded: "int4-g32", "int4-g128", "int8" or "fp8". Weights that the checkpoint stores
            quantised stay as they are, and so do embeddings, routers and the projections that join
            embedding and features in MTP layers. See docs/quantised.md.
        tensor_parallel_size: how many ranks share the model, each with its part of the weights and
            of the KV cache; on the backends "cpu", "cuda" and "eager". Every rank of a
            torch.distributed process group compiles; rank 0 generates, and the others follow it
            (`SpecModel.follow`). Commands start their ranks themselves. See docs/scale.md.
        synthetic_acceptance_rates: accept drafts at these rates, whatever the drafts are, to
            measure the speed of K at a given acceptance. Entry i is the share of steps that accept
            draft i and all before it, as in vLLM. The text is then not the model's; the stats say
            "synthetic". () is off. `SpecModel.set_synthetic_acceptance` changes them later.
        synthetic_acceptance_length: the same as a mean number of tokens per step, 1..K + 1, or a
            name of `mtpc.acceptance.GOLDEN_LENGTHS`. This field becomes the rates above.
        sampling: compile sampling: temperature, filters, penalties, masks and log-probabilities.
            False compiles greedy decoding only.
        max_logprobs: with `sampling`, the largest number of most probable tokens that a request may
            have reported, 1..64.
        token_mask: with `sampling`, a mask for each token to choose (`batch.token_mask`), which
            grammars need. None is `sampling`, but False with synthetic acceptance.
        images: compile for prompts with images, of models with a vision tower; see docs/models.md.
        verify_passes: verify values on fake tensors after every pass, not only after the last.
        strict: raise an error for every fallback instead of counting it in the stats.
        disabled_passes: names of optional passes to leave out.
        enabled_passes: names of passes to run that are off by default.
        draft_vocab: token ids that drafts may be, or a number n for the n lowest ids, which
            tokenizers usually give to the most frequent tokens; () is all. See the pass
            trim-draft-head.
        draft: checkpoint of a drafter that replaces the model's own MTP layers: an EAGLE-3 head,
            Gemma 4's assistant, or MTP layers of the target's family. "copy" needs no checkpoint:
            what follows the end of a text where it occurred earlier. See docs/models.md.
        wiring: rules of the MTP layers that replace those of the model's family, as
            {"first_features": "before"}; see `mtpc.wiring.WiringRules`. `mtpc check` measures them.
        cache_dir: directory of the graph cache. None is `MTPC_CACHE_DIR` or, if it is not set,
            `mtpc` in the user's cache directory. See docs/cache.md.
        use_cache: whether to look up steps in the cache and to keep built ones there.
        build_in_background: start as soon as the steps of one K are ready: K = 0, or with "auto"
            the smallest K. Another process builds the other steps, and the engine uses each K once
            its steps are ready.
        frozen: build nothing; a step that is not in the cache is an error.
        require_sha256: digest of the cache entries to load, as `mtpc build` prints it. Others are
            refused before any of their code is opened. Implies `frozen`.

    Raises:
        OptionError: a value is of the wrong type or out of range, or options contradict each other.
    """

    spec_tokens: int = 3
    spec_tiers: tuple[int, ...] = ()
    batch_buckets: tuple[int, ...] = (1, 2, 4, 8)
    max_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int | None = None
    busy_prefill_chunk: int | None = None
    prefill_rows: int | None = None
    prefix_caching: bool = True
    snapshot_bytes: int = DEFAULT_SNAPSHOT_BYTES
    snapshot_distance: int = 1024
    kv_offload_dir: Path | None = None
    kv_offload_bytes: int = DEFAULT_OFFLOAD_BYTES
    async_scheduling: bool | None = None
    batch_invariant: bool = False
    backend: str = "auto"
    dtype: str | None = None
    kv_cache_dtype: str = KV_CACHE_DTYPES[0]
    quantize: str | None = None
    tensor_parallel_size: int = 1
    synthetic_acceptance_rates: tuple[float, ...] = ()
    synthetic_acceptance_length: float | str | None = None
    sampling: bool = True
    max_logprobs: int = 20
    token_mask: bool | None = None
    images: bool = False
    verify_passes: bool = False
    strict: bool = False
    disabled_passes: tuple[str, ...] = ()
    enabled_passes: tuple[str, ...] = ()
    draft_vocab: tuple[int, ...] = ()
    draft: Path | str | None = None
    wiring: Rules = ()
    cache_dir: Path | None = None
    use_cache: bool = True
    build_in_background: bool = False
    frozen: bool = False
    require_sha256: str | None = None

    def __post_init__(self) -> None:
        self._check_switches()
        self._settle_tiers()
        self._settle_acceptance()
        for name, low in (("max_len", 2), ("prefill_chunk", 1), ("num_pages", 2)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low)
        check_int("page_size", self.page_size, low=1, high=4096)
        check_int("max_logprobs", self.max_logprobs, low=1, high=64)
        if self.images and self.draft is not None:
            raise OptionError("images is True, and draft is set; expected one of them alone")
        check_int("snapshot_bytes", self.snapshot_bytes, low=0)
        check_int("snapshot_distance", self.snapshot_distance, low=1)
        check_int("kv_offload_bytes", self.kv_offload_bytes, low=1)
        if self.kv_offload_dir is not None and (self.async_scheduling or not self.prefix_caching):
            raise OptionError(
                "kv_offload_dir needs prefix_caching=True, which finds pages again, and "
                "async_scheduling=False, because it indexes pages before they are filled"
            )
        if not isinstance(self.backend, str):
            raise OptionError(f"backend is {self.backend!r}; expected a name, as 'cpu'")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise OptionError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; expected one of "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
        if self.quantize is not None:
            check_scheme("quantize", self.quantize)
        for name in ("disabled_passes", "enabled_passes"):
            object.__setattr__(self, name, check_names(name, getattr(self, name)))
        object.__setattr__(self, "batch_buckets", check_buckets(self.batch_buckets))
        object.__setattr__(self, "draft_vocab", check_draft_vocab(self.draft_vocab))
        object.__setattr__(self, "wiring", check_rules(self.wiring))
        if self.busy_prefill_chunk is not None:
            check_int("busy_prefill_chunk", self.busy_prefill_chunk, 1, self.prefill_tokens)
        self._check_prefill_rows()
        self._check_cache()
        self._check_ranks()

    def _check_switches(self) -> None:
        """Refuse other values than True and False, because a string such as "no" is truthy."""
        switches = [field.name for field in fields(self) if isinstance(field.default, bool)]
        if self.async_scheduling is not None:
            switches.append("async_scheduling")
        for name in switches:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"{name} is {value!r}; expected True or False")

    def _settle_tiers(self) -> None:
        """Set `spec_tokens` to a number, which is the largest tier with "auto"."""
        is_auto = self.spec_tokens == AUTO
        given = AUTO_TIERS if is_auto and self.spec_tiers in ((), []) else self.spec_tiers
        tiers = check_tiers(given, 2 if is_auto else 0, MAX_SPEC_TOKENS)
        object.__setattr__(self, "spec_tiers", tiers)
        if is_auto:
            object.__setattr__(self, "spec_tokens", max(tiers))
        check_int("spec_tokens", self.spec_tokens, low=0, high=MAX_SPEC_TOKENS)
        if tiers and max(tiers) != self.spec_tokens:
            raise OptionError(
                f"spec_tiers is {tiers!r} with spec_tokens {self.spec_tokens}; expected "
                f"spec_tokens={AUTO!r}, which chooses among the tiers"
            )

    def _settle_acceptance(self) -> None:
        """Turn a synthetic acceptance length into rates, and settle `token_mask`."""
        length = self.synthetic_acceptance_length
        rates = settle(self.spec_tokens, self.synthetic_acceptance_rates, length)
        object.__setattr__(self, "synthetic_acceptance_rates", rates)
        object.__setattr__(self, "synthetic_acceptance_length", None)
        mask = settle_token_mask(self.token_mask, self.sampling, bool(rates))
        object.__setattr__(self, "token_mask", mask)

    @property
    def drafter(self) -> Path | None:
        """The checkpoint of `draft`, where there are drafts."""
        return self.draft if self.spec_tokens and isinstance(self.draft, Path) else None

    @property
    def copies(self) -> bool:
        """Whether drafts are copies of a request's own text (`mtpc.step.copying`)."""
        return self.spec_tokens > 0 and self.draft == COPY

    @property
    def layer_drafts(self) -> int:
        """The most drafts of MTP layers, or of another drafter with weights."""
        return 0 if self.copies else self.spec_tokens

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of drafts that have decode steps, ascending."""
        return self.spec_tiers or (self.spec_tokens,)

    def _check_prefill_rows(self) -> None:
        rows = self.prefill_rows
        if rows is None:
            return
        check_int("prefill_rows", rows, low=1, high=self.prefill_tokens)
        if self.prefill_tokens % rows:
            raise OptionError(
                f"prefill_rows is {rows}, which does not divide prefill_chunk "
                f"{self.prefill_tokens}; expected a divisor: change one of them"
            )

    @property
    def prefill_tokens(self) -> int:
        """`prefill_chunk`, or its default."""
        return self.prefill_chunk or DEFAULT_PREFILL_CHUNK

    @property
    def busy_prefill_tokens(self) -> int:
        """`busy_prefill_chunk`, or its default."""
        return self.busy_prefill_chunk or min(self.prefill_tokens, DEFAULT_PREFILL_CHUNK)

    @property
    def prefill_shape(self) -> tuple[int, int]:
        """(rows, tokens per row) of the prefill step; one prompt may take all tokens.

        Unless `prefill_rows` gives the rows, they are a divisor of the tokens. The target is the
        largest bucket, but not more than the requests that could decode in the step, or
        `SHARING_PROMPTS` if those are fewer. The smallest divisor from the target to less than
        twice the target is taken; if there is none, the largest below.
        """
        tokens = self.prefill_tokens
        could_decode = tokens // (self.spec_tokens + 1)
        most = min(max(self.batch_buckets), max(could_decode, SHARING_PROMPTS))
        divisors = [rows for rows in range(1, tokens + 1) if tokens % rows == 0]
        enough = [rows for rows in divisors if most <= rows < 2 * most]
        fewer = max(rows for rows in divisors if rows <= most)
        rows = self.prefill_rows or min(enough, default=fewer)
        return rows, tokens // rows

    def _check_ranks(self) -> None:
        """Several ranks must not each choose a backend, so "auto" becomes "cpu" for them."""
        size = self.tensor_parallel_size
        check_int("tensor_parallel_size", size, low=1)
        if size > 1 and self.backend == AUTO:
            object.__setattr__(self, "backend", "cpu")
        others = [name for name in _ONE_RANK_ONLY if getattr(self, name)]
        others += ["backend"] if self.backend not in ("cpu", "cuda", "eager") else []
        if size > 1 and others:
            raise OptionError(
                f"{others[0]} is {getattr(self, others[0])!r} with tensor_parallel_size {size}; "
                "several ranks run the checkpoint's weights on backend 'cpu', 'cuda' or 'eager': "
                "leave it out"
            )

    def _check_cache(self) -> None:
        for name in ("cache_dir", "draft", "kv_offload_dir"):
            if (name, getattr(self, name)) != ("draft", COPY):
                object.__setattr__(self, name, check_directory(name, getattr(self, name)))
        pin = self.require_sha256
        if pin is not None and not (isinstance(pin, str) and re.fullmatch("[0-9a-f]{64}", pin)):
            raise OptionError(
                f"require_sha256 is {pin!r}; expected 64 hexadecimal digits, as `mtpc build` prints"
            )
        if (self.frozen or pin is not None) and not self.use_cache:
            raise OptionError(
                "use_cache is False; expected True with frozen or require_sha256, which need the "
                "cache"
            )

    def for_weights(self, dtype: str | None, skips_idle_rows: bool) -> CompileOptions:
        """These options with the defaults of `prefill_chunk` and `prefill_rows` for a dtype.

        They must be set before a lookup in the graph cache, because its keys contain them.
        """
        skips = skips_idle_rows and SKIP_IDLE_ROWS not in self.disabled_passes
        if not skips or (self.dtype or dtype) != "bfloat16":
            return self
        options = replace(self, prefill_chunk=self.prefill_chunk or LARGE_PREFILL_CHUNK)
        wide = replace(options, batch_buckets=(*options.batch_buckets, LEAST_ROWS))
        return replace(options, prefill_rows=wide.prefill_shape[0])

    def for_gpu(self) -> CompileOptions:
        """These options with a GPU's defaults of `prefill_chunk` and `busy_prefill_chunk`.

        There a step costs the same however many of its rows are used, so prompts may fill it.
        """
        chunk = self.prefill_chunk or LARGE_PREFILL_CHUNK
        return replace(
            self, prefill_chunk=chunk, busy_prefill_chunk=self.busy_prefill_chunk or chunk
        )

    def for_model(self, max_positions: int | None) -> CompileOptions:
        """These options with `max_len` as a number, for a model with so many positions.

        Args:
            max_positions: how far the model's angles reach; None if it has no such limit.

        Raises:
            OptionError: `max_len` exceeds the model's positions.
        """
        limit = DEFAULT_MAX_LEN if max_positions is None else max_positions
        if self.max_len is None:
            return replace(self, max_len=min(DEFAULT_MAX_LEN, limit))
        if max_positions is not None and self.max_len > max_positions:
            raise OptionError(
                f"max_len is {self.max_len}; the model was made for at most {max_positions} "
                "positions (max_position_embeddings and rope_scaling); lower it, or scale by yarn"
            )
        return self

    def blocks_per_request(self, num_tokens: int) -> int:
        """Number of pages for a sequence of `num_tokens`, with room for drafts at its end."""
        return math.ceil((num_tokens + 2 * self.spec_tokens) / self.page_size)

    @property
    def page_count(self) -> int:
        """Number of pages of the pools, the null page included; needs options of `for_model`.

        Without `num_pages` it is enough for the largest bucket with all sequences at full length.
        """
        blocks = self.blocks_per_request(self.sequence_limit)
        return self.num_pages or max(self.batch_buckets) * blocks + 1

    @property
    def sequence_limit(self) -> int:
        """`max_len` as a number; needs options of `for_model`."""
        assert self.max_len is not None
        return self.max_len

    @classmethod
    def parse(cls, options: dict[str, Any]) -> CompileOptions:
        """Build options from keyword arguments.

        Args:
            options: keyword arguments of `mtpc.compile`; aliases are allowed.

        Raises:
            OptionError: a name is unknown, an option is given under two names, or a value is out of
                range.
        """
        known = [f.name for f in fields(cls)]
        resolved: dict[str, Any] = {}
        for name, value in options.items():
            target = ALIASES.get(name, name)
            if target not in known:
                raise OptionError(unknown_option(name, known + list(ALIASES)))
            if target in resolved:
                raise OptionError(f"{target} was given twice (also as {name}); give it once")
            resolved[target] = value
        return cls(**resolved)


def cache_directory() -> Path:
    """Default of `cache_dir`: `MTPC_CACHE_DIR`, or `mtpc` in the user's cache directory."""
    configured = os.environ.get("MTPC_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtpc"


def api_key() -> str | None:
    """The key that clients of `mtpc serve` must send, in `MTPC_API_KEY`; None if it is not set."""
    return os.environ.get("MTPC_API_KEY")


def launched_ranks() -> tuple[int, int]:
    """(rank, number of ranks) by which torchrun started this process; (0, 1) if it did not."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else (0, 1)


def cxx_compiler() -> str:
    """The C++ compiler to call: `CXX`, which Inductor also reads, or g++."""
    return os.environ.get("CXX", "g++")


def cpu_level() -> str | None:
    """The instruction-set level to compile for, from `MTPC_CPU_LEVEL`; None is the best one for
    this processor. See `mtpc.backends.cpu_kernels.levels`."""
    return os.environ.get("MTPC_CPU_LEVEL") or None
