"""Train a small GLM-4 checkpoint with one MTP layer that adds numbers, and write questions.

Every answer can be verified, so the checkpoint shows what a change costs in right answers:

    OMP_NUM_THREADS=1 python examples/train_addition_model.py --out addition --minutes 6
    mtpc eval addition --task addition/held-out.jsonl --spec-tokens 0,1,2,3

A question is two numbers of three digits, and its answer their sum with the units first:
``123+967=`` is followed by ``0901``. Carries then run in the direction of the text. Held-out
questions are drawn from pairs that no training step has seen. Model, optimiser and export are those
of ``train_demo_model.py``.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from train_demo_model import (
    DEPTH_WEIGHTS,
    END_OF_TEXT,
    SHAPE,
    DemoModel,
    Run,
    export,
    new_model,
    optimise,
)
from transformers import Glm4MoeConfig, PreTrainedTokenizerFast

DIGITS, BATCH, QUESTIONS = 3, 128, 500
ANSWER = 2 * DIGITS + 2  # the first column of an answer
HELD_OUT_ONE_IN = 50
MTP_WEIGHT = 0.5

ADDITION = SHAPE | dict(
    vocab_size=64, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
    num_hidden_layers=3, first_k_dense_replace=4, num_attention_heads=4,
    max_position_embeddings=256,
)  # fmt: skip


def is_held_out(a: int, b: int) -> bool:
    """Whether no training step may see a pair."""
    return (a * 7919 + b * 104729) % 10007 % HELD_OUT_ONE_IN == 0


def question(a: int, b: int) -> str:
    """The prompt of a pair."""
    return f"{a:0{DIGITS}d}+{b:0{DIGITS}d}="


def answer(a: int, b: int) -> str:
    """What follows the prompt: the sum, units first."""
    return f"{a + b:0{DIGITS + 1}d}"[::-1]


def draw(count: int, held_out: bool, source: random.Random) -> list[tuple[int, int]]:
    """Pairs of one of the two kinds."""
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        pair = (source.randrange(10**DIGITS), source.randrange(10**DIGITS))
        pairs += [pair] if is_held_out(*pair) == held_out else []
    return pairs


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, *"0123456789+="])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def rows(pairs: list[tuple[int, int]], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Token ids of questions with answers, [pairs, 2 * DIGITS + 2 + DIGITS + 2]."""
    texts = [question(a, b) + answer(a, b) + END_OF_TEXT for a, b in pairs]
    return torch.tensor(tokenizer(texts).input_ids)


def loss_on(model: DemoModel, ids: Tensor, depth: int) -> Tensor:
    """Cross-entropy of the answers' tokens: the target's, and of drafts up to a depth."""
    hidden = model.model(ids, use_cache=False)[0]
    states = [hidden, *model.draft_states(ids, hidden, depth)]
    loss = torch.zeros(())
    for ahead, (weight, each) in enumerate(
        zip((1.0, *(MTP_WEIGHT * w for w in DEPTH_WEIGHTS[:depth])), states, strict=True), start=1
    ):
        first = ANSWER - ahead  # A column predicts the token that many columns later.
        logits = model.lm_head(each[:, first:-1]).float().flatten(0, 1)
        loss = loss + weight * nn.functional.cross_entropy(logits, ids[:, ANSWER:].flatten())
    return loss


@torch.no_grad()
def right_answers(model: DemoModel, ids: Tensor) -> float:
    """The share of rows whose answer the target gives, greedily."""
    guesses = model(input_ids=ids, use_cache=False).logits[:, ANSWER - 1 : -1].argmax(-1)
    return (guesses == ids[:, ANSWER:]).all(-1).double().mean().item()


def main() -> None:
    """Train, export, and write the held-out questions."""
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=6.0, help="processor time of training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    source, tokenizer = random.Random(options.seed), new_tokenizer()
    held_out = draw(QUESTIONS, True, source)
    tests = rows(held_out, tokenizer)
    lines = [json.dumps({"prompt": question(*p), "answer": answer(*p)}) for p in held_out]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "held-out.jsonl").write_text("\n".join(lines) + "\n")
    config = Glm4MoeConfig(**ADDITION, eos_token_id=tokenizer.eos_token_id)
    run = Run(new_model(config, None), tokenizer, tests[:0], tests, tests[:, :ANSWER], options.out)

    def loss() -> Tensor:
        ids = rows(draw(BATCH, False, source), tokenizer)
        depth = source.choice((1, 1, 1, len(DEPTH_WEIGHTS)))  # A whole chain costs twice as much.
        with torch.autocast("cpu", enabled=False):  # bfloat16 is slower for sizes this small.
            return loss_on(run.model.train(), ids, depth)

    def measure() -> dict[str, float]:
        return {"held_out_right": right_answers(run.model, tests)}

    optimise(run, loss, measure, options.minutes, peak=6e-3)
    export(run)
    record = {"minutes": options.minutes, "seed": options.seed, "curve": run.curve}
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
