"""llama.cpp's part of the decode benchmark: bytes of schemes, its files, its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness.models import SHAPES, Checkpoint, write_checkpoint
from benchmarks.peers.llama_decoder import (
    BENCH,
    WRITER,
    LlamaDecoder,
    LlamaError,
    LlamaFiles,
    read_result,
)
from benchmarks.peers.llama_server import SERVER, LlamaServer, ServerDecoder, read_timings
from mtpc.weights.write_quantised import quantise_checkpoint

LINE = (
    '{"n_kv_max": 4096, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, '
    '"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 32, "tg": 64, "pl": 4, '
    '"n_kv": 384, "t_pp": 0.4, "speed_pp": 320.0, "t_tg": 1.75, "speed_tg": 146.3, "t": 2.15, '
    '"speed": 178.6}\n'
)
"""As llama-batched-bench of llama.cpp 0.5.0 writes it."""
TIMINGS = {
    "cache_n": 2, "prompt_n": 32, "prompt_ms": 250.0, "predicted_n": 64, "predicted_ms": 800.0,
    "draft_n": 60, "draft_n_accepted": 47,
}  # fmt: skip
"""What llama-server of llama.cpp 0.5.0 says of a request, shortened."""
STAND_IN = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        open({asked!r}, "a").write(json.dumps([sys.argv[1:], asked]) + "\\n")
        tokens = [7] * (asked["n_predict"] - (asked["prompt"] == [1]))
        timings = {{**{timings!r}, "prompt_n": len(asked["prompt"]) - 2}}
        self.answer({{"content": "", "tokens": tokens, "timings": timings}})
    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""What llama.cpp's server answers, by its source (tools/server/server-task.cpp); two tokens of a
prompt are known to it, and to one prompt it gives a token too few."""


def stand_in(directory: Path) -> Path:
    """A llama-server in a directory that writes what it is asked to the file that is returned."""
    program, asked = directory / SERVER, directory / "asked"
    told = STAND_IN.format(python=sys.executable, asked=str(asked), timings=TIMINGS)
    program.write_text(told)
    program.chmod(0o755)
    return asked


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(directory, "mimo", SHAPES["tiny"], accepting=False)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8"])
def test_a_scheme_has_the_bytes_of_its_file(
    checkpoint: Checkpoint, scheme: str, tmp_path: Path
) -> None:
    """Target, head and MTP layer are all of the file but its embedding."""
    quantise_checkpoint(checkpoint.directory, tmp_path / "out", scheme, head=True)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    read = [
        tensor
        for name, tensor in tensors.items()
        if "embed_tokens" not in name and not name.endswith("_shape")
    ]
    once = checkpoint.quantised(scheme)
    assert once.target_bytes + once.head_bytes + once.draft_bytes == sum(t.nbytes for t in read)
    assert once.step_bytes(3) < 0.7 * checkpoint.step_bytes(3)


def test_a_result_is_read(tmp_path: Path) -> None:
    assert read_result(LINE).decode_s == 1.75
    assert read_result(LINE).prompt_s == json.loads(LINE)["t_pp"]
    for output in ("", LINE + LINE):
        with pytest.raises(LlamaError, match="expected one"):
            read_result(output)


def test_a_lost_result_is_measured_again(tmp_path: Path) -> None:
    """llama.cpp may end before its log is written."""
    runs = tmp_path / "runs"
    program = tmp_path / BENCH
    program.write_text(
        f"#!/bin/sh\necho run >> {runs}\n[ $(wc -l < {runs}) -lt 3 ] || echo '{LINE.strip()}'\n"
    )
    program.chmod(0o755)
    decoder = LlamaDecoder(tmp_path, tmp_path / "model.gguf", "Q4_0", threads=1)
    decoded = decoder.decode([[1, 2]], 64)
    assert (decoded.steps, decoded.seconds) == (64, 1.75)
    assert runs.read_text().count("run") == 3
    program.write_text("#!/bin/sh\n")
    with pytest.raises(LlamaError, match="wrote 0 results"):
        decoder.decode([[1, 2]], 64)


def test_timings_of_requests_become_steps() -> None:
    """The first token is the prompt's; a step emits one token and what it accepts."""
    plain = {name: value for name, value in TIMINGS.items() if "draft" not in name}
    one = read_timings([plain])
    assert (one.steps, one.tokens, one.seconds, one.acceptance_rate) == (63, 63, 0.8, None)
    both = read_timings([TIMINGS, {**TIMINGS, "draft_n_accepted": 43, "predicted_ms": 900.0}])
    assert (both.steps, both.tokens, both.seconds) == (20, 126, 0.9)
    assert both.acceptance_rate == 0.75
    with pytest.raises(LlamaError, match="have no 'predicted_n'"):
        read_timings([{}])


def test_a_server_is_asked_for_as_many_requests_at_once(tmp_path: Path) -> None:
    asked = stand_in(tmp_path)
    decoder = ServerDecoder(tmp_path, tmp_path / "model.gguf", "Q4_0", spec_tokens=3, threads=1)
    assert decoder.decode([[1, 2], [3, 4]], 64).steps == 16
    options, requests = zip(*map(json.loads, asked.read_text().splitlines()), strict=True)
    assert sorted(r["prompt"] for r in requests) == [[1, 2], [1, 2], [3, 4]]
    assert [r["n_predict"] for r in requests] == [4, 64, 64]
    assert options[0][options[0].index("--spec-draft-n-max") + 1] == "3"
    (tmp_path / SERVER).write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    with pytest.raises(LlamaError, match="did not start:\nno such model"):
        decoder.decode([[1, 2]], 64)


def test_the_file_has_the_targets_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "out.gguf"
    subprocess.run([sys.executable, WRITER, checkpoint.directory, file], check=True)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    stored = load_file(checkpoint.directory / "model.safetensors")
    target = [name for name in stored if ".mtp_layers." not in name]
    assert len(found) == len(target)
    for ours, theirs in (
        ("lm_head.weight", "output.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
    ):
        values = torch.from_numpy(
            gguf.quants.dequantize(found[theirs].data, found[theirs].tensor_type).copy()
        )
        assert torch.equal(values, stored[ours].float())


def test_a_failure_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A program that fails is named, with what it wrote last."""
    files = LlamaFiles(tmp_path, Path(sys.executable), tmp_path / "nothing", tmp_path / "gguf")
    with pytest.raises(LlamaError, match=r"ended with status 1:\n(.|\n)*Error"):
        files.write("Q4_0")


def test_a_servers_answer_is_read(tmp_path: Path) -> None:
    stand_in(tmp_path)
    log = tmp_path / "log"
    server = LlamaServer(tmp_path, tmp_path / "model.gguf", 64, 1, log)
    try:
        assert server.turn([1, 2, 3, 4, 5], 3) == (0.25, [7, 7, 7], 2)
        with pytest.raises(LlamaError, match="gave 2 tokens; expected 3"):
            server.turn([1], 3)
    finally:
        server.close()
    (tmp_path / SERVER).write_text("#!/bin/sh\necho no model; exit 1\n")
    with pytest.raises(LlamaError, match="did not start"):
        LlamaServer(tmp_path, tmp_path / "model.gguf", 64, 1, log)
    assert log.read_text() == "no model\n"
