"""Formats statistics: as table rows for people, and as text for Prometheus.

A metric that vLLM also has takes vLLM's name (vllm/v1/metrics/loggers.py), with the prefix `mtpc:`
instead of `vllm:`. A dashboard made for vLLM works after that replacement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpc.engine.stats import Stats

PREFIX = "mtpc:"
Labels = Mapping[str, object]
Sample = tuple[Labels, float]


def stats_rows(stats: Stats) -> Iterator[tuple[str, str]]:
    by_position = " ".join(f"{rate:.0%}" for rate in stats.acceptance_by_position) or "-"
    synthetic = "SYNTHETIC " if stats.synthetic_acceptance_rates else ""
    yield (
        f"{synthetic}acceptance, spec_tokens {stats.spec_tokens}",
        f"length {stats.acceptance_length:.2f} (bonus token included), rate "
        f"{stats.acceptance_rate:.1%}, by position {by_position}",
    )
    yield (
        "steps",
        f"{stats.emitted_tokens} tokens in {stats.decode_steps} decode and "
        f"{stats.prefill_steps} prefill steps ({stats.joined.steps} shared by decoding requests); "
        f"{stats.host_writes} host writes",
    )
    yield (
        "prompt tokens",
        f"{stats.prompt_tokens} prefilled, {stats.reused_tokens} reused "
        f"({_share(stats.reused_tokens, stats.prompt_tokens + stats.reused_tokens)}); "
        f"{stats.prompts_per_prefill:.2f} prompts per prefill step",
    )
    yield (
        "requests",
        f"{stats.num_running} running, {stats.num_waiting} waiting; finished: "
        f"{_counts(stats.finished)}; {stats.preemptions} preemptions",
    )
    yield (
        "KV pages",
        f"{stats.pages_used} of {stats.num_pages} used "
        f"({_share(stats.pages_used, stats.num_pages)}), {stats.pages_idle} idle",
    )
    yield from _kept(stats)
    if stats.forced_drafts:
        yield "grammars", f"{stats.forced_drafts} drafts replaced by the only token allowed"
    if stats.host_gaps:
        yield (
            "host gap",
            f"{1e3 * stats.host_gap_s / stats.host_gaps:.3f} ms per step "
            f"({stats.host_gap_share:.1%} of the time)",
        )
    if stats.building:
        yield "K ready", f"{', '.join(map(str, stats.tiers))}; {stats.building}"
    yield "replays", ", ".join(f"{k} {n}" for k, n in sorted(stats.replays.items())) or "none"
    if stats.callback_errors:
        yield "callback errors", str(stats.callback_errors)
    yield "fallbacks", _counts(stats.fallbacks)


def _kept(stats: Stats) -> Iterator[tuple[str, str]]:
    if stats.num_snapshots:
        yield (
            "state snapshots",
            f"{stats.snapshots_used} of {stats.num_snapshots} used "
            f"({stats.snapshot_bytes / 2**20:.1f} MiB), {stats.snapshot_evictions} evicted",
        )
    if stats.offload_saved or stats.offload_loaded:
        yield (
            "KV offload",
            f"{stats.offload_saved} files written, {stats.offload_loaded} taken over, "
            f"{stats.offload_evictions} evicted ({stats.offload_bytes / 2**20:.1f} MiB)",
        )
    if stats.images_embedded:
        yield (
            "images",
            f"{stats.images_embedded} embedded, {stats.images_reused} reused "
            f"({stats.image_bytes / 2**20:.1f} MiB kept)",
        )


def _counts(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counter.items()) or "none"


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.0%}"


def prometheus_text(stats: Stats) -> str:
    """Format statistics in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for kind, metrics in (("gauge", _gauges(stats)), ("counter", _counters(stats))):
        for metric in metrics:
            lines += metric_lines(kind, *metric)
    return "\n".join(lines) + "\n"


Samples = Iterable[Sample] | float
Metric = tuple[str, str, Samples]


def metric_lines(kind: str, name: str, description: str, samples: Samples) -> list[str]:
    """One metric in Prometheus' text format: its HELP line, its TYPE line and its samples.

    Args:
        kind: "gauge" or "counter".
        name: the metric's name without prefix.
        description: text for the HELP line.
        samples: labels and value of each sample; a number is one without labels.
    """
    if isinstance(samples, int | float):
        samples = [({}, samples)]
    head = [f"# HELP {PREFIX}{name} {description}", f"# TYPE {PREFIX}{name} {kind}"]
    return head + [f"{PREFIX}{name}{_labels(labels)} {value}" for labels, value in samples]


