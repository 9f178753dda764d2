"""Does vLLM emit and accept the same with mtpc's draft model as with its own, of one checkpoint?

    tests/peers/vllm_setup.sh VENV DIST
    python tests/peers/vllm_plugin.py --vllm-python VENV/bin/python --dist DIST

For each family a random tiny checkpoint, whose drafts are accepted by accident, and one trained
for seconds, whose drafts are accepted in part; greedy decoding on vLLM's CPU build without drafts,
with vLLM's draft class, and with mtpc's through its plugin. Compares the tokens, and the drafts
accepted at each position. Exits with 1 where they differ, where the other class ran, or where
nothing, or everything, was accepted of the trained checkpoints' drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "peers")]

import tiny  # noqa: E402
from vllm_agreement import CHANGES, HEADS, NEW_TOKENS, PROMPTS  # noqa: E402

from benchmarks import vllm_host  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    **CHANGES,
    "qwen3_next": {**HEADS, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
"""vLLM's recurrent kernel on a CPU takes heads of 128."""
DTYPES = {"qwen3_next": "bfloat16"}
"""It takes bfloat16 only. The others run in float32, where rounding moves no argmax."""
TRAINING_STEPS = {"qwen3_next": 40}
"""Margins that bfloat16 does not move: both classes round, at other places."""
OURS = "mtpc.integrations.vllm.draft_model.TracedMTP"
NAME = "vllm:spec_decode_num_"


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--dist", type=Path, required=True, help="where mtpc is installed")
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--spec-tokens", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--compiled", action="store_true", help="not enforce_eager")
    parser.add_argument("--together", action="store_true", help="all prompts in one batch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        cases = [(family, kind) for family in args.families for kind in args.kinds]
        for family, kind in cases:
            KINDS[kind](family, Path(kept) / f"{family}-{kind}")
        bad = 0
        for family, kind in cases:
            bad += compare(family, kind, Path(kept), args)
    print("all agree" if not bad else f"{bad} comparison(s) failed")
    return 1 if bad else 0


def make_trained(family: str, directory: Path) -> None:
    """A checkpoint trained for seconds."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    target = tiny.build_target(family, **eager, **SHAPES[family])
    layers = tiny.build_mtp_layers(family, target)
    tiny.train(family, target, layers, TRAINING_STEPS.get(family, 18))
    tiny.save_checkpoint(family, target, layers, directory)


def make_random(family: str, directory: Path) -> None:
    """A random checkpoint."""
    tiny.make_checkpoint(family, directory, **SHAPES[family])


KINDS = {"random": make_random, "trained": make_trained}


def compare(family: str, kind: str, kept: Path, args: argparse.Namespace) -> int:
    """Run and report one checkpoint; returns how many comparisons failed."""
    directory = kept / f"{family}-{kind}"
    plain, *host = run(directory, [0, *args.spec_tokens], False, kept, args)
    ours = run(directory, args.spec_tokens, True, kept, args)
    bad = 0
    for k, theirs, answer in zip(args.spec_tokens, host, ours, strict=True):
        found = faults(kind, plain, theirs, answer)
        bad += bool(found)
        accepted, drafted = of(answer)
        print(f"{family} {kind} K={k}: {'; '.join(found) or 'agree'}")
        print(f"  accepted by position: mtpc {accepted}, vLLM {of(theirs)[0]}; ", end="")
        print(f"drafted: {drafted}, {of(theirs)[1]}; class: {answer['draft_class']}", flush=True)
    return bad


def faults(kind: str, plain: Any, theirs: Any, ours: Any) -> list[str]:
    """What is wrong with a pair of answers."""
    accepted, drafted = of(ours)
    checks = {
        "mtpc's class did not run": ours["draft_class"] != OURS,
        "vLLM's class did not run": not theirs["draft_class"].startswith("vllm."),
        "tokens DIFFER": ours["tokens"] != theirs["tokens"],
        "tokens DIFFER from those without drafts": ours["tokens"] != plain["tokens"],
        "accepted DIFFER": of(ours) != of(theirs),
        "acceptance proves nothing": kind == "trained" and not 0 < sum(accepted) < drafted,
    }
    return [fault for fault, is_so in checks.items() if is_so]


def of(answer: dict[str, Any]) -> tuple[list[int], int]:
    """Drafts accepted at each position, and all that were drafted."""
    counts = answer["counts"]
    return counts[f"{NAME}accepted_tokens_per_pos"], counts[f"{NAME}draft_tokens"]


def run(
    directory: Path, spec_tokens: list[int], plugin: bool, kept: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """vLLM's answers for each number of drafts, in a process of its own."""
    family = directory.name.partition("-")[0]
    seqs = len(PROMPTS) if args.together else 1
    jobs = []
    for k in spec_tokens:
        options = vllm_host.arguments(str(directory), k, 128, seqs, eager=not args.compiled)
        options |= {"dtype": DTYPES.get(family, "float32"), "disable_log_stats": False}
        job = {"options": options, "prompts": PROMPTS, "new_tokens": NEW_TOKENS}
        jobs.append(job | {"together": args.together})
    python = args.vllm_python.absolute()
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("vllm_child.py")), json.dumps(jobs)],
        env=os.environ
        | vllm_host.environment(kept / "caches", 2, python)
        | {"PYTHONPATH": str(args.dist), "VLLM_PLUGINS": "mtpc" if plugin else ""},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed on {directory.name}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
