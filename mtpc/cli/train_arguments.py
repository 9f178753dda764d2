"""Arguments of the commands that train drafts: `mtpc tune-head` and `mtpc train-draft`."""

from __future__ import annotations

from pathlib import Path

from mtpc.cli.compile_arguments import add_compile_options
from mtpc.cli.parsing import SuggestingParser, above_zero, add_switches, add_values, positive, whole

FORMS = ("mtp", "eagle3")
"""Of `mtpc.tuning.forms`, which imports torch."""


def add_tune_head(parser: SuggestingParser) -> None:
    text = "directory with config.json and *.safetensors, or an id of the Hugging Face hub"
    parser.set_defaults(form=None)
    _add_training(parser, text, length=192, learning_rate=1e-3)


def add_train_draft(parser: SuggestingParser) -> None:
    parser.set_defaults(module="tune_head")
    text = "mtp: one MTP layer as MiMo's; eagle3: a head fed by three layers (default: mtp)"
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help=text)
    text = "directory or GGUF file of the target, or an id of the Hugging Face hub"
    _add_training(parser, text, length=256, learning_rate=3e-4)


def _add_training(
    parser: SuggestingParser, checkpoint: str, length: int, learning_rate: float
) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=checkpoint)
    text = "UTF-8 files to train on; the last tenth of each is held out"
    add("texts", nargs="+", type=Path, metavar="TEXT", help=text)
    add("--out", type=Path, required=True, metavar="OUT", help="the new directory")
    text = "a file of held-out text instead; repeatable"
    add("--held-out", action="append", default=[], type=Path, metavar="TEXT", help=text)
    text = "most texts to train on; the model writes the last three quarters of each"
    drafts = "the most tokens that drafts learn: the model's most frequent ones on the texts"
    disk = "most bytes of what the model says of the texts; fewer texts are used for less"
    add_values(
        parser,
        ("--minutes", above_zero, "M", "train for M minutes (default: 10, without --steps)"),
        ("--steps", positive, "N", "train for at most N steps"),
        ("--learning-rate", above_zero, "R", "the highest learning rate", learning_rate),
        ("--batch", positive, "N", "texts per step", 12),
        ("--length", positive, "N", "tokens of a text", length),
        ("--seed", whole, "N", "seed of the order of texts", 0),
        ("--continuations", positive, "N", text, 2048),
        ("--prompts", positive, "N", "held-out prompts", 64),
        ("--vocabulary", positive, "N", drafts, 8192),
        ("--disk", positive, "BYTES", disk, 4 << 30),
    )
    text = "new tokens per held-out prompt (default: %(default)s)"
    add("-n", "--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    add_switches(parser, ("--resume", "continue an interrupted run"))
    add_values(parser, ("--json", Path, "FILE", "write acceptance and losses as JSON"))
    add_compile_options(parser, cache=True, spec_tokens="3", batch_buckets="32")
