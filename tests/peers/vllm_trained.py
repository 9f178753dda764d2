"""Does vLLM accept as many drafts of what `mtpc train-draft` wrote as mtpc does?

    python tests/peers/vllm_trained.py --vllm-python VENV/bin/python [--forms mtp eagle3]

A tiny Qwen2 without drafts is trained for seconds, and then a drafter of each form for it. vLLM's
CPU build and mtpc decode with both, in float32: tokens, and drafts accepted at each position, are
compared. Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from agreement import NEW_TOKENS, PROMPTS, Counts, Work, compare, compare_all, make_work, run_mtpc
from helpers.word_model import word_checkpoint, write_text
from vllm_agreement import CHANGES, ask_vllm, make_trained, vllm_options

from mtpc.tuning.forms import FORMS
from mtpc.tuning.run import Plan, Tuning
from mtpc.tuning.train import Schedule

FAMILY = "qwen2"
OF_TARGET: dict[str, dict[str, Any]] = {
    # vLLM hands features from before the final norm to the drafts of MiMo's target alone, and reads
    # the number of MTP layers in the target's config (`mimo_mtp.py`).
    "mtp": {"hf_overrides": {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}},
    "eagle3": {},
}


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--spec-tokens", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--requests", type=int, default=4 * len(PROMPTS))
    args = parser.parse_args()
    work = make_work(args.requests, NEW_TOKENS)
    return compare_all(args.forms, make, lambda form, target: agree(args, form, target, work))


def make(form: str, directory: Path) -> None:
    """A target, and in `draft` below it the drafter of a form that the command trains."""
    plain = directory.with_name(f"{form}-plain")
    make_trained(FAMILY, plain, CHANGES[FAMILY])
    shutil.rmtree(plain / "draft")
    word_checkpoint(plain, directory)
    text = write_text(directory / "text.txt")
    plan = Plan(Schedule(40, None, 8, 1e-2, 0), 16, 20, 2, 8, vocabulary=64)
    Tuning(directory, [text], [], directory / "draft", plan, {"spec_tokens": 3}, form=form).run()


def agree(args: argparse.Namespace, form: str, directory: Path, work: Work) -> Counts:
    """How mtpc and vLLM compare on a target and its drafter, by K.

    Raises:
        Refused: vLLM does not run it.
    """
    options = [vllm_options(FAMILY, directory, k) | OF_TARGET[form] for k in args.spec_tokens]
    for each in options:
        each["speculative_config"]["method"] = form
    theirs = ask_vllm(args.vllm_python, directory, options, work)
    return {
        f"K={k}": compare(work, run_mtpc(directory, k, work, "float32", {}), answers)
        for k, answers in zip(args.spec_tokens, theirs, strict=True)
    }


if __name__ == "__main__":
    raise SystemExit(main())
