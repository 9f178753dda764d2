"""Does SGLang with its own draft emit and accept the same tokens as mtpc, of one checkpoint?

    tests/peers/sglang_setup.sh VENV
    python tests/peers/sglang_agreement.py --sglang-python VENV/bin/python [--families mimo]

Takes the checkpoints of `vllm_agreement.py`, decodes them greedily in float32 with mtpc and with
SGLang under Triton's interpreter, and compares the tokens and, request by request, how many drafts
were accepted at each position. SGLang takes seconds a step. The last line of output is all counts
as JSON, or what SGLang said of a checkpoint that it does not run. Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agreement import Counts, Decoded, Work, compare, compare_all, make_work, run_mtpc
from sglang_plugin import decoded, run_host
from vllm_agreement import CHANGES, make_trained

HOST_RULES: dict[str, dict[str, Any]] = {"mimo": {"first_features": "after"}}
"""Where SGLang wires an MTP layer otherwise than mtpc (docs/models.md)."""


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--families", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--spec-tokens", nargs="+", type=int, default=[3])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=16, help="of each request")
    parser.add_argument("--batch", type=int, default=8, help="requests that SGLang runs at once")
    args = parser.parse_args()
    work = make_work(args.requests, args.new_tokens)
    return compare_all(
        args.families,
        lambda family, directory: make_trained(family, directory, CHANGES[family]),
        lambda family, directory: agree(args, family, directory, work),
    )


def agree(args: argparse.Namespace, family: str, directory: Path, work: Work) -> Counts:
    """How mtpc and SGLang compare on a checkpoint, by K.

    Raises:
        Refused: SGLang does not run it.
    """
    found = {}
    for k in args.spec_tokens:
        theirs = run_sglang(args.sglang_python, directory, k, work, args.batch)
        ours = run_mtpc(directory, k, work, "float32", HOST_RULES.get(family, {}))
        found[f"K={k}"] = compare(work, ours, theirs)
    return found


def run_sglang(
    python: Path, directory: Path, spec_tokens: int, work: Work, batch: int
) -> list[Decoded]:
    """Each prompt decoded by SGLang with its own draft.

    Raises:
        Refused: it does not run the checkpoint.
    """
    batches = [work.prompts[i : i + batch] for i in range(0, len(work.prompts), batch)]
    found = run_host(python, directory, "host", batches, work.new_tokens, spec_tokens)
    return decoded(found["answers"], spec_tokens)


if __name__ == "__main__":
    raise SystemExit(main())
