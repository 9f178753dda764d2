"""Packing a checkpoint's weights leaves their packed form in memory, and nothing beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtpc.weights.write_quantised import quantization_config

LAYERS, WIDTH = 12, 4096
MIB = 2**20
CHILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from mtpc.program.binding import WeightSource
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.packing import fill_packed
from mtpc.weights.recipes import Grouped

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

checkpoint = Checkpoint(Path(sys.argv[1]))
source, pieces = WeightSource(checkpoint, fill_packed), ("codes", "scales")
derived = {f"{n} {piece}": Grouped(piece, spec, n)
           for n, spec in checkpoint.specs.items() for piece in pieces}
record = SimpleNamespace(derived=derived, stored={n: n for n in checkpoint.tensors},
                         dtypes=dict.fromkeys(checkpoint.tensors, "bfloat16"))
first = [source.weight(name, record) for name in list(derived)[:2]]  # Loads what packing runs.
before = status("VmRSS")
kept = [source.weight(name, record) for name in list(derived)[2:]]
packed = sum(tensor.nbytes for tensor in kept)
kept.append(source.weight("model.embed_tokens.weight", record))
source.check()
print(packed, status("VmRSS") - before, status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_but_packed_weights_stays(tmp_path: Path) -> None:
    """Of a projection of a 7B model's width, many times; the embedding stays in its file.

    In a process of its own, because the heap of this one has holes already.
    """
    scales = torch.full((WIDTH, WIDTH // 32), 0.01, dtype=torch.bfloat16)
    stored = {"model.embed_tokens.weight": torch.ones(8192, WIDTH, dtype=torch.bfloat16)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.self_attn.o_proj.weight"
        stored[f"{stem}_packed"] = torch.full((WIDTH, WIDTH // 8), layer, dtype=torch.int32)
        stored[f"{stem}_scale"] = scales.clone()
        stored[f"{stem}_shape"] = torch.tensor([WIDTH, WIDTH])
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    says = quantization_config("int4-g32", ["model.embed_tokens"])
    config = {"dtype": "bfloat16", "vocab_size": 8192, "hidden_size": WIDTH}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": says}))
    child = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
    packed, resident, peak = map(int, done.stdout.split())
    assert packed == (LAYERS - 1) * WIDTH * WIDTH * 9 // 16
    assert resident < 1.08 * packed + 24 * MIB
    assert peak < packed + 96 * MIB
