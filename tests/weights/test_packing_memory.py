"""Packing a checkpoint's weights leaves their packed form in memory, and nothing beside it."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtpc.layout import Layout
from mtpc.layout.buffers import N, P
from mtpc.models.caches import kv_specs
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.packing import fill_packed
from mtpc.weights.recipes import Grouped
from mtpc.weights.stored import StoredWeights
from mtpc.weights.weights import Weights
from mtpc.weights.write_quantised import quantization_config

LAYERS, WIDTH = 12, 4096
MIB = 2**20
CHILD = """
import sys
from pathlib import Path
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.packing import fill_packed
from mtpc.weights.recipes import Grouped
from mtpc.weights.stored import StoredWeights
from mtpc.weights.weights import Weights

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

checkpoint = Checkpoint(Path(sys.argv[1]))
ends, pieces = ("model.embed_tokens.weight",), ("codes", "scales")
known = {n: n for n in checkpoint.tensors}
weights = Weights(stored=StoredWeights(checkpoint, known, ends, fill_packed))
derived = {f"{n} {piece}": Grouped(piece, spec, n)
           for n, spec in checkpoint.specs.items() for piece in pieces}
weights.know(derived, {}, ())
first = [weights.value(name) for name in list(derived)[:2]]  # Loads what packing runs.
before = status("VmRSS")
kept = [weights.value(name) for name in list(derived)[2:]]
packed = sum(tensor.nbytes for tensor in kept)
kept.append(weights.value("model.embed_tokens.weight"))
weights.check()
print(packed, status("VmRSS") - before, status("VmHWM") - before)
"""


def write(directory: Path, vocab_size: int, width: int, codes: dict[str, int]) -> None:
    """A checkpoint of an embedding, and of square weights in codes: name -> each word of it."""
    stored = {"model.embed_tokens.weight": torch.ones(vocab_size, width, dtype=torch.bfloat16)}
    for name, word in codes.items():
        stored[f"{name}_packed"] = torch.full((width, width // 8), word, dtype=torch.int32)
        stored[f"{name}_scale"] = torch.full((width, width // 32), 0.01, dtype=torch.bfloat16)
        stored[f"{name}_shape"] = torch.tensor([width, width])
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    says = quantization_config("int4-g32", ["model.embed_tokens"])
    config = {"dtype": "bfloat16", "vocab_size": vocab_size, "hidden_size": width}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": says}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_but_packed_weights_stays(tmp_path: Path) -> None:
    """Of a projection of a 7B model's width, many times; the embedding stays in its file.

    In a process of its own, because the heap of this one has holes already.
    """
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(LAYERS)]
    write(tmp_path, 8192, WIDTH, dict(zip(names, range(LAYERS), strict=True)))
    child = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
    packed, resident, peak = map(int, done.stdout.split())
    assert packed == (LAYERS - 1) * WIDTH * WIDTH * 9 // 16
    assert resident < 1.08 * packed + 24 * MIB
    assert peak < packed + 96 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_no_request_uses_take_no_memory() -> None:
    layout = Layout(kv_specs(0, torch.bfloat16, 8, (64, 64)), {N: 4096, P: 16})
    before = resident()
    pools = [layout.allocate(name) for name in layout]
    assert not any(pool[::512].any() for pool in pools)
    assert sum(pool.nbytes for pool in pools) == 128 * MIB
    assert resident() - before < 16 * MIB
    pools[0].fill_(1)
    assert resident() - before > 48 * MIB


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Counted(Checkpoint):
    """A checkpoint that knows what was read of it."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.reads: list[str] = []

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return super().read(name)

    def whole(self, name: str) -> torch.Tensor:
        assert name not in self.quantised, f"{name} is dequantised"
        return super().whole(name)