def _gauges(stats: Stats) -> Iterator[Metric]:
    used = stats.pages_used / stats.num_pages if stats.num_pages else 0.0
    yield "num_requests_running", "Requests with a slot.", stats.num_running
    yield "num_requests_waiting", "Requests in the queue.", stats.num_waiting
    yield "kv_cache_usage_perc", "KV pages in use; 1 is all.", used
    yield "gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", used
    idle = float(stats.pages_idle)
    yield "kv_cache_idle_pages", "KV pages that no request uses, kept for reuse.", idle
    tiers: list[Sample] = [({"spec_tokens": k}, 1.0) for k in stats.tiers]
    yield "spec_decode_tiers_ready", "Numbers of drafts that have steps.", tiers
    for name, description, value in (
        ("state_snapshots", "Snapshots of state outside of pages.", stats.snapshots_used),
        ("state_snapshots_max", "The most such snapshots.", stats.num_snapshots),
        ("state_snapshot_bytes", "Bytes of such snapshots.", stats.snapshot_bytes),
        ("kv_offload_bytes", "Bytes of offloaded pages and snapshots.", stats.offload_bytes),
        ("image_bytes", "Bytes of kept embeddings of images.", stats.image_bytes),
    ):
        yield name, description, float(value)


def _counters(stats: Stats) -> Iterator[Metric]:
    queried = stats.prompt_tokens + stats.reused_tokens
    positions = [({"position": i}, float(n)) for i, n in enumerate(stats.accepted)]
    replays = [({"step": str(key)}, float(n)) for key, n in sorted(stats.replays.items())]
    reasons = [({"reason": why}, float(n)) for why, n in stats.fallbacks.items()]
    finished = [({"finished_reason": why}, float(n)) for why, n in stats.finished.items()]
    drafts = stats.request_steps if stats.spec_tokens else 0
    for name, description, value in (
        ("prompt_tokens_total", "Tokens prefilled.", stats.prompt_tokens),
        ("prefill_steps_total", "Prefill steps.", stats.prefill_steps),
        ("joined_steps_total", "Prefill steps that decoding requests shared.", stats.joined.steps),
        ("prefill_prompts_total", "Prompts in prefill steps, per step.", stats.prefill_prompts),
        ("generation_tokens_total", "Tokens emitted.", stats.emitted_tokens),
        ("num_preemptions_total", "Requests sent back to the queue.", stats.preemptions),
        ("prefix_cache_queries_total", "Prompt tokens looked up for reuse.", queried),
        ("prefix_cache_hits_total", "Prompt tokens reused.", stats.reused_tokens),
        ("state_snapshot_evictions_total", "Snapshots evicted.", stats.snapshot_evictions),
        ("kv_offload_saved_total", "Pages and snapshots written to files.", stats.offload_saved),
        ("kv_offload_loaded_total", "Pages and snapshots taken over.", stats.offload_loaded),
        ("kv_offload_evictions_total", "Files evicted.", stats.offload_evictions),
        ("images_embedded_total", "Images that the vision tower embedded.", stats.images_embedded),
        ("images_reused_total", "Images whose embeddings were kept.", stats.images_reused),
        ("spec_decode_num_drafts_total", "Rounds of drafts, per request and step.", drafts),
        ("spec_decode_num_draft_tokens_total", "Drafts verified.", sum(stats.drafted)),
        ("spec_decode_num_accepted_tokens_total", "Drafts accepted.", sum(stats.accepted)),
        ("forced_drafts_total", "Drafts replaced because of a grammar.", stats.forced_drafts),
        ("replay_seconds_total", "Seconds in replays.", stats.replay_s),
        ("host_gap_seconds_total", "Seconds between replays with work.", stats.host_gap_s),
        ("host_gaps_total", "Gaps between replays.", stats.host_gaps),
        ("callback_errors_total", "Requests ended by their callback.", stats.callback_errors),
    ):
        yield name, description, float(value)
    description = "Drafts accepted, by draft position."
    yield "spec_decode_num_accepted_tokens_per_pos_total", description, positions
    yield "request_success_total", "Requests that ended, by reason.", finished
    yield "replays_total", "Replays per captured step.", replays
    yield "fallbacks_total", "Fallbacks from what was requested, by reason.", reasons


def _labels(labels: Labels) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    pairs = [f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""
