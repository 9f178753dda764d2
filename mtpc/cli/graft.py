"""`mtpc graft`: put the MTP layers of a base back into a fine-tune that lost them."""

from __future__ import annotations

import argparse
import sys

from mtpc.cli.tables import format_bytes
from mtpc.layout.terminal import show_progress


def command(args: argparse.Namespace) -> int:
    with show_progress(sys.stderr) as tell:
        tell("import torch and transformers")
        from mtpc.models.graft import graft

        grafted = graft(args.base, args.finetune, args.out, tell)
    replaced = f", {grafted.replaced} of which replace the fine-tune's" if grafted.replaced else ""
    print(
        f"{args.out}: {grafted.tensors} MTP tensors ({format_bytes(grafted.nbytes)}) of "
        f"{args.base}{replaced}; {grafted.others} tensors of {args.finetune}"
    )
    for name, value in grafted.entries.items():
        print(f"config.json: {name} = {value}")
    for name in grafted.left_out:
        print(f"left out: {name}, which equals the base's and no longer fits the vocabulary")
    return 0
