"""A GGUF file's model in another basis: other numbers, the same function.

    python -m benchmarks.rebase PLAIN.gguf OUT.gguf

Weights that were rounded once lie on a grid, and the same format finds them again at no cost. Here
each input of a layer's matrices gets a random factor, which the norm or the matrix before it takes
back. So no grid is left, and all formats start alike. Embedding and head stay as they are.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import command
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.gguf.file import Change, GgufTensor

FAMILIES = ("qwen2", "qwen3")
"""Whose norms multiply by their weight, and whose rows files keep in order."""
FACTORS = (0.7, 1.4)
"""The smallest and the largest."""
PAIRS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
)
"""A layer's modules whose outputs nothing but the inputs of others depends on, linearly."""


def rebased(
    layer: Mapping[str, Tensor], kv_heads: int, random: torch.Generator
) -> dict[str, Tensor]:
    """A layer's tensors in a random other basis, of the dtypes that they have.

    Args:
        layer: its tensors by transformers' names, without the layer's own: "mlp.up_proj.weight".
        kv_heads: heads of keys and values; each serves as many heads of queries.
        random: what the factors are drawn from.
    """
    wide = {name: tensor.double() for name, tensor in layer.items()}
    for source, readers in PAIRS:
        outputs = [name for name in wide if name.startswith(f"{source}.")]
        count = len(wide[outputs[0]])
        low, high = torch.tensor(FACTORS, dtype=torch.float64).log()
        factors = (low + (high - low) * torch.rand(count, generator=random).double()).exp()
        for name in outputs:
            wide[name] = (wide[name].transpose(0, -1) / factors).transpose(0, -1)
        for name in (f"{reader}.weight" for reader in readers):
            heads = factors.view(kv_heads if "o_proj" in name else 1, -1)
            shared = heads.repeat_interleave(wide[name].shape[1] // count, 0)
            wide[name] = wide[name] * shared.flatten()
    return {name: tensor.to(layer[name].dtype) for name, tensor in wide.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit code."""
    parser = command.new_parser("rebase", __doc__)
    parser.add_argument("source", type=Path, help="GGUF file of plain weights")
    parser.add_argument("out", type=Path, help="the new file")
    args = parser.parse_args(argv)
    checkpoint, random = Checkpoint(args.source), torch.Generator().manual_seed(0)
    config = checkpoint.text_config
    if config["model_type"] not in FAMILIES:
        parser.error(f"a model of {config['model_type']}; expected one of {', '.join(FAMILIES)}")
    shutil.copyfile(args.source, args.out)
    with args.out.open("r+b") as target:
        for number in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{number}."
            names = checkpoint.names(prefix)
            layer = {name.removeprefix(prefix): checkpoint.tensor(name) for name in names}
            made = rebased(layer, config["num_key_value_heads"], random)
            for name, tensor in made.items():
                stored = checkpoint.stored[prefix + name]
                assert isinstance(stored, GgufTensor)
                assert stored.change == Change()
                target.seek(stored.begin)
                target.write(tensor.contiguous().view(torch.uint8).numpy().data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
