"""Where vLLM's CPU build computes something else than transformers, part by part.

    VENV/bin/python tests/peers/vllm_parts.py

Under vLLM's interpreter, which has both. Calls vLLM's own functions and transformers' modules on
the same inputs; docs/embedding-vllm.md says what follows. Exits with 1 if one of the findings no
longer holds, so that the page is mended when vLLM is.
"""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

ROWS, EXPERTS, HIDDEN = 4096, 16, 64


def main() -> int:
    """Compare; returns the exit code."""
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        findings = [*router_findings(), *rotary_findings()]
    for holds, text in findings:
        print(f"{'holds' if holds else 'NO LONGER HOLDS'}: {text}")
    return 0 if all(holds for holds, _ in findings) else 1


def router_findings() -> list[tuple[bool, str]]:
    """Grouped top-k: the same experts and weights, if vLLM is told the scoring function."""
    found = []
    for groups, kept in ((1, 1), (4, 2), (8, 1)):
        same = routes_alike(groups, kept, "sigmoid")
        found.append((same, f"{groups} groups, {kept} kept, sigmoid: experts and weights equal"))
    same = routes_alike(4, 2, "softmax")
    found.append(
        (not same, "softmax, what vLLM takes without `scoring_func` in config.json: they differ")
    )
    return found


def routes_alike(groups: int, kept: int, scoring: str) -> bool:
    """vLLM's CPU router against transformers' module on random rows."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=groups,
        topk_group=kept,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.normal_(std=0.3)
        logits, weights, ids = router(torch.randn(ROWS, HIDDEN))
    theirs = CPURouter(
        top_k=2,
        global_num_experts=EXPERTS,
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=kept,
        renormalize=True,
        scoring_func=scoring,
        routed_scaling_factor=2.5,
        e_score_correction_bias=router.e_score_correction_bias,
    )
    found, chosen = theirs._compute_routing(logits, logits, None)
    wanted, got = (
        torch.zeros(ROWS, EXPERTS).scatter(1, i.long(), w)
        for i, w in ((ids, weights), (chosen, found))
    )
    return torch.allclose(wanted, got, rtol=1e-5, atol=1e-6)


def rotary_findings() -> list[tuple[bool, str]]:
    """The rotary kernel on queries [T, heads, D], as DeepSeek's attention hands them over.

    It takes T * heads rows for tokens (csrc/cpu/pos_encoding.cpp: `numel / size(-1)` of them, a
    `stride(-2)` apart): the first T are rotated by positions of other tokens, the rest by what
    lies in memory behind the positions. With scaled rotary embedding, as released DeepSeek-V3 has
    it, vLLM runs another class, in plain torch.
    """
    rotary = RotaryEmbedding(64, 64, 512, 10000, False, torch.float32)
    positions, key = torch.arange(3, 9), torch.randn(6, 1, 64)
    heads = torch.randn(6, 4, 64)
    wanted, _ = rotary.forward_native(positions, heads, key)
    flat, _ = rotary.forward_native(positions, heads.flatten(0, 1)[:6, None], key)
    found, one, row = heads.clone(), heads[:, :1].clone(), heads.flatten(1)
    rotary.forward_cpu(positions, found, key.clone())
    rotary.forward_cpu(positions, one, key.clone())
    rotary.forward_cpu(positions, row, key.flatten(1))
    first = torch.allclose(found.flatten(0, 1)[:6], flat[:, 0], atol=1e-5)
    return [
        (torch.allclose(one, wanted[:, :1], atol=1e-5), "rotary kernel, one head: equal"),
        (torch.allclose(row.view_as(wanted), wanted, atol=1e-5), "the same, [T, heads * D]: equal"),
        (not torch.allclose(found, wanted, atol=1e-2), "the same, [T, heads, D]: wrong"),
        (first, "there row i < T of the T * heads rows has the rotation of token i"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
