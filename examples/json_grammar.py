"""Generate JSON that conforms to a schema: xgrammar on mtpc's engine, with speculative decoding.

    pip install xgrammar
    python examples/json_grammar.py
    python examples/json_grammar.py --checkpoint DIR --spec-tokens 3 --backend cpu

It compares the result with transformers' `generate` and xgrammar's own logits processor; both give
the same tokens. Without `--checkpoint` it uses the demo model that ships with mtpc, which writes
valid JSON without meaning.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import xgrammar
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging
from xgrammar.contrib.hf import LogitsProcessor

import mtpc
from mtpc.cli.demo import demo_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "statement": {"enum": ["for", "while", "with", "try"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 9999},
        "is_block": {"type": "boolean"},
    },
    "required": ["statement", "line", "is_block"],
    "additionalProperties": False,
}
PROMPTS = ("The for statement", "A try clause", "If a context manager", "The loop ends when")


class XGrammar:
    """Implements `mtpc.Grammar` with xgrammar's matcher. Each object follows one text.

    Args:
        compiled: the grammar, compiled for the checkpoint's tokenizer.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar):
        self.matcher = xgrammar.GrammarMatcher(compiled)

    def fill_mask(self, words: Tensor) -> None:
        self.matcher.fill_next_token_bitmask(words[None], 0)

    def advance(self, token_id: int) -> bool:
        return bool(self.matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)


def compile_schema(checkpoint: Path) -> xgrammar.CompiledGrammar:
    """Compile the schema for a checkpoint's tokenizer and the width of its logits."""
    config = json.loads((checkpoint / "config.json").read_text())
    ends = config["eos_token_id"]
    tokens = xgrammar.TokenizerInfo.from_huggingface(
        AutoTokenizer.from_pretrained(checkpoint),
        vocab_size=config["vocab_size"],
        stop_token_ids=[ends] if isinstance(ends, int) else ends,
    )
    # No free whitespace, because a small model might write it without end.
    schema = json.dumps(SCHEMA)
    return xgrammar.GrammarCompiler(tokens).compile_json_schema(schema, any_whitespace=False)


def plain_texts(checkpoint: Path, compiled: Any, new_tokens: int) -> list[str]:
    """Run plain constrained decoding in transformers, one prompt after the other."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **prompt_ids,
            do_sample=False,
            max_new_tokens=new_tokens,
            logits_processor=[LogitsProcessor(compiled)],
        )
        ids = out[0, prompt_ids["input_ids"].shape[1] :]
        texts.append(str(tokenizer.decode(ids, skip_special_tokens=True)))
    return texts


def main() -> int:
    """Generate and compare. Return 1 if a text differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--spec-tokens", type=int, default=2)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or demo_checkpoint()
    transformers_logging.set_verbosity_error()
    compiled = compile_schema(checkpoint)
    spec = mtpc.compile(
        checkpoint,
        spec_tokens=arguments.spec_tokens,
        backend=arguments.backend,
        dtype="float32",
        batch_buckets=(len(PROMPTS),),
        max_len=256,
    )
    grammars = [XGrammar(compiled) for _ in PROMPTS]
    texts = spec.generate(list(PROMPTS), arguments.new_tokens, grammar=grammars)
    wrong = 0
    plain_ones = plain_texts(checkpoint, compiled, arguments.new_tokens)
    for prompt, text, plain in zip(PROMPTS, texts, plain_ones, strict=True):
        wrong += text != plain
        print(prompt, "->", text, "" if text == plain else f"PLAIN DECODING: {plain}")
    print(f"{wrong} of {len(texts)} differ from plain constrained decoding")
    print(spec.stats)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
