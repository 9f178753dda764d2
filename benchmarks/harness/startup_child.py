"""One start of one engine, in a process of its own; run by `benchmarks.startup`, not by hand.

    python -m benchmarks.harness.startup_child JOB  # JOB is JSON and names the file of the report

Every engine imports what it needs inside its function, because importing is part of what is
measured; what stands at the top is imported by torch anyway. Moments are readings of the monotonic
clock, which all processes of a machine share, so the parent can set them against the moment at
which it started this process.

    python   the interpreter runs this file
    import   the engine's modules are there
    load     weights, and whatever the engine prepares before it is asked for anything
    token    the first token is known
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks import ROOT
from benchmarks.peers import vllm_host

_BEGIN = monotonic()
STAGES = ("python", "import", "load", "token")

PROMPT = list(range(2, 34))
"""Where nobody asks for another."""

Reach = Callable[[str], None]
"""Notes that a stage is over."""
Report = dict[str, Any]
"""`continuation` (ids or text; None where the engine only starts) and whatever is worth noting."""


def start_floor(job: dict[str, Any], reach: Reach) -> Report:
    """The machine's limit: torch is imported and the weights are mapped. Nothing is computed."""
    import safetensors  # noqa: F401
    import torch  # noqa: F401

    reach("import")
    tensors = _map_weights(job)
    reach("load")
    reach("token")
    return {"continuation": None, "tensors": len(tensors)}


