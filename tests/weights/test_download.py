"""Downloads by huggingface_hub from a hub on this machine, in processes as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers.local_hub import COMMIT, NAME, Hub, serving
from safetensors.torch import save

FIND = """
import sys
from pathlib import Path
from mtpc.errors import MtpcError
from mtpc.weights.hub import find_directory
for name in sys.argv[2:]:
    try:
        if sys.argv[1] == "find":
            print(find_directory(name))
        else:
            from mtpc.weights.checkpoint_files import CheckpointFiles
            print(sorted(CheckpointFiles(Path(name)).stored))
    except MtpcError as error:
        print("error:", error)
"""
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NEEDED = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    INDEX: json.dumps({"weight_map": {"a.weight": FIRST, "b.weight": LAST}}).encode(),
    FIRST: save({"a.weight": torch.ones(200, 100)}),
    LAST: save({"b.weight": torch.full((200, 100), 2.0)}),
}
OTHERS = {
    "README.md": b"# Model",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": save({"a": torch.ones(9)}),
    "original/consolidated.00.pth": b"pickled",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"onnx",
}
GGUF = {
    "README.md": b"# Model",
    "config.json": b"{}",
    "Model-Q4_K_M.gguf": b"four",
    "Model-UD-Q4_K_M.gguf": b"four, too",
    "mmproj-F16.gguf": b"images",
    "Q8_0/Model-Q8_0-00001-of-00002.gguf": b"first",
    "Q8_0/Model-Q8_0-00002-of-00002.gguf": b"second",
}


class Place:
    """A hub that is served, and a cache that is empty."""

    def __init__(self, hub: Hub, address: str, cache: Path):
        self.hub, self.cache = hub, cache
        self.environment = hub.environment(address, cache)
        self.snapshot = cache / "models--tiny--Model/snapshots" / COMMIT

    def start(self, *names: str, verb: str = "find", **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", FIND, verb, *names]
        own = {**self.environment, **more}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=own, stdout=pipe, stderr=pipe, text=True)

    def find(self, *names: str, verb: str = "find", **more: str) -> list[str]:
        """What a process finds of each name, or its error."""
        out, err = self.start(*names, verb=verb, **more).communicate(timeout=120)
        assert "Traceback" not in err, err
        return out.splitlines()

    def files(self) -> set[str]:
        found = (path for path in self.snapshot.rglob("*") if path.is_file())
        return {path.relative_to(self.snapshot).as_posix() for path in found}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[Mapping[str, bytes]], Place]]:
    """place(files) is a hub with this one repository."""
    with ExitStack() as stack:

        def make(files: Mapping[str, bytes]) -> Place:
            hub = Hub(files)
            return Place(hub, stack.enter_context(serving(hub)), tmp_path / "cache")

        yield make


def test_what_a_checkpoint_needs(place: Callable[..., Place]) -> None:
    """Once; a second start opens no connection. Of what is missing, what is there is kept."""
    here = place({**OTHERS, **NEEDED})
    assert here.find(NAME) == [str(here.snapshot)]
    assert here.files() == NEEDED.keys()
    assert here.hub.fetched() == dict.fromkeys(NEEDED, 1)
    before = sum(here.hub.asked.values())
    assert here.find(NAME, verb="read") == ["['a.weight', 'b.weight']"]
    assert here.find(NAME, HF_HUB_OFFLINE="1") == [str(here.snapshot)]
    assert sum(here.hub.asked.values()) == before
    for name in (LAST, "tokenizer.json"):  # As after an interrupted `hf download`.
        (here.snapshot / name).resolve().unlink()
        (here.snapshot / name).unlink()
    assert here.find(NAME) == [str(here.snapshot)]
    assert here.hub.fetched() == {**dict.fromkeys(NEEDED, 1), LAST: 2, "tokenizer.json": 2}


def test_a_download_that_is_killed(place: Callable[..., Place]) -> None:
    """What it left is not taken for whole; the next start fetches the rest alone."""
    here = place(NEEDED)
    here.hub.stalls = LAST
    process = here.start(NAME)
    assert here.hub.stalled.wait(60)
    deadline = time.monotonic() + 60
    while FIRST not in here.files() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert here.files() == NEEDED.keys() - {LAST, "config.json"}
    (error,) = here.find(NAME, HF_HUB_OFFLINE="1")
    assert "has no whole model of that id, and HF_HUB_OFFLINE forbids to download it" in error
    here.hub.stalls = ""
    assert here.find(NAME, verb="read") == ["['a.weight', 'b.weight']"]
    assert (here.snapshot / LAST).read_bytes() == NEEDED[LAST]
    assert here.hub.fetched() == {**dict.fromkeys(NEEDED, 1), LAST: 2}


def test_a_connection_that_is_lost(place: Callable[..., Place]) -> None:
    """The hub ends in the middle. One error: what failed, and that the next start goes on."""
    here = place(NEEDED)
    here.hub.stalls = LAST
    process = here.start(NAME, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert here.hub.stalled.wait(60)
    here.hub.fails = True
    out, _ = process.communicate(timeout=120)
    assert out.startswith(f"error: {NAME!r} is not a directory, the hub cache ")
    assert "its download failed (" in out
    assert "files that are whole are kept for the next start; expected" in out
    assert not here.files() & {LAST, "config.json"}


def test_two_processes_download_once(place: Callable[..., Place]) -> None:
    """As ranks do: each file is fetched by one, and both have all of them."""
    here = place(NEEDED)
    both = [here.start(NAME) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=120)[0] == f"{here.snapshot}\n"
    assert here.hub.fetched() == dict.fromkeys(NEEDED, 1)


def test_gguf_models_by_the_end_of_their_names(place: Callable[..., Place]) -> None:
    """As llama.cpp's `-hf`, in any case; all parts of a split one, and nothing else."""
    here = place(GGUF)
    several, none, plain = here.find(f"{NAME}:Q4_K_M", f"{NAME}:Q2_K", NAME)
    assert "2 GGUF models of tiny/Model have names that end in 'Q4_K_M': Model-Q4_K_M, M" in several
    assert "no GGUF model of tiny/Model has a name that ends in 'Q2_K'; it has the GGUF" in none
    assert f"{NAME} on the hub has no *.safetensors file; expected config.json with *." in plain
    for error in (none, plain):
        assert "models Model-Q4_K_M, Model-UD-Q4_K_M, Model-Q8_0: give the end of one's" in error
        assert error.endswith(f"as {NAME}:Q4_K_M")
    assert here.hub.fetched() == {}
    parts = [name for name in GGUF if name.startswith("Q8_0")]
    first = str(here.snapshot / parts[0])
    assert here.find(f"{NAME}:q8_0", f"{NAME}:model-q8_0.gguf") == [first, first]
    assert here.files() == set(parts)
    assert here.hub.fetched() == dict.fromkeys(parts, 1)
    (here.snapshot / parts[1]).resolve().unlink()
    (error,) = here.find(f"{NAME}:Q8_0", HF_HUB_OFFLINE="1")
    assert error.startswith(f"error: '{NAME}:Q8_0' is not a directory, the hub cache ")
    assert "HF_HUB_OFFLINE forbids to download it" in error
    assert error.endswith(f"run: hf download {NAME} --include '*Q8_0*'")
    assert here.find(f"{NAME}:Q8_0") == [first]
    assert (here.snapshot / parts[1]).read_bytes() == b"second"


