"""Computes the time of a step on eight devices, by the formula of `mtpc.scale`.

python -m benchmarks.scale --out benchmarks/results/paper/scale.json    # seconds
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from benchmarks.harness.bench import ON_PAPER, Benchmark, Run
from benchmarks.harness.tables import Column, Row, TableForm, fields
from mtpc import CompileOptions
from mtpc.models.from_config import load_shapes
from mtpc.plan import make_plan
from mtpc.scale import DEVICES, RankModel

MAX_LEN, LATENCY_US = 8192, 10.0
BATCHES, DRAFTS = (1, 64), (0, 1, 2, 3)
_QWEN_KINDS = (["linear_attention"] * 3 + ["full_attention"]) * 12
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": dict(
        architectures=["DeepseekV3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_nextn_predict_layers=1,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=163840,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "Qwen3-Next-80B-A3B": dict(
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5120,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        layer_types=_QWEN_KINDS,
        max_position_embeddings=262144,
    ),
}
"""The entries of the released models' config.json that determine their sizes."""
PLANS = (
    ("DeepSeek-V3", 8),
    ("Qwen3-Next-80B-A3B", 2),
    ("Qwen3-Next-80B-A3B", 1),
)
"""Models and numbers of devices per replica. Expert parallelism gives the same figures."""


def measure(run: Run) -> Iterator[list[Row]]:
    """Compute."""
    run.facts["machine"] = ON_PAPER
    yield [*rows()]


def rows() -> Iterator[dict[str, Any]]:
    """A row for each model, plan, device, K and batch that fits into memory."""
    for name, ranks in PLANS:
        models = [*rank_models(name, ranks)]
        for device, batch in ((d, b) for d in DEVICES for b in BATCHES):
            for model in models:
                if model.largest_batch(DEVICES[device].memory) < batch:
                    continue
                time = model.step_time(DEVICES[device], batch, LATENCY_US * 1e-6)
                base = models[0].step_time(DEVICES[device], batch, LATENCY_US * 1e-6)
                yield {
                    "model": name,
                    "device": device,
                    "ranks": ranks,
                    "spec_tokens": model.plan.spec_tokens,
                    "batch": batch,
                    "weight_bytes": model.weight_bytes,
                    "token_bytes": model.token_bytes,
                    "request_bytes": model.request_bytes,
                    "largest_batch": model.largest_batch(DEVICES[device].memory),
                    "read": time.read,
                    "sent": time.sent,
                    "collectives": time.collectives,
                    "seconds": [time.weights, time.caches, time.transfer, time.latency],
                    "break_even": time.total / base.total,
                }


def rank_models(name: str, ranks: int, experts: bool = False) -> Iterator[RankModel]:
    """A rank of one of `CONFIGS` for each K of `DRAFTS`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(CONFIGS[name]))
        shapes = load_shapes(path, None, needs_mtp=True)
    for k in DRAFTS:
        options = CompileOptions(
            spec_tokens=k, batch_buckets=(1,), max_len=MAX_LEN, quantize=shapes.scheme
        )
        yield RankModel(shapes.loaded, make_plan(options), ranks, experts)


def _seconds(index: int) -> Any:
    return lambda row, _: row["seconds"][index]


FORM = TableForm(
    "A step on 8 devices",
    (
        *fields("model, device, ranks, K=spec_tokens"),
        Column("batch", "batch", "", "requests of a replica; every byte and ms is one device's."),
        Column("weights GiB", "weight_bytes", ".1f", factor=2**-30),
        Column("KV KiB a token", "token_bytes", ".1f", factor=2**-10),
        Column("state MiB a request", "request_bytes", ".1f", factor=2**-20),
        Column("requests that fit", "largest_batch"),
        Column("GB read", "read", ".1f", factor=1e-9),
        Column("MB sent", "sent", ".1f", factor=1e-6),
        Column("collectives"),
        *(
            Column(name, _seconds(term), ".2f", factor=1e3)
            for term, name in enumerate(("weights ms", "caches ms", "transfer ms", "latency ms"))
        ),
        Column("step ms", lambda row, _: sum(row["seconds"]), ".2f", factor=1e3),
        Column(
            "break-even", "break_even", ".2f",
            "tokens that a request must emit in a step to be as fast as K = 0.",
        ),
    ),
    (
        "on paper: bytes over published bandwidths, collectives one after another; held against no "
        "hardware.",
        f"8 devices, requests of {MAX_LEN} tokens each, {LATENCY_US:g} us a collective (assumed).",
    ),
)  # fmt: skip
BENCHMARK = Benchmark("scale", __doc__, measure, FORM.of, command.RESULTS)
main, table = BENCHMARK.commands(__name__)
