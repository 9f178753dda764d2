"""Options of `mtpc.compile`, checked once. The only module that reads the environment."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtpc.errors import OptionError

MAX_SPEC_TOKENS = 16
"""Drafts per step above this are refused: acceptance at such depth is zero in every published
measurement, and every draft costs a full pass of the draft layer."""

AUTO, AUTO_TIERS = "auto", (0, 1, 2, 3)
"""K by load, and what it is chosen among unless `spec_tiers` says otherwise."""
DEFAULT_MAX_LEN = 4096
SHARING_PROMPTS = 4
"""Short prompts that are to share a prefill step, though no more requests could decode in it."""
DEFAULT_PREFILL_CHUNK = 64
"""Prompt tokens of a prefill step where every step costs as much, or others wait for it."""
LARGE_PREFILL_CHUNK = 512
"""And where a step costs what its tokens do; larger ones gain nothing (docs/performance.md)."""
_SKIPS_IDLE_ROWS = "skip-idle-rows"
DTYPES = ("bfloat16", "float16", "float32", "float64")

_ALIASES = {"num_speculative_tokens": "spec_tokens"}


@dataclass(frozen=True)
class CompileOptions:
    """What `mtpc.compile` was asked for.

    Attributes:
        spec_tokens: K, drafts proposed per step; 0 is plain decoding. "auto" compiles steps for
            each of `spec_tiers`, among which the engine chooses as it runs, by what steps cost
            and how many drafts are accepted; the field then holds the largest.
        spec_tiers: with "auto", numbers of drafts to choose among; empty stands for 0 to 3.
        batch_buckets: request counts to capture, ascending; a batch is padded to the smallest
            bucket that holds it.
        max_len: longest sequence (prompt + new tokens), in tokens; None is 4096, or the model's
            max_position_embeddings where that is smaller.
        page_size: tokens per KV page.
        num_pages: pages in the KV pool; None sizes it for the largest bucket at max_len.
        prefill_chunk: tokens that one prefill step holds, of one prompt or of several, and the
            K + 1 of each request that decodes in it; None is 512 where kernels leave out the rows
            that a step lacks, so that short prompts do not pay for it (cpu, bfloat16), else 64.
        busy_prefill_chunk: of these, how many of prompts at most while other requests decode, whose
            next tokens come with the step; None is `prefill_chunk`, at most 64. Where kernels leave
            idle rows out (cpu, bfloat16), a step of fewer tokens is shorter.
        prefill_rows: requests that may share one prefill step, prompts and those that decode in it;
            a divisor of `prefill_chunk`. None is one with room for the largest bucket, where that
            leaves each K + 1 tokens and is less than twice as many; else fewer, four if it can be.
            With 1, prompts go one by one and decoding waits for each chunk.
        prefix_caching: reuse the KV pages of prompts and outputs with the same beginning, where a
            model keeps all of its past in pages; see docs/engine.md.
        async_scheduling: launch a step before the one before it is read, so that a GPU does not
            wait for the host. The text is the same, and comes one step later; of no use on a cpu,
            where a launch is the work.
        backend: "cpu", "cuda" (NVIDIA and AMD GPUs), "eager", "null", or "auto": cpu, falling
            back to eager (visibly, and not under `strict`) where no C++ compiler works.
        dtype: weights' dtype when loading a directory ("bfloat16", "float32", ...); None keeps
            the checkpoint's. A model object keeps its own.
        sampling: compile what requests other than plain greedy ones need (temperature, filters,
            penalties, masks, log-probabilities); without it every request is decoded greedily.
        max_logprobs: with `sampling`, most probable tokens a request may have reported, 1..64.
        token_mask: with `sampling`, a mask row per token, `batch.token_mask`, for grammars.
        verify_passes: run the verifier with fake-tensor propagation after every pass, not
            only after the last.
        strict: turn every fallback into an error instead of counting it in the stats.
        disabled_passes: names of optional passes to leave out.
        enabled_passes: names of passes that are off by default, to run.
        draft_vocab: token ids that drafts may be, or a number n for the n lowest ids (which
            tokenizers give to the most frequent tokens, as a rule); empty: all. See the pass
            trim-draft-head.
        cache_dir: the graph cache; None is `MTPC_CACHE_DIR`, else `mtpc` in the user's cache
            directory. See docs/cache.md.
        use_cache: look steps up in the cache and keep what is built; False does neither.
        frozen: build nothing: a step that the cache does not hold is an error.
        require_sha256: digest of the cache entries that may be loaded, as `mtpc build` printed
            it; others are refused before any of their code is opened. Implies `frozen`.
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
    async_scheduling: bool = False
    backend: str = "auto"
    dtype: str | None = None
    sampling: bool = False
    max_logprobs: int = 5
    token_mask: bool = False
    verify_passes: bool = False
    strict: bool = False
    disabled_passes: tuple[str, ...] = ()
    enabled_passes: tuple[str, ...] = ()
    draft_vocab: tuple[int, ...] = ()
    cache_dir: Path | None = None
    use_cache: bool = True
    frozen: bool = False
    require_sha256: str | None = None

    def __post_init__(self) -> None:
        self._settle_tiers()
        if self.max_len is not None:
            _check_int("max_len", self.max_len, low=2)
        _check_int("page_size", self.page_size, low=1, high=4096)
        if self.prefill_chunk is not None:
            _check_int("prefill_chunk", self.prefill_chunk, low=1)
        _check_int("max_logprobs", self.max_logprobs, low=1, high=64)
        if self.token_mask and not self.sampling:
            raise OptionError("token_mask needs sampling=True, which compiles what reads the mask")
        if self.num_pages is not None:
            _check_int("num_pages", self.num_pages, low=2)
        for name in ("prefix_caching", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if not isinstance(self.backend, str):
            raise OptionError(f"backend is {self.backend!r}; expected a name, as 'cpu'")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        for name in ("disabled_passes", "enabled_passes"):
            object.__setattr__(self, name, _check_names(name, getattr(self, name)))
        object.__setattr__(self, "batch_buckets", _check_buckets(self.batch_buckets))
        object.__setattr__(self, "draft_vocab", _check_draft_vocab(self.draft_vocab))
        if self.busy_prefill_chunk is not None:
            _check_int("busy_prefill_chunk", self.busy_prefill_chunk, 1, self.prefill_tokens)
        self._check_prefill_rows()
        self._check_cache()

    def _settle_tiers(self) -> None:
        """`spec_tokens` becomes a number, the largest tier where there are several."""
        tiers: Any = self.spec_tiers
        if self.spec_tokens == AUTO:
            tiers = tiers or AUTO_TIERS
            if isinstance(tiers, (int, str)) or len(set(tiers)) < 2:
                raise OptionError(
                    f"spec_tiers is {tiers!r}; expected several numbers, as (0, 1, 3)"
                )
            for tier in tiers:
                _check_int("spec_tiers", tier, low=0, high=MAX_SPEC_TOKENS)
            object.__setattr__(self, "spec_tokens", max(tiers))
            object.__setattr__(self, "spec_tiers", tuple(sorted(set(tiers))))
        _check_int("spec_tokens", self.spec_tokens, low=0, high=MAX_SPEC_TOKENS)
        if tiers and max(tiers) != self.spec_tokens:
            raise OptionError(
                f"spec_tiers is {tiers!r} with spec_tokens {self.spec_tokens}; tiers are what "
                f"spec_tokens={AUTO!r} chooses among"
            )

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of drafts that there are decode steps for."""
        return self.spec_tiers or (self.spec_tokens,)

    def _check_prefill_rows(self) -> None:
        rows = self.prefill_rows
        if rows is None:
            return
        _check_int("prefill_rows", rows, low=1, high=self.prefill_tokens)
        if self.prefill_tokens % rows:
            raise OptionError(
                f"prefill_rows is {rows}, which does not divide prefill_chunk "
                f"{self.prefill_tokens}; give a divisor, or another chunk"
            )

    @property
    def prefill_tokens(self) -> int:
        """`prefill_chunk` as a number."""
        return self.prefill_chunk or DEFAULT_PREFILL_CHUNK

    @property
    def busy_prefill_tokens(self) -> int:
        """Prompt tokens of a prefill step while requests decode."""
        return self.busy_prefill_chunk or min(self.prefill_tokens, DEFAULT_PREFILL_CHUNK)

    @property
    def prefill_shape(self) -> tuple[int, int]:
        """Rows of the prefill step, and its tokens over them; one prompt may take all tokens.

        Enough rows for the largest bucket, if all of it could decode in there, or for some prompts,
        and if the tokens can be shared out evenly among as many or not many more; else fewer.
        """
        tokens = self.prefill_tokens
        could_decode = tokens // (self.spec_tokens + 1)
        most = min(max(self.batch_buckets), max(could_decode, SHARING_PROMPTS))
        divisors = [rows for rows in range(1, tokens + 1) if tokens % rows == 0]
        enough = [rows for rows in divisors if most <= rows < 2 * most]
        fewer = max(rows for rows in divisors if rows <= most)
        rows = self.prefill_rows or min(enough, default=fewer)
        return rows, tokens // rows

    def _check_cache(self) -> None:
        if self.cache_dir is not None:
            if not isinstance(self.cache_dir, (str, Path)):
                raise OptionError(f"cache_dir is {self.cache_dir!r}; expected a directory's path")
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))
        pin = self.require_sha256
        if pin is not None and not (isinstance(pin, str) and re.fullmatch("[0-9a-f]{64}", pin)):
            raise OptionError(
                f"require_sha256 is {pin!r}; expected 64 hexadecimal digits, as `mtpc build` prints"
            )
        if (self.frozen or pin is not None) and not self.use_cache:
            raise OptionError("frozen and require_sha256 need the cache; drop use_cache=False")

    def for_weights(self, dtype: str | None) -> CompileOptions:
        """These options with `prefill_chunk` settled for weights that are stored in a dtype.

        Every way to steps settles them so before it looks into the cache, as the chunk is in keys.
        """
        skips = self.backend in ("cpu", "auto") and _SKIPS_IDLE_ROWS not in self.disabled_passes
        if self.prefill_chunk is None and skips and (self.dtype or dtype) == "bfloat16":
            return replace(self, prefill_chunk=LARGE_PREFILL_CHUNK)
        return self

    def for_model(self, max_positions: int | None) -> CompileOptions:
        """These options with `max_len` settled for a model of that many positions.

        Raises:
            OptionError: `max_len` was given, and exceeds what the model was made for.
        """
        limit = DEFAULT_MAX_LEN if max_positions is None else max_positions
        if self.max_len is None:
            return replace(self, max_len=min(DEFAULT_MAX_LEN, limit))
        if max_positions is not None and self.max_len > max_positions:
            raise OptionError(
                f"max_len is {self.max_len}; the model was made for at most {max_positions} "
                "positions (max_position_embeddings): lower max_len"
            )
        return self

    def blocks_per_request(self, num_tokens: int) -> int:
        """Pages a sequence of `num_tokens` needs, with room for a round of drafts at its end."""
        return math.ceil((num_tokens + 2 * self.spec_tokens) / self.page_size)

    @property
    def page_count(self) -> int:
        """Pages of the pools that requests share, the null page included.

        Of options settled by `for_model`. Without `num_pages`: what the largest bucket needs, all
        its sequences at full length.
        """
        blocks = self.blocks_per_request(self.sequence_limit)
        return self.num_pages or max(self.batch_buckets) * blocks + 1

    @property
    def sequence_limit(self) -> int:
        """`max_len` as a number, for options settled by `for_model`."""
        assert self.max_len is not None
        return self.max_len

    @classmethod
    def parse(cls, options: dict[str, Any]) -> CompileOptions:
        """Build options from keyword arguments.

        Args:
            options: keyword arguments of `mtpc.compile`; aliases are resolved here.

        Raises:
            OptionError: unknown name (the nearest known one is given), an option given twice
                under two names, or a value outside its range.
        """
        known = [f.name for f in fields(cls)]
        resolved: dict[str, Any] = {}
        for name, value in options.items():
            target = _ALIASES.get(name, name)
            if target not in known:
                raise OptionError(_unknown_option(name, known + list(_ALIASES)))
            if target in resolved:
                raise OptionError(f"{target} was given twice (also as {name}); give it once")
            resolved[target] = value
        return cls(**resolved)


def _unknown_option(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(sorted(known))}"
    return f"unknown option {name!r}; {hint}"


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    wanted = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} is {value!r} ({type(value).__name__}); expected {wanted}")
    if value < low or (high is not None and value > high):
        raise OptionError(f"{name} is {value}; expected {wanted}")


def _check_names(option: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"{option} is {names!r}; expected pass names, as ('hoist-shared',)")
    return tuple(names)


def _check_buckets(buckets: Any) -> tuple[int, ...]:
    if isinstance(buckets, int):
        buckets = (buckets,)
    try:
        buckets = tuple(buckets)
    except TypeError:
        raise OptionError(
            f"batch_buckets is {buckets!r}; expected integers, as (1, 2, 4)"
        ) from None
    if not buckets:
        raise OptionError("batch_buckets is empty; give at least one request count, as (1,)")
    for size in buckets:
        _check_int("batch_buckets", size, low=1, high=4096)
    return tuple(sorted(set(buckets)))


def _check_draft_vocab(ids: Any) -> tuple[int, ...]:
    """Ascending ids, each once; a number stands for as many of the lowest."""
    if isinstance(ids, int):
        _check_int("draft_vocab", ids, low=1)
        return tuple(range(ids))
    try:
        ids = tuple(ids)
    except TypeError:
        raise OptionError(
            f"draft_vocab is {ids!r}; expected token ids, or how many of the lowest"
        ) from None
    for token_id in ids:
        _check_int("draft_vocab", token_id, low=0)
    return tuple(sorted(set(ids)))


def cache_directory() -> Path:
    """The default graph cache: `MTPC_CACHE_DIR`, else `mtpc` in the user's cache directory."""
    configured = os.environ.get("MTPC_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtpc"


def api_key() -> str | None:
    """What clients of `mtpc serve` must send: `MTPC_API_KEY`, unless a file or option says."""
    return os.environ.get("MTPC_API_KEY")


def cxx_compiler() -> str:
    """The C++ compiler to call: `CXX`, as Inductor reads it too, else g++."""
    return os.environ.get("CXX", "g++")


def cpu_level() -> str | None:
    """The instruction-set level to compile for and to run: `MTPC_CPU_LEVEL`; None is what suits
    this very processor best. See `mtpc.backends.cpu_kernels.levels`."""
    return os.environ.get("MTPC_CPU_LEVEL") or None


_COMPILER_VARIABLES = re.compile(
    "(TORCHINDUCTOR|TORCH_COMPILE|TORCHDYNAMO|AOT_INDUCTOR|MKL|ONEDNN|DNNL|KMP|GOMP)_.*"
    "|ATEN_CPU_CAPABILITY|CFLAGS|CXXFLAGS|CPATH|LDFLAGS"
)
_HARMLESS_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")


def compiler_environment() -> dict[str, str]:
    """Environment variables that can change what a compiled step computes, by name."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _COMPILER_VARIABLES.fullmatch(name) and name not in _HARMLESS_VARIABLES
    }
