"""A released GGUF file of Qwen2, at the path in MTPC_TEST_GGUF, beside transformers in float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen2ForCausalLM

import mtpc
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.served_model import ServedModel

FILE = os.environ.get("MTPC_TEST_GGUF")
PROMPTS = [
    "def quicksort(arr):",
    "The capital of France is",
    "class Account:\n    def __init__(self, owner):\n        self.owner = owner\n" * 4,
    "SELECT name, COUNT(*) FROM",
    "import numpy as np\n\ndef softmax(x):",
    "Once upon a time, in a small village by the sea,",
    "#include <stdio.h>\n\nint main(void) {",
    "The three laws of motion are:\n1.",
    "function debounce(callback, delay) {",
    "Water boils at",
    "fn fibonacci(n: u64) -> u64 {",
    "To sort a list of numbers by hand, first",
    "<html>\n<head>\n<title>My page</title>",
    "A binary search tree is",
    'package main\n\nimport "fmt"\n',
    "Question: What is 17 times 23?\nAnswer:",
    "def test_addition():\n    assert",
    "Les Miserables was written by",
    "# Installation\n\nTo install the package, run",
    "for i in range(10):\n    print(",
]
NEW_TOKENS = 100
LARGEST_GAP = 1.0
"""Logits of this model have a standard deviation of about 3."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE, reason="MTPC_TEST_GGUF names no file"),
]


def theirs(path: Path) -> Qwen2ForCausalLM:
    """transformers' model with the values of gguf's own dequantiser, by gguf's own names."""
    gguf = pytest.importorskip("gguf")
    entries = Checkpoint(path).config
    config = AutoConfig.for_model(**{n: v for n, v in entries.items() if "quant" not in n})
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = {}
    for name in model.state_dict():
        tensor = stored.pop(table.get_name(name, (".weight", ".bias")))
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values[name] = torch.from_numpy(plain.copy()).float()
    assert not stored, "every tensor has its place"
    model.load_state_dict(values, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_text() -> None:
    """The same in each batch and chunk; float32 finds each token nearly as likely as its own."""
    path = Path(str(FILE))
    texts = []
    for batch, chunk in ((1, 64), (8, 512)):
        spec = mtpc.compile(path, batch_buckets=(batch,), prefill_chunk=chunk, max_len=512)
        assert spec.options.tiers == (0,)
        assert not [line for line in spec.stats.fallbacks if "quantised" in line]
        groups = [PROMPTS[i : i + batch] for i in range(0, len(PROMPTS), batch)]
        results = [result for group in groups for result in spec.generate(group, NEW_TOKENS)]
        texts.append([list(result.token_ids) for result in results])
        spec.close()
    assert texts[0] == texts[1]
    vocabulary = Checkpoint(path).config["vocab_size"]
    served, model = ServedModel("the file", vocabulary, (), path), theirs(path)
    for prompt, tokens in zip(PROMPTS, texts[0], strict=True):
        before = served.encode(prompt)
        with torch.inference_mode():
            logits = model(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        parted = [(i, round(float(gap), 3)) for i, gap in enumerate(gaps) if gap > 0]
        print(repr(prompt[:20]), len(tokens), parted)
        assert gaps.max() < LARGEST_GAP


def test_chat() -> None:
    """The template and the special tokens are those of the file."""
    path = Path(str(FILE))
    served = ServedModel("the file", Checkpoint(path).config["vocab_size"], (), path)
    ids = served.encode_messages([{"role": "user", "content": "hi"}])
    assert served.decode(ids, special_tokens=True).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(ids) < 40, "special tokens are one token each"
