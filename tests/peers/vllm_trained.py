"""Does vLLM accept as many drafts of what `mtpc train-draft` wrote as mtpc does?

    python tests/peers/vllm_trained.py --vllm-python VENV/bin/python [--forms mtp eagle3]
    python tests/peers/vllm_trained.py --vllm-python ... --target FILE.gguf --draft DIR

A tiny Qwen2 without drafts is trained for seconds, and then a drafter of each form for it. vLLM's
CPU build and mtpc decode with both, in float32: tokens, and drafts accepted at each position, are
compared. Exits with 1 where they differ.

With `--target`, a Qwen2 of any size whose weights are not in codes, and its drafter: they answer
the prompts of `benchmarks.copies`, code and prose, in each of `--dtypes`. In bfloat16 both programs
round, at other places. Texts may then part where rounding decides, which is shown; and where texts
are equal, drafts of both are counted and not compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from agreement import NEW_TOKENS, PROMPTS, Counts, Work, compare, compare_all, make_work, run_mtpc
from helpers.word_model import word_checkpoint, write_text
from vllm_agreement import CHANGES, ask_vllm, make_trained, rounding_decides, vllm_options

from benchmarks.copies import prompts
from mtpc.models.eagle3 import ARCHITECTURES
from mtpc.models.load import load
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
REAL_NEW_TOKENS, REAL_MAX_LEN = 64, 2048


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--spec-tokens", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--requests", type=int, default=4 * len(PROMPTS))
    parser.add_argument("--target", type=Path, metavar="PATH", help="instead of the tiny one")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="the drafter of --target")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of --target")
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.target is not None:
        return compare_all(args.dtypes, partial(make_real, args), partial(agree_real, args))
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


def make_real(args: argparse.Namespace, dtype: str, directory: Path) -> None:
    """The user's target as vLLM reads one, in a dtype, and its drafter in `draft` below it."""
    load(args.target, dtype, needs_mtp=False).target.save_pretrained(directory)
    (directory / "draft").symlink_to(args.draft.resolve())


def agree_real(args: argparse.Namespace, dtype: str, directory: Path) -> Counts:
    """How mtpc's cpu backend and vLLM compare on the user's target and drafter, by K.

    Raises:
        Refused: vLLM does not run it.
    """
    served = load(args.target, dtype, needs_mtp=False, headers_only=True).served()
    texts = [text for *_, text in prompts(args.requests // 2)]
    asked = [served.encode_messages([{"role": "user", "content": text}]) for text in texts]
    written = json.loads((args.draft / "config.json").read_text())["architectures"]
    form = "eagle3" if set(written) & set(ARCHITECTURES) else "mtp"
    return agree(args, form, directory, Work(asked, REAL_NEW_TOKENS, REAL_MAX_LEN), dtype, "cpu")


def agree(
    args: argparse.Namespace,
    form: str,
    directory: Path,
    work: Work,
    dtype: str = "float32",
    backend: str = "eager",
) -> Counts:
    """How mtpc and vLLM compare on a target and its drafter, by K.

    Raises:
        Refused: vLLM does not run it.
    """
    options = [vllm_options(FAMILY, directory, k) | OF_TARGET[form] for k in args.spec_tokens]
    for each in options:
        each["speculative_config"]["method"] = form
        each |= {"dtype": dtype, "max_model_len": work.max_len}
    theirs = ask_vllm(args.vllm_python, directory, options, work)
    rounds = "" if dtype == "float32" else f"both round to {dtype}"

    def excused(prompt: list[int], one: list[int], other: list[int]) -> bool:
        return bool(rounds) and rounding_decides(directory, prompt, one, other, torch.float32)

    found = {}
    for k, answers in zip(args.spec_tokens, theirs, strict=True):
        ours = run_mtpc(directory, k, work, dtype, {}, backend)
        found[f"K={k}"] = compare(work, ours, answers, excused, rounds)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