def _map_weights(job: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of the checkpoint, as a map of its file."""
    from safetensors import safe_open

    tensors = {}
    for path in sorted(Path(job["directory"]).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def start_memory(job: dict[str, Any], reach: Reach) -> Report:
    """The floor, and as much fresh memory as the weights take, written once by all threads.

    Whoever copies or converts weights pays for it. In virtual machines whose host takes free
    memory back, that is many times what writing costs elsewhere.
    """
    import safetensors  # noqa: F401
    import torch

    from mtpc.weights.packing import allocate

    reach("import")
    size = sum(tensor.nbytes for tensor in _map_weights(job).values())
    allocate((size,), torch.uint8).fill_(1)
    reach("load")
    reach("token")
    return {"continuation": None, "bytes": size}


def start_mtpc(job: dict[str, Any], reach: Reach) -> Report:
    """`mtpc.compile` of the directory, every bucket; then `generate`, memory and steps."""
    import mtpc

    compile_model = mtpc.compile  # Public names are imported, torch with them, when first used.
    reach("import")
    imports_bytes = _status("VmRSS")
    reads_text = isinstance(job["prompt"], str)
    model = compile_model(job["directory"], reads_text=reads_text, **job["options"])
    reach("load")
    model.generate(job["prompt"], 1, ignore_eos=True)
    reach("token")
    continuation = model.generate(job["prompt"], job["new_tokens"], ignore_eos=True)
    modules = [name for name in ("transformers", "torch._inductor") if name in sys.modules]
    return dict(
        continuation=continuation,
        fallbacks=dict(model.stats.fallbacks),
        imported=modules,
        imports_bytes=imports_bytes,
        resident_bytes=_status("VmRSS"),
        peak_bytes=_status("VmHWM"),
        state_bytes=_state_bytes(model.program),
        step_ms=_time_steps(model.engine, job["steps"]),
    )


def _status(field: str) -> int:
    """Bytes of this process in /proc/self/status; 0 where there is no such file."""
    path = Path("/proc/self/status")
    found = re.search(rf"{field}:\s*(\d+) kB", path.read_text()) if path.is_file() else None
    return 1024 * int(found[1]) if found else 0


def _state_bytes(program: Any) -> int:
    """Bytes of a program's pool and buffers."""
    steps = (step.buffers.values() for step in program.steps.values())
    tensors = itertools.chain(program.shared.values(), *steps)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _time_steps(engine: Any, count: int) -> list[float]:
    """Milliseconds of decode steps of one request."""
    times = list[float]()
    if count:
        engine.add(PROMPT, count * (engine.options.spec_tokens + 1))
    while engine.has_work and len(times) < count:
        decodes, begin = engine.running and engine.running[0].is_prefilled, monotonic()
        engine.step()
        if decodes:
            times.append(1e3 * (monotonic() - begin))
    return times


def start_transformers(job: dict[str, Any], reach: Reach) -> Report:
    """transformers as it comes: `from_pretrained`, then `generate`."""
    import torch
    import transformers

    reach("import")
    model_class = getattr(transformers, job["hf_class"])
    # transformers would list the MTP layer's tensors.
    model_class._keys_to_ignore_on_load_unexpected = [job["mtp_pattern"]]
    model = model_class.from_pretrained(
        job["directory"], dtype=torch.bfloat16, local_files_only=True
    ).eval()
    reach("load")
    ids = torch.tensor([job["prompt"]])

    def generate(count: int) -> list[int]:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
        return out[0, ids.shape[1] :].tolist()

    generate(1)
    reach("token")
    version = transformers.__version__
    return {"continuation": generate(job["new_tokens"]), "transformers": version}


COMPILED_AGAIN = "Compiling model again due to a load failure"
"""vLLM says so where its own cache was of no use."""


def start_vllm(job: dict[str, Any], reach: Reach) -> Report:
    """vLLM in process, with its MTP proposer; options as far as possible those of mtpc."""
    import vllm

    model_class, params_class = vllm.LLM, vllm.SamplingParams
    reach("import")
    options = job["options"]
    model = model_class(
        **vllm_host.arguments(
            job["directory"],
            options["spec_tokens"],
            options["max_len"],
            max(options["batch_buckets"]),
            job["eager"],
        )
    )
    reach("load")

    def generate(count: int) -> list[int]:
        params = params_class(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": job["prompt"]}
        (result,) = model.generate([prompt], params, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    generate(1)
    reach("token")
    return {"continuation": generate(job["new_tokens"]), "vllm": vllm.__version__}


STARTS: dict[str, Callable[[dict[str, Any], Reach], Report]] = {
    "floor": start_floor,
    "memory": start_memory,
    "mtpc": start_mtpc,
    "transformers": start_transformers,
    "vllm": start_vllm,
}


@dataclass(frozen=True)
class Engine:
    """One row to be: what is started, and on which cache.

    Attributes:
        name: as in the table.
        kind: its function in STARTS.
        state: "cold", "warm", or "" for what keeps no cache.
        is_text: the prompt is text, which takes a tokenizer.
    """

    name: str
    kind: str
    state: str = ""
    is_text: bool = False


ENGINES = (
    Engine("floor", "floor"),
    Engine("floor and fresh memory", "memory"),
    Engine("mtpc cold", "mtpc", "cold"),
    Engine("mtpc warm", "mtpc", "warm"),
    Engine("mtpc warm, text", "mtpc", "warm", is_text=True),
    Engine("transformers eager", "transformers"),
    Engine("vLLM cold", "vllm", "cold"),
    Engine("vLLM warm", "vllm", "warm"),
    Engine("vLLM eager", "vllm"),
)


def environment(
    engine: Engine, cache: Path, scratch: Path, threads: int, python: Path
) -> dict[str, str]:
    """A start's environment: where its caches are, and for mtpc's warm starts no compiler.

    Args:
        engine: what is started.
        cache: what it keeps between processes.
        scratch: an empty directory for whatever else is written.
        threads: of torch, and vLLM's.
        python: the interpreter that will run.
    """
    kind, state = engine.kind, engine.state
    # vLLM keeps what it found out about model classes, too, which spares eager starts a process.
    kept = cache if kind == "vllm" else scratch
    extra = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"),
    }
    if kind == "mtpc" and state == "warm":
        extra |= {"CXX": "/nonexistent/c++", "PATH": "/nonexistent"}
    if kind == "vllm":
        extra |= vllm_host.environment(kept, threads, python)
    return os.environ | extra


LONGEST_S = 3600
"""Seconds of a start, at most."""


class StartError(Exception):
    """A start that came to nothing; says why."""


def launch(python: Path, job: dict[str, Any], variables: Mapping[str, str], log: Path) -> Report:
    """What the parent calls: a process that runs this file, from its start to its end.

    Returns its report, with the `moments` at which it reached each stage.

    Args:
        python: the interpreter to run it with.
        job: see `main`.
        variables: the environment.
        log: gets all that it prints.

    Raises:
        StartError: it failed, or took more than `LONGEST_S` seconds.
    """
    report = log.with_suffix(".json")
    job = {**job, "report": str(report)}
    command = [str(python), "-m", "benchmarks.harness.startup_child", json.dumps(job)]
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            raise StartError(str(error)) from None
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            raise StartError(f"no end within {LONGEST_S} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
        raise StartError(f"ended with status {code}: {lines[-1] if lines else 'no output'}")
    return dict(json.loads(report.read_text()))


def start_here(directory: Path, cache: Path, log: Path, **job: Any) -> Report:
    """A start of mtpc's cpu backend with this interpreter; `first_token_s` is from its beginning.

    Args:
        directory: of the checkpoint.
        cache: directory of mtpc's cache.
        log: see `launch`.
        **job: `options` of `mtpc.compile`, and other entries of the job.
    """
    options = job.pop("options") | {"cache_dir": str(cache), "backend": "cpu"}
    usual = {"kind": "mtpc", "prompt": PROMPT, "new_tokens": 1, "steps": 0}
    job = {**usual, "directory": str(directory), "options": options, **job}
    begin = monotonic()
    report = launch(Path(sys.executable), job, os.environ, log)
    return report | {"first_token_s": report["moments"]["token"] - begin}


def make_empty(directory: Path) -> None:
    """A new directory in place of what is there; nobody else's, or mtpc would not load from it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)


def size_of(directory: Path) -> int:
    """Bytes of all files under a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main(argument: str) -> None:
    """Start what the job names; write its moments and its report."""
    job = json.loads(argument)
    moments = {"python": _BEGIN}

    def reach(stage: str) -> None:
        moments[stage] = monotonic()

    report = STARTS[job["kind"]](job, reach)
    Path(job["report"]).write_text(json.dumps({"moments": moments, **report}))


if __name__ == "__main__":
    main(sys.argv[1])
