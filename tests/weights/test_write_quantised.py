"""`mtpc quantize`: what is written, what stays plain, and that nothing half-written appears."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpc.cli.main import main
from mtpc.errors import CheckpointError
from mtpc.weights import shards
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.grouped import VALUES
from mtpc.weights.grouped_recipes import GroupSpec
from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.write_quantised import quantise_checkpoint

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
PLAIN = (
    "model.embed_tokens.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.2.eh_proj.weight",
    "lm_head.weight",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in two files, with a tokenizer."""
    directory = tmp_path / "plain"
    directory.mkdir()
    torch.manual_seed(0)
    one = {UP: torch.randn(40, 64).bfloat16(), "model.norm.weight": torch.ones(64).bfloat16()}
    two = {name: torch.randn(8, 64).bfloat16() for name in (*PLAIN, DOWN)}
    save_file(one, directory / "a.safetensors")
    save_file(two, directory / "b.safetensors")
    (directory / "config.json").write_text(json.dumps({"dtype": "bfloat16", "vocab_size": 8}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_the_command(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two weights become codes; all else is bit for bit what it was; the tokenizer comes along."""
    out = source.parent / "out"
    assert main(["quantize", str(source), str(out), "--scheme", "int4-g32"]) == 0
    assert "2 weights in int4-g32, 4 matrices plain; " in capsys.readouterr().out
    before, after = Checkpoint(source), Checkpoint(out)
    assert after.specs.keys() == {UP, DOWN}
    assert after.tensors.keys() == before.tensors.keys()
    for name in before.tensors:
        spec = after.specs.get(name)
        if spec is None:
            assert torch.equal(after.tensor(name), before.tensor(name))
            continue
        expected = quantise(before.tensor(name), spec)
        assert torch.equal(after.grouped(name).whole().codes, expected.codes)
        assert torch.equal(after.grouped(name).whole().scales, expected.scales)
    assert {p.name for p in out.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {name.removesuffix(".weight") for name in PLAIN}


def test_a_pipe_gets_a_few_lines(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many tensors there are."""
    assert main(["quantize", str(source), str(source.parent / "out"), "--scheme", "fp8"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("] ")[2] for line in lines[:-1]] == ["quantise 7 tensors"]
    assert "done in" in lines[-1]


def test_heads_and_patterns(source: Path) -> None:
    quantise_checkpoint(source, source.parent / "out", "int8", head=True, keep=("*.up_proj",))
    assert Checkpoint(source.parent / "out").specs.keys() == {DOWN, "lm_head.weight"}


@pytest.mark.parametrize("scheme", ["int4-g32", "int8", "fp8"])
def test_files_of_limited_size(scheme: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is written when it is full; the index names the place of every tensor."""
    monkeypatch.setattr(shards, "_SHARD_BYTES", 1000)
    written = quantise_checkpoint(source, source.parent / "out", scheme, keep=("*.down_proj",))
    places = json.loads((source.parent / "out/model.safetensors.index.json").read_text())
    files = set(places["weight_map"].values())
    assert len(files) > 2
    held = {(n, f) for f in files for n in load_file(source.parent / "out" / f)}
    assert held == set(places["weight_map"].items())
    assert places["metadata"]["total_size"] == written.bytes_after
    assert Checkpoint(source.parent / "out").specs.keys() == {UP}


def test_nothing_half_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is not finite ends the run after other tensors were written."""
    monkeypatch.setattr(shards, "_SHARD_BYTES", 1)
    tensors = load_file(source / "b.safetensors")
    tensors[PLAIN[1]][3, 5] = torch.nan
    save_file(tensors, source / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) hold NaN or infinity: {PLAIN[1]}"):
        quantise_checkpoint(source, source.parent / "out", "fp8")
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize(
    ("scheme", "out", "message"),
    [
        (
            "int4_g32",
            "out",
            "error: scheme is 'int4_g32' (the nearest is 'int4-g32'); expected one",
        ),
        ("iq4_nl", "out", "which GGUF files have, and "),
        ("int8", "plain", "plain exists; expected the name of a new directory"),
        ("int8", "no/out", "error: cannot write "),
        ("int4-g128", "out", "has no weight that int4-g128 fits; expected matrices whose number"),
    ],
)
def test_errors(
    scheme: str, out: str, message: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(source), str(source.parent / out), "--scheme", scheme]) == 2
    assert message in capsys.readouterr().err
    assert list(source.parent.iterdir()) == [source]


def test_a_quantised_checkpoint_is_refused(source: Path) -> None:
    out = source.parent / "out"
    quantise_checkpoint(source, out, "fp8")
    with pytest.raises(
        CheckpointError, match="is quantised already; expected a checkpoint of plain"
    ):
        quantise_checkpoint(out, source.parent / "again", "fp8")


def _one_by_one(weight: torch.Tensor, spec: GroupSpec) -> torch.Tensor:
    """Squared errors of each group by the search as it is described, in float64, of each group:
    every scale that is tried, and the best one for the codes that it gives."""
    kind, dtype = spec.form.kind, getattr(torch, spec.scales)
    groups = weight.double().reshape(-1, spec.form.group)
    numbers = torch.tensor(VALUES.get(kind) or range(*_RANGES[kind])).double()
    factors = [factor for each in _FACTORS[kind] for factor in torch.linspace(*each).tolist()]

    def tried(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = scales.to(dtype).double()[:, None]
        scaled = torch.where(wide == 0, 0, groups / wide)
        if kind in VALUES:
            codes = numbers[(scaled[..., None] - numbers).abs().argmin(-1)]
        else:
            codes = scaled.round().clamp(numbers.min(), numbers.max())
        return codes, (codes * wide - groups).square().sum(-1)

    largest = groups.abs().amax(-1)
    if kind in VALUES:
        largest = torch.where(groups.amax(-1) == largest, largest, -largest)
    whole = largest / numbers.max()
    least = torch.full_like(whole, torch.inf)
    for factor in factors:
        codes, _ = tried(whole * factor)
        squares = codes.square().sum(-1)
        fitted = torch.where(squares == 0, 0, (codes * groups).sum(-1) / squares)
        least = torch.minimum(least, tried(fitted)[1])
    return least


_RANGES = {"int4": (-8, 8), "int5": (-16, 16), "int8": (-128, 128)}
_FACTORS: dict[str, list[tuple[float, float, int]]] = {
    "iq4": [(0.88, 1.06, 4), (-0.88 * 113 / 127, -1.06 * 113 / 127, 4)],
    "int4": [(0.66, 1.1, 12)],
    "int5": [(0.8, 1.1, 7)],
    "int8": [(0.85, 1.0, 5)],
}


@pytest.mark.parametrize(
    "scheme", ["iq4_nl", "int4-g32", "int4-g128", "int8-g128", "int8", "q5_0", "q8_0"]
)
def test_the_search(scheme: str) -> None:
    """By parts and threads, the error of all groups is that of one search, and that of nearly each
    is: of weights that are spread evenly, mostly small, and zero; halves between codes are among
    them."""
    torch.manual_seed(0)
    rows = [torch.randn(300, 256), torch.randn(300, 256) ** 3, torch.zeros(3, 256)]
    weight = torch.cat([*rows, torch.randint(-14, 15, (300, 256)) / 2]).bfloat16()
    spec = SCHEMES[scheme].spec(256, torch.bfloat16)
    assert spec is not None
    found = (quantise(weight, spec).dequantise() - weight.float()).double()
    error = found.reshape(-1, spec.form.group).square().sum(-1)
    wanted = _one_by_one(weight, spec)
    assert float(error.sum()) == pytest.approx(float(wanted.sum()), rel=2e-3)
    assert float((error > 1.05 * wanted + 1e-9).double().mean()) < 0.01


def test_no_threads_that_wait_for_each_other() -> None:
    """PyTorch's threads meet at the end of each operation. In hundreds of short ones they wait ten
    times longer than they work, as soon as anything else runs: rounding has its two threads, and
    each works alone. Later threads work in pairs again."""
    done = subprocess.run(
        [sys.executable, "-c", _THREADS], check=True, capture_output=True, text=True
    )
    most, later = map(int, done.stdout.split())
    assert 0 < most <= 3  # One of the search may still be in the list when the rounding begins.
    assert later == 2


_THREADS = """
import os, threading, torch
from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.rounding import feedback
torch.set_num_threads(2)
weight, moments = torch.randn(600, 1024).bfloat16(), torch.eye(1024)[None]
feedback(moments)  # Its products are large: they are for PyTorch's threads.
count = lambda: len(os.listdir("/proc/self/task"))
before, most, ends = count() + 1, 0, threading.Event()
def watch():
    global most
    while not ends.wait(0.001):
        most = max(most, count())
watching = threading.Thread(target=watch)
watching.start()
for name in ("iq4_nl", "int4-g32", "int8", "fp8"):
    for known in (None, moments):
        quantise(weight, SCHEMES[name].spec(1024, weight.dtype), known)
        while count() > before:
            ends.wait(0.01)  # Threads that were joined leave the list a little later.
ends.set()
watching.join()
later = []
thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
thread.start()
thread.join()
print(most - before, *later)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """4.5 GiB are written in less than 4 GiB: a file of them is held at a time, and one tensor."""
    source, out = tmp_path / "plain", tmp_path / "out"
    source.mkdir()
    writer = shards.ShardWriter(source)
    for index in range(64):
        name = UP.replace("0", str(index))
        writer.add({name: torch.randn(8192, 4096, dtype=torch.bfloat16)})
    writer.add({PLAIN[0]: torch.zeros(65536, 4096, dtype=torch.bfloat16)})
    writer.finish()
    (source / "config.json").write_text(json.dumps({"dtype": "bfloat16", "vocab_size": 65536}))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, source, out], check=True, capture_output=True, text=True
    )
    peak = int(done.stdout)
    assert sum(file.stat().st_size for file in out.glob("*.safetensors")) > 2.5 * 2**30
    for path in (source, out):
        shutil.rmtree(path)
    print(f"peak {peak / 2**30:.2f} GiB")
    assert peak < 4 * 2**30


_MEASURED = """
import resource, sys
from pathlib import Path
from mtpc.weights.write_quantised import quantise_checkpoint
quantise_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), "fp8")
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
