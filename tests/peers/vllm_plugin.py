"""Does vLLM emit and accept the same with mtpc's draft model as with its own, of one checkpoint?

    tests/peers/vllm_setup.sh VENV DIST
    python tests/peers/vllm_plugin.py --vllm-python VENV/bin/python --dist DIST

For each family a random tiny checkpoint, whose drafts are accepted by accident, and one trained
for seconds, whose drafts are accepted in part; greedy decoding on vLLM's CPU build without drafts,
with vLLM's draft class, and with mtpc's through its plugin. Compares the tokens, and the drafts
accepted at each position. Exits with 1 where they differ, where the other class ran, or where
nothing, or everything, was accepted of the trained checkpoints' drafts. That vLLM's own class
leaves the text without drafts is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from agreement import NEW_TOKENS, PROMPTS, ROOT
from helpers import tiny
from recorded import keep
from vllm_agreement import CHANGES, make_trained, vllm_options

from benchmarks.peers import vllm_host

FAMILIES = ("mimo", "glm4_moe", "deepseek_v3", "qwen3_next", "glm4_moe_lite", "exaone_moe")
"""Whose draft classes the plugin takes the place of."""
OURS = "mtpc.integrations.vllm.draft_model.TracedMTP"
NAME = "vllm:spec_decode_num_"
KINDS = ("random", "trained")
Case: TypeAlias = tuple[str, str]
"""Family and kind of checkpoint."""
Answers: TypeAlias = dict[tuple[str, str, int], dict[str, Any]]
"""By family, kind and number of drafts."""


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--dist", type=Path, required=True, help="where mtpc is installed")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--spec-tokens", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--compiled", action="store_true", help="not enforce_eager")
    parser.add_argument("--together", action="store_true", help="all prompts in one batch")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--quantize", metavar="SCHEME", help="of `mtpc quantize`")
    parser.add_argument("--record", action="store_true", help="keep figures for the docs")
    parser.add_argument("--dtype", help="instead of the one that vLLM runs most exactly")
    parser.add_argument("--training-steps", type=int, help="more of them make margins larger")
    parser.add_argument("--keep", nargs="*", default=[], help="modules that stay plain")
    args = parser.parse_args()
    cases = [(family, kind) for kind in args.kinds for family in args.families]
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name)
        for family, kind in cases:
            make(family, kind, kept / f"{family}-{kind}", args)
        host = run(cases, [0, *args.spec_tokens], False, kept, args)
        ours = run(cases, args.spec_tokens, True, kept, args)
    bad = sum(compare(case, host, ours, args.spec_tokens) for case in cases)
    if args.record:
        for (family, kind), k in product(cases, args.spec_tokens):
            record(args, f"{family}, {kind}, K={k}", host[family, kind, k], ours[family, kind, k])
    print("all agree" if not bad else f"{bad} comparison(s) failed")
    return 1 if bad else 0


def make(family: str, kind: str, directory: Path, args: argparse.Namespace) -> None:
    """A checkpoint, quantised if the user asks for it."""
    plain = directory if args.quantize is None else directory.with_name(f"{directory.name}-plain")
    if kind == "random":
        tiny.make_checkpoint(family, plain, **CHANGES[family])
    else:
        make_trained(family, plain, CHANGES[family], args.training_steps)
    if args.quantize is None:
        return
    keep = ["--keep", *args.keep] if args.keep else []
    command = ["quantize", str(plain), str(directory), "--scheme", args.quantize, *keep]
    subprocess.run([sys.executable, "-m", "mtpc", *command], cwd=ROOT, check=True)


def compare(case: Case, host: Answers, ours: Answers, spec_tokens: list[int]) -> int:
    """Report on one checkpoint; returns how many comparisons failed."""
    family, kind = case
    bad = 0
    for k in spec_tokens:
        theirs, answer = host[*case, k], ours[*case, k]
        found = faults(kind, theirs, answer)
        bad += bool(found)
        accepted, drafted = of(answer)
        print(f"{family} {kind} K={k}: {'; '.join(found) or 'agree'}")
        for whose, drafted_text in (("vLLM's own", theirs), ("mtpc's", answer)):
            if drafted_text["tokens"] != host[*case, 0]["tokens"]:
                print(f"  note: with {whose} class the text is not that without drafts")
        print(f"  accepted by position: mtpc {accepted}, vLLM {of(theirs)[0]}; ", end="")
        print(f"drafted: {drafted}, {of(theirs)[1]}; class: {answer['draft_class']}")
    return bad


def record(args: argparse.Namespace, case: str, theirs: Any, ours: Any) -> None:
    """Keep the figures of a pair of answers."""
    pairs = list(zip(theirs["tokens"], ours["tokens"], strict=True))
    accepted, drafted = of(ours)
    texts = (sum(one == other for one, other in pairs), len(pairs))
    keep(args.vllm_python, Path(__file__).name, case, texts, accepted, drafted // len(accepted))


def faults(kind: str, theirs: Any, ours: Any) -> list[str]:
    """What is wrong with a pair of answers."""
    accepted, drafted = of(ours)
    checks = {
        "mtpc's class did not run": ours["draft_class"] != OURS,
        "vLLM's class did not run": not theirs["draft_class"].startswith("vllm."),
        "tokens DIFFER": ours["tokens"] != theirs["tokens"],
        "accepted DIFFER": of(ours) != of(theirs),
        "acceptance proves nothing": kind == "trained" and not 0 < sum(accepted) < drafted,
    }
    return [fault for fault, is_so in checks.items() if is_so]


def of(answer: dict[str, Any]) -> tuple[list[int], int]:
    """Drafts accepted at each position, and all that were drafted."""
    counts = answer["counts"]
    return counts[f"{NAME}accepted_tokens_per_pos"], counts[f"{NAME}draft_tokens"]


def run(
    cases: list[Case], spec_tokens: list[int], plugin: bool, kept: Path, args: argparse.Namespace
) -> Answers:
    """vLLM's answers for each checkpoint and number of drafts, in one process."""
    seqs = len(PROMPTS) if args.together else 1
    jobs, keys = [], []
    for family, kind in cases:
        for k in spec_tokens:
            directory = kept / f"{family}-{kind}"
            options = vllm_options(family, directory, k, seqs, eager=not args.compiled)
            options["tensor_parallel_size"] = args.tensor_parallel_size
            options["dtype"] = args.dtype or options["dtype"]
            job = {"options": options, "prompts": PROMPTS, "new_tokens": NEW_TOKENS}
            jobs.append(job | {"together": args.together})
            keys.append((family, kind, k))
    python = args.vllm_python.absolute()
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("vllm_child.py")), json.dumps(jobs)],
        env=os.environ
        | vllm_host.environment(kept / "caches", 2, python, args.tensor_parallel_size)
        | {"PYTHONPATH": str(args.dist), "VLLM_PLUGINS": "mtpc" if plugin else ""},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
    return dict(zip(keys, json.loads(done.stdout.splitlines()[-1]), strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