def test_models_that_cannot_be_had(place: Callable[..., Place]) -> None:
    """One error each: offline, unknown, gated, pickled, in no format of ours, no network."""
    here = place({"config.json": b"{}", "pytorch_model.bin": b"pickled"})
    (offline,) = here.find(NAME, HF_HUB_OFFLINE="1")
    assert "is not a directory, the hub cache " in offline
    assert "HF_HUB_OFFLINE forbids to download it; expected a local checkpoint, or an id" in offline
    assert offline.endswith(f"where there is a network, run: hf download {NAME}")
    unknown, pickled = here.find("tiny/Other", NAME)
    assert "tiny/Other; if it is private, run: hf auth login; expected a local" in unknown
    assert f"(pickled weights are not downloaded): run: hf download {NAME}, and give" in pickled
    here.hub.files = {"a.onnx": b"", "b.safetensors": b""}
    (other,) = here.find(NAME)
    assert "has no config.json; expected config.json with *.safetensors files, or GGUF" in other
    assert other.endswith("found a.onnx, b.safetensors")
    here.hub.files, here.hub.gated = NEEDED, True
    assert "its authors ask for consent first: give it on http://127.0.0.1" in here.find(NAME)[0]
    (lost,) = here.find(NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert "its download failed (ConnectError: " in lost
    assert here.hub.fetched() == {}


def test_plan_needs_no_weights(
    place: Callable[..., Place], checkpoint: Callable[..., Path]
) -> None:
    source = checkpoint("mimo", "random")
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    here = place(files)
    command = [sys.executable, "-m", "mtpc", "plan", NAME]
    done = subprocess.run(command, env=here.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fetched = here.hub.fetched()
    assert fetched["config.json"] == 1
    assert not any(name.endswith(".safetensors") for name in fetched)
