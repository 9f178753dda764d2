"""`mtpc vocab`: list the tokens that occur in texts, for `--draft-vocab`."""

from __future__ import annotations

import argparse
from collections import Counter

from mtpc.cli.demo import chosen_checkpoint
from mtpc.errors import RequestError
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.plain_file import read_text, write_output
from mtpc.weights.served_model import ServedModel


def command(args: argparse.Namespace) -> int:
    directory = chosen_checkpoint(args.checkpoint)
    Checkpoint(directory)  # Raises if the directory is not a checkpoint.
    served = ServedModel(str(directory), 0, (), directory)
    counts: Counter[int] = Counter()
    for path in args.texts:
        counts.update(served.encode(read_text(path)))
    kept = counts.most_common(args.tokens)
    if not kept:
        raise RequestError("the texts hold no tokens; give files with text that suits the model")
    lines = "".join(f"{token_id}\n" for token_id, _ in sorted(kept))
    write_output(args.out, lines.encode())
    share = sum(count for _, count in kept) / counts.total()
    print(f"{args.out}: {len(kept)} of {len(counts)} tokens seen, {share:.1%} of the texts")
    return 0
