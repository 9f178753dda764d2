"""Options of `mtpc.compile`, and their checks. A field declares all that is known of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mtpc.declaration import declared, option
from mtpc.errors import OptionError
from mtpc.option_checks import (
    AUTO,
    Check,
    check_backend,
    check_buckets,
    check_budgets,
    check_choice,
    check_digest,
    check_directory,
    check_draft_vocab,
    check_drafter,
    check_layers,
    check_names,
    check_spec_tokens,
    check_switch,
    check_tiers,
    copies_text,
    drafters_of,
    ids_text,
    integer,
    one_of,
    or_none,
    scheme_of,
    unknown_option,
)
from mtpc.wiring import check_rules, rule_text

AUTO_TIERS = (0, 1, 2, 3)
"""The default of `spec_tiers` if the engine chooses K."""
DEFAULT_SPEC_TOKENS = 3
DEFAULT_SNAPSHOT_BYTES = 1 << 30
"""13 snapshots of Qwen3-Next-80B, whose recurrent state is the largest of the released models."""
DEFAULT_OFFLOAD_BYTES = 4 << 30
"""The pages of 340,000 tokens of a 0.5B model, or of 30,000 tokens of an 8B model."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
SCHEMES = ("iq4_nl", "q5_0", "q8_0", "int4-g32", "int4-g128", "int8-g128", "int8", "fp8")
"""Names of schemes that quantise weights; `mtpc.weights.quantise` defines them."""
COSTLY = {"iq4_nl": "8 %", "int4-g32": "11 %", "int4-g128": "24 %"}
"""Schemes that cost more than 5 % of perplexity, see docs/quantised.md -> how much."""
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
"""Values of `kv_cache_dtype`; `mtpc.models.caches` defines them."""
_ONE_RANK_ONLY = ("kv_offload_dir", "build_in_background")
"""Options that `tensor_parallel_size` > 1 refuses."""
ALIASES = {"num_speculative_tokens": "spec_tokens"}
_log = logging.getLogger("mtpc")
check_scheme = scheme_of(SCHEMES)
"""Refuses a name that is not in `SCHEMES`, with an OptionError that names the nearest."""


def warn_of_cost(scheme: str | None) -> None:
    """Log a warning where a scheme is one of `COSTLY`; called once for weights that it rounds."""
    if scheme in COSTLY:
        _log.warning(
            "%s raised the perplexity of a 0.5B model by %s; int8, q8_0 and files that were "
            "quantised with care cost less", scheme, COSTLY[scheme],
        )  # fmt: skip


_as_given: Check = lambda name, value: value  # noqa: E731
"""For what `mtpc.acceptance.settle` checks together."""
_whole = integer(1)


