"""Does vLLM emit the same with whole iterations as mtpc's steps (`StepWorker`) as with its own?

    tests/peers/vllm_setup.sh VENV DIST
    python tests/peers/vllm_steps.py --vllm-python VENV/bin/python [--cases mimo glm4_moe]

For each family a tiny checkpoint, trained for seconds so that drafts are accepted in part. vLLM's
CPU build decodes it plainly (its own forward, no drafts), and with mtpc's worker in the place of
its own, K = 3: prompts one by one, one that begins as an earlier one did (prefix cache), one longer
than an iteration; then all of them in one batch, over a pool so small that vLLM preempts. Texts are
compared with vLLM's plain ones; texts, sampled ones among them, and accepted drafts, prompt by
prompt and position by position, with mtpc's own engine; and a decoding iteration is one replay of
one graph. Exits with 1 where anything differs. Recurrent kernels of vLLM take bfloat16 alone: there
a text may leave vLLM's own where rounding decides, and it still has to be that of mtpc's engine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agreement import PROMPTS, ROOT, Decoded, Work, ask, run_mtpc
from recorded import keep
from vllm_agreement import (
    CHANGES,
    DTYPES,
    decoded,
    make_trained,
    rounding_decides,
    vllm_options,
    without_torchvision,
)

from benchmarks.peers import vllm_host

CASES = ("mimo", "glm4_moe", "deepseek_v3", "qwen3_next")
HYBRID = ("qwen3_next",)
"""Without vLLM's prefix cache: pages do not carry recurrent state."""
LATENT = ("deepseek_v3",)
"""For latents vLLM's CPU build turns off the prefix cache and chunks of prompts."""
LONG = [(7 * i + 3) % 60 for i in range(70)]
GREEDY = [*PROMPTS, LONG, [*LONG[:66], 1, 2]]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 7},
    {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 8},
]
WORK = Work([*GREEDY, *PROMPTS[1:3]], new_tokens=24, sampling=[*[{}] * len(GREEDY), *SAMPLED])
ITERATION, PAGE, BLOCKS = 40, 16, 11
"""Tokens of an iteration, fewer than the longest prompt; and a pool of fewer blocks than all
requests together need."""
TRAINING_STEPS = 20
"""So few that drafts are accepted in part."""
WORKER = "mtpc.integrations.vllm.step_worker.StepWorker"
CHECK = "mtpc.integrations.vllm.step_requests:StepRequests"


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="keep figures for the docs")
    args = parser.parse_args()
    faults = []
    with tempfile.TemporaryDirectory() as kept:
        for case in args.cases:
            directory = Path(kept) / case
            make_trained(case, directory, CHANGES[case], TRAINING_STEPS)
            faults += check(args, case, directory)
    print("\n".join(faults) or "All agree.")
    return 1 if faults else 0


def check(args: argparse.Namespace, case: str, directory: Path) -> list[str]:
    """Faults of one checkpoint."""
    k, dtype = args.spec_tokens, DTYPES.get(case, "float32")
    plain, alone, together = run_vllm(args.vllm_python, case, directory, k)
    theirs, found = decoded(plain), decoded(alone)
    backend = "cpu" if dtype == "bfloat16" else "eager"
    ours = run_mtpc(directory, k, WORK, dtype, {}, backend)
    faults = check_replays(case, k, found, alone["replays"])
    if not together["counts"]["vllm:num_preemptions"]:
        faults.append(f"{case}: vLLM did not preempt: a pool of {BLOCKS} blocks is too large")
    for prompt, asked, step, own, host, batched in zip(
        WORK.prompts, WORK.sampling, found, ours, theirs, together["tokens"], strict=True
    ):
        if step != own:
            faults.append(f"{case}: prompt {prompt}: {step}, mtpc's own engine {own}")
        excused = dtype == "bfloat16" and rounding_decides(
            directory, prompt, step.tokens, host.tokens
        )
        if step.tokens != host.tokens and not asked and not excused:
            faults.append(f"{case}: prompt {prompt}: {step.tokens}, vLLM alone {host.tokens}")
        if batched != step.tokens:
            faults.append(f"{case}: prompt {prompt}: {step.tokens}, in a batch {batched}")
    others = [
        own if asked else host for asked, own, host in zip(WORK.sampling, ours, theirs, strict=True)
    ]
    equal = [one.tokens == other.tokens for one, other in zip(found, others, strict=True)]
    report(args, case, found, equal)
    print(f"  replays: alone {alone['replays']}, in a batch {together['replays']}", flush=True)
    return faults


def check_replays(case: str, k: int, found: list[Decoded], replays: dict[str, int]) -> list[str]:
    """Faults: a decoding iteration that was not one replay of one graph; drafts that were all
    accepted, or none, which shows nothing."""
    decoding = {name: count for name, count in replays.items() if name.startswith("decode")}
    iterations = sum(each.drafted for each in found) // k
    accepted = sum(sum(each.accepted) for each in found)
    wrong = {
        f"{decoding} replays for {iterations} iterations": (
            sum(decoding.values()) != iterations
            or not all(name.endswith(": step") for name in replays)
        ),
        f"{accepted} drafts accepted": not 0 < accepted < k * iterations,
    }
    return [f"{case}: {what}" for what, is_so in wrong.items() if is_so]


def report(args: argparse.Namespace, case: str, found: list[Decoded], equal: list[bool]) -> None:
    """Print what was accepted, and keep it if the user asks for it."""
    accepted = [sum(column) for column in zip(*(each.accepted for each in found), strict=True)]
    drafts = sum(each.drafted for each in found) // args.spec_tokens
    texts = f"{sum(equal)} of {len(equal)} texts are vLLM's (sampled ones: mtpc's)"
    print(f"{case}: {texts}, accepted by position {accepted} of {drafts}")
    if args.record:
        name = f"{case}, mtpc-step, K={args.spec_tokens}"
        counts = (sum(equal), len(equal))
        keep(args.vllm_python, Path(__file__).name, name, counts, accepted, drafts)


def run_vllm(python: Path, case: str, directory: Path, k: int) -> list[dict[str, Any]]:
    """vLLM's answers, in one process: its own plain decoding; mtpc's steps, prompt by prompt and
    in one batch.

    Raises:
        Refused: it does not run the checkpoint.
    """
    steps = vllm_options(case, directory, k) | {
        "worker_cls": WORKER,
        "logits_processors": [CHECK],
        "block_size": PAGE,
        "enable_prefix_caching": case not in (*HYBRID, *LATENT),
    }
    if case not in LATENT:
        steps["max_num_batched_tokens"] = ITERATION
    batch = steps | {"max_num_seqs": len(WORK.prompts), "num_gpu_blocks_override": BLOCKS}
    jobs = [
        {"options": vllm_options(case, directory, 0), **asdict(WORK), "sampling": []},
        {"options": steps, **asdict(WORK)},
        {"options": batch, **asdict(WORK), "together": True},
    ]
    command = [str(python.absolute()), str(Path(__file__).with_name("vllm_child.py"))]
    kept = directory.parent / "caches"
    path = f"{without_torchvision(kept / 'shadow')}:{ROOT}"  # With this checkout.
    environment = vllm_host.environment(kept, 2, python.absolute()) | {"PYTHONPATH": path}
    return ask([*command, json.dumps(jobs)], {**os.environ, **environment})


if __name__ == "__main__":
    raise SystemExit(main())