def test_the_search_for_copied_heads_looks_at_heads_alone(tmp_path: Path) -> None:
    """Where all weights have a head's shape, too; and it compares codes, not their values."""
    layers = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)]
    head, copy, own = "lm_head.weight", "model.layers.6.head.weight", "model.layers.7.head.weight"
    write(tmp_path, 128, 128, {**dict.fromkeys(layers, 1), head: 1, copy: 1, own: 2})
    checkpoint = Counted(tmp_path)
    known, ends = {n: n for n in checkpoint.tensors}, ("model.embed_tokens.weight", head, copy, own)
    weights = Weights(stored=StoredWeights(checkpoint, known, ends, fill_packed))
    derived = {
        f"{name} {piece}": Grouped(piece, spec, name)
        for name, spec in checkpoint.specs.items()
        for piece in ("codes", "scales")
    }
    weights.know(derived, {}, ())
    made = {name: weights.value(name) for name in derived}
    layer_reads = [name for name in checkpoint.reads if name.startswith(tuple(layers))]
    assert len(layer_reads) <= 3 * 2 * len(layers), "each part once a piece, and no look at it"
    assert made[f"{copy} codes"] is made[f"{head} codes"]
    assert made[f"{own} codes"] is not made[f"{head} codes"]
    assert made[f"{layers[0]} codes"] is not made[f"{head} codes"]


RECIPES = """
import json, sys, torch
from mtpc.weights.recipes import Blocks, Cast, Join, Packed, Rows, allocate, make
held = {"a": torch.zeros(64, 8, dtype=torch.bfloat16), "b": torch.zeros(33, 8).bfloat16(),
        "wide": torch.zeros(64, 8), "stack": torch.zeros(2, 64, 8, dtype=torch.bfloat16)}
recipes = [
    "a",
    Cast("float32", "a"),
    Join("cat", ("a", "b", "a")),
    Join("cat", ("a", "wide")),
    Join("stack", ("a", "a", "a")),
    Join("cat_rows", ("stack", "stack")),
    Rows(((0, 8), (40, 48)), "a"),
    Rows(((2, 6),), "stack", -1),
    Blocks(4, 2, 9, False, "a"),
    Blocks(4, 2, 9, True, "stack"),
    Packed(Rows(((0, 32), (70, 80)), Join("cat", ("a", "b")))),
]
forms = []
for recipe in recipes:
    room, made = allocate(recipe, held.__getitem__), make(recipe, held.__getitem__)
    forms.append([[list(each.shape), str(each.dtype)] for each in (room, made)])
print(json.dumps(forms))
print(json.dumps([*{"torch._dynamo", "torch._inductor", "sympy"}.intersection(sys.modules)]))
"""


def test_room_for_weights_is_planned_without_compilers() -> None:
    """Room has the form of what is made of a recipe; torch's compilers take a second to import."""
    done = subprocess.run([sys.executable, "-c", RECIPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forms, heavy = map(json.loads, done.stdout.splitlines())
    assert len(forms) > 10
    for room, made in forms:
        assert room == made
    assert heavy == []


EARLY = """
from pathlib import Path
import torch
from mtpc.weights.early_pages import EarlyPages

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

pages, before = EarlyPages(320 << 20), resident()
steps = len([*pages.taking()])
early = [pages.early >> 20]
held = [pages.allocate((100 << 20,), torch.uint8).fill_(1), pages.allocate((30, 5), torch.float32)]
used = resident() - before
early.append(pages.early >> 20)
pages.give_back()
early.append(pages.early)
held.append(pages.allocate((7 << 20,), torch.uint8))  # Of pages that are new.
overlap = {each.untyped_storage().data_ptr() for each in held}
print(*early, steps, used, resident() - before, int(held[0].sum() >> 20), len(overlap))
"""


def test_memory_that_is_taken_early_is_used_and_the_rest_given_back() -> None:
    """In MiB: all is there before it is used, and of what is not used nothing stays."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *early, steps, used, left, written, memories = map(int, done.stdout.split())
    if not steps:
        pytest.skip("this system has no MADV_POPULATE_WRITE")
    assert steps == 20
    assert early == [320, 219, 0]
    assert 320 <= used < 340
    assert 100 <= left < 120
    assert written == 100
    assert memories == 2
