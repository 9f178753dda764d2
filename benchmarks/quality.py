"""The cost of quantisation: perplexity, and how often the next token stays the same.

    python -m benchmarks.quality [CHECKPOINT] [--texts FILE ...]

Perplexity is that of transformers with the dequantised weights, over windows of the texts.
Agreement is the share of positions at which mtpc's cpu backend, which also rounds activations,
chooses the token that transformers chooses with the plain weights; both have the same text before
the position. The default texts are Python's help topics (`pydoc_data`), which suit the demo model.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

import mtpc
from mtpc.cli.demo import chosen_checkpoint
from mtpc.models.hf import model_class
from mtpc.models.load import find_family
from mtpc.models.read_config import read_config
from mtpc.option_checks import SCHEMES
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.served_model import ServedModel
from mtpc.weights.write_quantised import quantise_checkpoint

WINDOW = 128
STRIDE = 16
"""A choice is compared at every so many tokens of a window."""


@dataclass(frozen=True)
class Quality:
    """A model's results on the windows.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of a token.
        choices: the most likely token at each place, [windows, WINDOW].
    """

    perplexity: float
    choices: torch.Tensor


@torch.no_grad()
def quality(checkpoint: Path, windows: torch.Tensor) -> Quality:
    """Run transformers on a checkpoint's dequantised weights, in bfloat16."""
    stored = Checkpoint(checkpoint)
    family = find_family(stored.config["architectures"])
    target = model_class(family).from_pretrained(
        None,
        config=read_config(stored, family),
        state_dict={name: stored.tensor(name) for name in stored.tensors},
        dtype=torch.bfloat16,
    )
    loss, choices = 0.0, []
    for window in windows:
        logits = target(window[None], use_cache=False).logits[0].float()
        loss += float(torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum"))
        choices.append(logits.argmax(-1))
    count = windows.shape[0] * (windows.shape[1] - 1)
    return Quality(math.exp(loss / count), torch.stack(choices))


def agreement(checkpoint: Path, windows: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of positions at which the cpu backend chooses the expected token."""
    spec = mtpc.compile(
        checkpoint, backend="cpu", spec_tokens=0, batch_buckets=(8,), max_len=WINDOW + 16
    )
    places = [(w, at) for w in range(len(windows)) for at in range(STRIDE - 1, WINDOW, STRIDE)]
    prompts = [windows[w, : at + 1].tolist() for w, at in places]
    found = spec.generate(prompts, max_new_tokens=1, ignore_eos=True)
    same = sum(ids == [int(expected[w, at])] for ids, (w, at) in zip(found, places, strict=True))
    return same / len(places)


def windows_of(checkpoint: Path, texts: Sequence[Path], count: int) -> torch.Tensor:
    """Token ids [windows, WINDOW], spread evenly over the texts."""
    served = ServedModel(str(checkpoint), 0, (), checkpoint)
    text = "\n".join(path.read_text() for path in texts) or "\n".join(topics.values())
    ids = torch.tensor(served.encode(text, special_tokens=False))
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[:: max(1, len(whole) // count)][:count]


def main() -> None:
    """Print a table of all schemes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: the demo model")
    parser.add_argument("--texts", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--windows", type=int, default=64, help="of 128 tokens (default: 64)")
    args = parser.parse_args()
    checkpoint = chosen_checkpoint(args.checkpoint)
    windows = windows_of(checkpoint, args.texts, args.windows)
    plain = quality(checkpoint, windows)
    same = agreement(checkpoint, windows, plain.choices)
    print(
        "| scheme | weights quantised | perplexity | same next token |\n|---|---|---|---|",
        flush=True,
    )
    print(f"| none | 0 | {plain.perplexity:.3f} | {same:.1%} |", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for scheme in SCHEMES:
            out = Path(scratch) / scheme
            written = quantise_checkpoint(checkpoint, out, scheme, head=True)
            found = quality(out, windows)
            same = agreement(out, windows, plain.choices)
            count = f"{written.quantised} of {written.quantised + len(written.plain)}"
            print(f"| {scheme} | {count} | {found.perplexity:.3f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