@dataclass(frozen=True)
class CompileOptions:
    """Options of `mtpc.compile`, as they are given; `mtpc.plan.Plan` has what follows from them.

    Attributes:
        spec_tokens: K, the number of drafts per step; 0 is plain decoding. None is 3, or 0 for
            models that have neither MTP layers nor another drafter. "auto" compiles steps for each
            K in `spec_tiers`. The engine then chooses K as it runs, from the times of the steps and
            the accepted drafts.
        spec_tiers: with "auto", the values of K to choose from; () is 0 to 3.
        row_budgets: rows a request, on average, that decode steps verify, from 1 to K + 1; for
            each, and with "auto" for each K, there are steps, among which the engine chooses. A
            step gives its rows to the drafts that are likeliest to be accepted, whatever request
            they are of (`mtpc.step.budget`). () verifies all drafts.
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
            loaded: "iq4_nl", "q5_0" or "q8_0", as GGUF files have them; "int4-g32", "int4-g128",
            "int8-g128", "int8" or "fp8". Weights that the checkpoint stores quantised stay as they
            are, and so do embeddings, routers and the projections that join embedding and features
            in MTP layers. See docs/quantised.md.
        tensor_parallel_size: how many ranks share the model, each with its part of the weights and
            of the KV cache; on the backends "cpu", "cuda" and "eager". Every rank of a
            torch.distributed process group compiles; rank 0 generates, and the others follow it
            (`SpecModel.follow`). Commands start their ranks themselves. See docs/scale.md.
        synthetic_acceptance_rates: accept drafts at these rates, whatever the drafts are, to
            measure the speed of K at a given acceptance. Entry i is the share of steps that accept
            draft i and all before it, as in vLLM. The text is then not the model's; the stats say
            "synthetic". () is off. `SpecModel.set_synthetic_acceptance` changes them later.
        synthetic_acceptance_length: the same as a mean number of tokens per step, 1..K + 1, or a
            name of `mtpc.acceptance.GOLDEN_LENGTHS`.
        sampling: compile sampling: temperature, filters, penalties, masks and log-probabilities.
            False compiles greedy decoding only.
        max_logprobs: with `sampling`, the largest number of most probable tokens that a request may
            have reported, 1..64.
        token_mask: with `sampling`, a mask for each token to choose (`batch.token_mask`), which
            grammars need. None is `sampling`, but False with synthetic acceptance.
        images: compile for prompts with images, of models with a vision tower; see docs/models.md.
        hidden_state_layers: layers of the target whose inputs are kept beside the KV cache, and
            handed out when a prompt ends (`Output.hidden_states`); their number stands for what
            enters the final norm. Drafters are trained on them. Needs spec_tokens=0.
        verify_passes: verify values on fake tensors after every pass, not only after the last.
        strict: raise an error for every fallback instead of counting it in the stats.
        disabled_passes: names of optional passes to leave out.
        enabled_passes: names of passes to run that are off by default.
        draft_vocab: token ids that drafts may be, or a number n for the n lowest ids, which
            tokenizers usually give to the most frequent tokens; () is all, or those that
            draft_vocab.txt beside the drafter names. See the pass trim-draft-head.
        draft: checkpoint of a drafter that replaces the model's own MTP layers: an EAGLE-3 head,
            Gemma 4's assistant, or MTP layers of the target's family. "copy" needs no checkpoint:
            what followed the end of a text earlier. See docs/models.md, also for "copy+own".
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

    # fmt: off
    spec_tokens: int | str | None = option(
        None, "decoding", or_none(check_spec_tokens),
        "drafts per step; 0 decodes plainly, auto adapts to load", "K",
        vllm="--num-speculative-tokens", shown=str(DEFAULT_SPEC_TOKENS), common=True, key=str,
    )
    spec_tiers: Iterable[int] = option(
        (), "decoding", check_tiers, "numbers that 'auto' chooses from (default: 0,1,2,3)", "K,K",
    )
    row_budgets: int | Iterable[int] = option(
        (), "decoding", check_budgets,
        "rows a request, on average, that steps verify: the likeliest drafts", "N,N",
        key=lambda budgets: str(bool(budgets)), for_hosts=False,
    )
    batch_buckets: int | Iterable[int] = option(
        (1, 2, 4, 8), "batching", check_buckets, "request counts to capture", "R,R",
    )
    max_len: int | None = option(
        None, "memory", or_none(integer(2)),
        "longest sequence in tokens, prompt and new tokens together", "N", vllm="--max-model-len",
        common=True,
    )
    page_size: int = option(
        16, "memory", integer(1, 4096), "tokens per KV page", "N", vllm="--block-size", key=str,
    )
    num_pages: int | None = option(
        None, "memory", or_none(integer(2)),
        "pages in the KV pool (default: enough for the largest bucket)", "N",
        vllm="--num-gpu-blocks-override",
    )
    prefill_chunk: int | None = option(
        None, "batching", or_none(_whole), "tokens per prefill step (default: 512 or 64)", "N",
        vllm="--max-num-batched-tokens",
    )
    busy_prefill_chunk: int | None = option(
        None, "batching", or_none(_whole),
        "prompt tokens per prefill step while others decode (default: up to 64; all on GPUs)", "N",
        for_hosts=False,
    )
    prefill_rows: int | None = option(
        None, "batching", or_none(_whole),
        "requests that may share a prefill step (default: by bucket)", "R",
    )
    prefix_caching: bool = option(True, "memory", check_switch, for_hosts=False)
    snapshot_bytes: int = option(
        DEFAULT_SNAPSHOT_BYTES, "memory", integer(0),
        "most bytes of snapshots of state that is not in KV pages", "N", for_hosts=False,
    )
    snapshot_distance: int = option(
        1024, "memory", _whole, "tokens from one snapshot of a long prompt to the next", "N",
        for_hosts=False,
    )
    kv_offload_dir: str | Path | None = option(
        None, "memory", or_none(check_directory),
        "directory for evicted KV pages, and for all at the end", "DIR", for_hosts=False,
    )
    kv_offload_bytes: int = option(
        DEFAULT_OFFLOAD_BYTES, "memory", _whole, "most bytes of files in --kv-offload-dir", "N",
        for_hosts=False,
    )
    async_scheduling: bool | None = option(
        None, "batching", check_choice,
        "launch a step before the previous one is read (default: on GPUs, where that loses "
        "nothing)",
        for_hosts=False,
    )
    batch_invariant: bool = option(
        False, "devices", check_switch,
        "on a GPU, text does not depend on K, batch or chunk; slower", key=str,
    )
    backend: str = option(AUTO, "devices", check_backend, "auto, cpu, cuda, eager or null", "NAME")
    dtype: str | None = option(
        None, "devices", or_none(one_of(DTYPES)),
        "dtype of the weights (default: the checkpoint's)", "NAME", key=str,
    )
    kv_cache_dtype: str = option(
        KV_CACHE_DTYPES[0], "memory", one_of(KV_CACHE_DTYPES),
        f"what pages of K and V hold: {', '.join(KV_CACHE_DTYPES)}", "NAME", key=str,
    )
    quantize: str | None = option(
        None, "memory", or_none(check_scheme), f"quantise weights: {', '.join(SCHEMES)}", "SCHEME",
        common=True, key=str,
    )
    tensor_parallel_size: int = option(
        1, "devices", _whole,
        "processes that share the model, each with its part of the weights (default: 1, or "
        "torchrun's)",
        "RANKS", shown="", key=str, for_hosts=False,
    )
    synthetic_acceptance_rates: Sequence[float] = option(
        (), "debugging", _as_given, key=lambda rates: str(bool(rates)), for_hosts=False,
    )
    synthetic_acceptance_length: float | str | None = option(
        None, "debugging", _as_given, for_hosts=False,
    )
    sampling: bool = option(
        True, "sampling", check_switch, "compile for greedy decoding only", flag="--no-sampling",
        key=str,
    )
    max_logprobs: int = option(
        20, "sampling", integer(1, 64), "the most probable tokens that a request may ask for", "N",
        key=str,
    )
    token_mask: bool | None = option(
        None, "sampling", check_choice,
        "compile no token masks, which JSON formats, grammars and required tools need",
        flag="--no-structured-outputs", key=str,
    )
    images: bool = option(
        False, "decoding", check_switch,
        "compile for prompts with images, of models with a vision tower", key=str, for_hosts=False,
    )
    hidden_state_layers: Iterable[int] = option(
        (), "decoding", check_layers, key=ids_text, for_hosts=False,
    )
    verify_passes: bool = option(
        False, "debugging", check_switch, "check the graph with fake tensors after every pass",
    )
    strict: bool = option(False, "debugging", check_switch)
    disabled_passes: Iterable[str] = option(
        (), "debugging", check_names, "disable an optional pass by name; repeatable", "PASS",
        flag="--disable-pass", key=" ".join,
    )
    enabled_passes: Iterable[str] = option(
        (), "debugging", check_names, "enable an optional pass by name; repeatable", "PASS",
        flag="--enable-pass", key=" ".join,
    )
    draft_vocab: int | Iterable[int] = option(
        (), "decoding", check_draft_vocab, "draft only the N lowest ids, or the ids in FILE",
        "N|FILE", key=ids_text,
    )
    draft: str | Path | None = option(
        None, "decoding", or_none(check_drafter),
        "a drafter's checkpoint, copies of a request's own text, or both", "DIR|copy|copy+DIR",
        common=True, key=copies_text,
    )
    wiring: Mapping[str, str | bool] | Iterable[tuple[str, str | bool]] = option(
        (), "decoding", lambda _, rules: check_rules(rules),
        "rules of the MTP layers; `mtpc check` measures them", "RULE=VALUE,..", key=rule_text,
    )
    cache_dir: str | Path | None = option(
        None, "cache", or_none(check_directory),
        "the graph cache (default: MTPC_CACHE_DIR, else the user's)", "DIR",
    )
    use_cache: bool = option(
        True, "cache", check_switch, "do not read or write the cache", flag="--no-cache",
    )
    build_in_background: bool = option(
        False, "decoding", check_switch,
        "start without drafts, and use each K once another process has built its steps",
    )
    frozen: bool = option(
        False, "cache", check_switch, "build nothing: a step that is not in the cache is an error",
    )
    require_sha256: str | None = option(
        None, "cache", or_none(check_digest),
        "load only the entries with this digest, which `mtpc build` prints; implies --frozen",
        "DIGEST", for_hosts=False,
    )
    # fmt: on

    def __post_init__(self) -> None:
        self.settled()

    def settled(self) -> dict[str, Any]:
        """Every option in its one form, with what follows from the others alone.

        Raises:
            OptionError: a value is not allowed, or does not suit another one.
        """
        found = {name: said.check(name, getattr(self, name)) for name, said in declared(type(self))}
        found |= _drafts(found["spec_tokens"], found["spec_tiers"])
        _check_budgets(found)
        length = found.pop("synthetic_acceptance_length")
        rates = found["synthetic_acceptance_rates"]
        if length is not None or not isinstance(rates, tuple) or rates:
            from mtpc.acceptance import settle  # Not above: few programs have any.

            rates = found["synthetic_acceptance_rates"] = settle(
                found["spec_tokens"], rates, length
            )
        can_mask = found["sampling"] and not rates
        if found["token_mask"] and not can_mask:
            raise OptionError("token_mask needs sampling=True and no synthetic acceptance")
        found["token_mask"] = can_mask if found["token_mask"] is None else found["token_mask"]
        if found["images"] and found["draft"] is not None:
            raise OptionError("images is True, and draft is set; expected one of them alone")
        if found["hidden_state_layers"] and found["spec_tokens"]:
            raise OptionError(
                f"hidden_state_layers is set, and spec_tokens is {found['spec_tokens']}; expected "
                "spec_tokens=0: hidden states are those of plain decoding"
            )
        late = found["async_scheduling"] or not found["prefix_caching"]
        if found["kv_offload_dir"] is not None and late:
            raise OptionError(
                "kv_offload_dir needs prefix_caching=True, which finds pages again, and "
                "async_scheduling=False, because it indexes pages before they are filled"
            )
        if found["require_sha256"] is not None:
            found["frozen"] = True
        if found["frozen"] and not found["use_cache"]:
            raise OptionError(
                "use_cache is False; expected True with frozen or require_sha256, which need the "
                "cache"
            )
        return found | _ranks(found)

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


def _drafts(given: int | str | None, tiers: tuple[int, ...]) -> dict[str, Any]:
    """The largest K, and all K that the engine may choose; () where it cannot choose."""
    if given == AUTO:
        tiers = tiers or AUTO_TIERS
        if len(tiers) < 2:
            raise OptionError(
                f"spec_tiers is {tiers!r}; expected several numbers, such as (0, 1, 3)"
            )
        return {"spec_tokens": max(tiers), "spec_tiers": tiers}
    most = DEFAULT_SPEC_TOKENS if given is None else given
    if tiers and max(tiers) != most:
        raise OptionError(
            f"spec_tiers is {tiers!r} with spec_tokens {most}; expected spec_tokens={AUTO!r}, "
            "which chooses among the tiers"
        )
    return {"spec_tokens": most, "spec_tiers": tiers}


def _check_budgets(found: dict[str, Any]) -> None:
    budgets, most = found["row_budgets"], found["spec_tokens"]
    if not budgets:
        return
    if max(budgets) > most + 1:
        raise OptionError(
            f"row_budgets is {budgets!r} with spec_tokens {most}; expected at most {most + 1}, the "
            "last token of a request and its drafts"
        )
    if drafters_of(found["draft"])[0]:
        raise OptionError(
            f"row_budgets is {budgets!r} with draft={found['draft']!r}; expected one of them alone"
        )


def _ranks(found: dict[str, Any]) -> dict[str, Any]:
    """Several ranks must not each choose a backend, so "auto" becomes "cpu" for them."""
    size = found["tensor_parallel_size"]
    if size == 1:
        return {}
    backend = "cpu" if found["backend"] == AUTO else found["backend"]
    others = [name for name in _ONE_RANK_ONLY if found[name]]
    others += ["backend"] if backend not in ("cpu", "cuda", "eager") else []
    if others:
        raise OptionError(
            f"{others[0]} is {found[others[0]]!r} with tensor_parallel_size {size}; several ranks "
            "run the checkpoint's weights on backend 'cpu', 'cuda' or 'eager': leave it out"
        )
    return {"backend": backend}
