"""Does SGLang emit and accept the same with mtpc's draft as with its own, on one checkpoint?

    tests/peers/sglang_setup.sh VENV
    python tests/peers/sglang_plugin.py --sglang-python VENV/bin/python [--cases mimo glm4_moe]

Makes tiny checkpoints (seconds of training, so that drafts are accepted in part; and one whose
every draft is right), decodes them greedily in float32 under Triton's interpreter with the host's
own draft and with ours, and compares tokens and, request by request, how many steps accepted how
many drafts. Tokens are compared with mtpc's plain decoding, too; which class ran in which of the
host's phases is read from the log of the plugin for CPUs. Two minutes a run, of which most is the
host's start. Exits with 1 where something differs.

With `--drafts mtpc-step` the whole iteration is mtpc's step, and no forward is the host's. It is
compared with mtpc's own engine, because the host wires MiMo's first draft otherwise, and does not
run a hybrid model without a GPU. One more batch begins as earlier prompts did (prefix cache), and
another is sampled, beside a greedy request.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from agreement import HEADS, MAX_LEN, ROOT, Decoded, Work, ask, run_mtpc
from helpers import trained
from recorded import keep
from safetensors.torch import load_file, save_file
from vllm_agreement import CHANGES, make_trained

import mtpc

CASES: dict[str, dict[str, Any]] = {
    "mimo": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "glm4_moe": HEADS,
    "mimo-accepting": {},
    **{name: CHANGES[name] for name in ("deepseek_v3", "qwen3_next", "qwen3_5")},
}
STEP_ONLY = ("deepseek_v3", "qwen3_next", "qwen3_5")
"""Which the host runs on a GPU alone, and mtpc's steps anywhere."""
HYBRID = ("qwen3_next", "qwen3_5")
"""Without the host's prefix cache, whose pages do not carry recurrent state."""
CUT: dict[str, dict[str, Any]] = {
    "mimo": {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128},
    "glm4_moe": {**HEADS, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 128, "moe_intermediate_size": 64},
}
"""Changes for several ranks: on a CPU SGLang rounds smaller sizes up, and then loads no weights."""
BLOCK = 32
"""Rows and columns of a block of FP8 weights."""
BATCHES = [[[5, 9, 17, 33]], [[3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [90, 7, 61]]]
BEGINS_AS_BEFORE = [[*BATCHES[1][1][:8], 3, 5], [*BATCHES[0][0], 61]]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 7},
    {"temperature": 0.0},
    {"temperature": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 8},
]
"""Of the requests of the second batch once more."""
NEW_TOKENS = 16
TRAINING_STEPS = 18
"""So few that drafts are accepted in part."""
DRAFTS: dict[str, dict[str, Any]] = {
    "host": {"env": {}, "options": {"speculative_algorithm": "NEXTN"}},
    "mtpc": {
        "env": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mtpc.integrations.sglang.models"},
        "options": {"speculative_algorithm": "NEXTN"},
    },
    "mtpc-graph": {
        "env": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mtpc.integrations.sglang.models"},
        "options": {"speculative_algorithm": "MTPC"},
    },
    "mtpc-step": {
        "env": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mtpc.integrations.sglang.step_models"},
        "options": {"speculative_algorithm": "MTPC_STEP"},
    },
}
STEP = "mtpc-step"
PHASES = {"EXTEND", "DRAFT_EXTEND_V2", "DECODE"}
"""The host's phases that a draft model runs in; the target verifies."""


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[:3])
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS)[1:-1])
    parser.add_argument("--steps", type=int, default=3, help="drafts a round (default: 3)")
    parser.add_argument("--page-size", type=int, default=1, help="the host's (default: 1)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="keep figures for the docs")
    parser.add_argument("--fp8", action="store_true", help="quantise the checkpoints in blocks")
    args = parser.parse_args()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as kept:
        for case in args.cases:
            sizes = CASES if args.tensor_parallel_size == 1 else CUT
            directory = make_checkpoint(case, Path(kept) / case, sizes[case])
            # With FP8 the host rounds activations, too.
            plain = None if args.fp8 else decode_plainly(directory, batches_of(case))
            if args.fp8:
                quantise(directory)
            work = (batches_of(case), NEW_TOKENS, args.steps)
            more: dict[str, Any] = {
                "page_size": args.page_size,
                "tp_size": args.tensor_parallel_size,
            }
            more["dtype"] = "float16" if args.fp8 else "float32"
            if STEP in args.drafts:
                faults += check_steps(args, directory, case, **more)
            drafts = [draft for draft in args.drafts if draft != STEP]
            if not drafts or case in STEP_ONLY:
                continue
            host = run_host(args.sglang_python, directory, "host", *work, **more)
            for draft in ("host", *drafts):
                found = host
                if draft != "host":
                    found = run_host(args.sglang_python, directory, draft, *work, **more)
                report(case, draft, found)
                wrong = check(f"{case}, {draft}", found, host, plain)
                faults += wrong
                if draft != "host":
                    ran = f"{case}, {draft}, K={args.steps}, {args.tensor_parallel_size} rank(s)"
                    ran += ", FP8" if args.fp8 else ""
                    record(args, ran, decoded(found["answers"], args.steps), len(wrong))
                faults += check_classes(f"{case}, {draft}", found["log"], draft, args.steps)
                faults += check_acceptance(case, draft, found["answers"], args.steps)
    print("\n".join(faults) or "All agree.")
    return 1 if faults else 0


def make_checkpoint(case: str, directory: Path, changes: dict[str, Any]) -> Path:
    """The checkpoint of a case."""
    if case.endswith("-accepting"):
        return trained.make_full_acceptance_checkpoint(directory)
    if case in STEP_ONLY:
        make_trained(case, directory, changes, TRAINING_STEPS)
        return directory
    return trained.make_trained_checkpoint(case, directory, **changes)


def check_steps(args: argparse.Namespace, directory: Path, case: str, **more: Any) -> list[str]:
    """Faults of the whole iteration as mtpc's step: texts and accepted drafts are not those of
    mtpc's own engine, or a forward was the host's."""
    batches, steps = [*batches_of(case), BEGINS_AS_BEFORE, batches_of(case)[1]], args.steps
    more["disable_radix_cache"] = case in HYBRID
    asked = [[{}] * len(batch) for batch in batches[:-1]] + [SAMPLED]
    given = (batches, NEW_TOKENS, steps, asked)
    found = run_host(args.sglang_python, directory, STEP, *given, **more)
    report(case, STEP, found)
    theirs = decoded(found["answers"], steps)
    prompts, sampling = (list(chain.from_iterable(each)) for each in (batches, asked))
    work = Work(prompts, NEW_TOKENS, sampling=sampling)
    ours = run_mtpc(directory, steps, work, "float32", {})
    faults = [
        f"{case}, {STEP}: prompt {prompt}: {one}, mtpc's own engine {other}"
        for prompt, one, other in zip(work.prompts, theirs, ours, strict=True)
        if one != other
    ]
    if found["log"]:
        faults.append(f"{case}, {STEP}: forwards of the host: {classes(found['log'])}")
    record(args, f"{case}, {STEP}, K={steps}", theirs, len(faults))
    return faults


def record(args: argparse.Namespace, case: str, answers: list[Decoded], faults: int) -> None:
    """Print what was accepted, and keep it if the user asks for it."""
    accepted = [sum(column) for column in zip(*(each.accepted for each in answers), strict=True)]
    drafts = sum(each.drafted for each in answers) // args.steps
    texts = (len(answers) - faults, len(answers))
    print(f"{case}: {texts[0]} of {texts[1]} equal, accepted by position {accepted} of {drafts}")
    if args.record:
        keep(args.sglang_python, Path(__file__).name, case, texts, accepted, drafts)


def decoded(answers: list[Any], steps: int) -> list[Decoded]:
    """The host's answers: tokens, accepted drafts by position, and how many were drafted."""
    return [
        Decoded(
            answer["tokens"],
            [sum(answer["histogram"][i + 1 :]) for i in range(steps)],
            steps * sum(answer["histogram"]),
        )
        for answer in answers
    ]


def quantise(directory: Path, block: int = BLOCK) -> None:
    """Quantise the decoder layers' linear layers and experts in place, in blocks of FP8."""
    path, config = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(path)
    for name in [
        n for n in tensors if re.search(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$", n)
    ]:
        weight = tensors[name]
        blocks = weight.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
        scales = blocks.abs().amax((2, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, :, None, None]).transpose(1, 2).reshape(weight.shape)
        tensors[name] = codes.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, path, {"format": "pt"})
    fields = json.loads(config.read_text())
    fields["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    config.write_text(json.dumps(fields))


def batches_of(case: str) -> list[list[list[int]]]:
    """Prompts, batch by batch.

    MiMo's layer never sees the token at position 0, whose embedding it zeroes: after a prompt of
    one token no draft of the first round can be right, on whatever checkpoint.
    """
    if not case.endswith("-accepting"):
        return BATCHES
    return [[[*prompt, 8][:12] for prompt in batch] for batch in BATCHES]


def decode_plainly(directory: Path, batches: list[list[list[int]]]) -> list[list[int]]:
    """mtpc's own plain decoding of every prompt."""
    options = {"spec_tokens": 0, "dtype": "float32", "backend": "eager", "max_len": MAX_LEN}
    model = mtpc.compile(directory, batch_buckets=(1,), **options)
    prompts = [prompt for batch in batches for prompt in batch]
    return [
        model.generate([prompt], max_new_tokens=NEW_TOKENS, ignore_eos=True)[0]
        for prompt in prompts
    ]


def run_host(
    python: Path,
    directory: Path,
    draft: str,
    batches: list[list[list[int]]],
    new_tokens: int,
    steps: int,
    sampling: Sequence[list[dict[str, Any]]] = (),
    **more: Any,
) -> dict[str, Any]:
    """SGLang with a draft, in a process of its own: its answers, and the log of forwards.

    `sampling` has fields of `mtpc.SamplingParams` for each request of each batch.

    Raises:
        Refused: it does not run the checkpoint.
    """
    log = directory / f"{draft}.log"
    log.touch()
    most = max(len(batch) for batch in batches)
    options = {
        "model_path": str(directory),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "triton",
        "disable_cuda_graph": True,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
        "max_total_tokens": 2 * MAX_LEN * most,
        "max_running_requests": most,
        "context_length": MAX_LEN,
        "disable_overlap_schedule": True,
        "log_level": "warning",
        "random_seed": 0,
        **DRAFTS[draft]["options"],
        **more,
    }
    job = {"options": options, "batches": batches, "new_tokens": new_tokens}
    job["sampling"] = [
        [{("sampling_seed" if n == "seed" else n): v for n, v in own.items()} for own in each]
        for each in sampling
    ]
    fixed = {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "SGLANG_ON_CPU_LOG": str(log)}
    fixed["PYTHONPATH"] = str(ROOT)  # This checkout, whichever one VENV was made of.
    if more.get("tp_size", 1) > 1:  # Ranks that are more than the machine's NUMA nodes name cores.
        fixed["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(more["tp_size"])))
    kept = {k: v for k, v in os.environ.items() if "SGLANG" not in k}
    child = str(Path(__file__).with_name("sglang_child.py"))
    answers = ask(
        [str(python.absolute()), child, json.dumps(job)],
        {**kept, **fixed, **DRAFTS[draft]["env"]},
    )
    return {"answers": answers, "log": log.read_text().splitlines()}


def report(case: str, draft: str, found: dict[str, Any]) -> None:
    """Print what a run did."""
    histograms = [answer["histogram"] for answer in found["answers"]]
    lengths = [round(answer["accept_length"], 2) for answer in found["answers"]]
    print(f"{case}, {draft}: steps by drafts accepted {histograms}, accept length {lengths}")
    for name, count in sorted(classes(found["log"]).items()):
        print(f"  {name}: {count} forwards")
    sys.stdout.flush()


def classes(log: list[str]) -> dict[str, int]:
    """Forwards by class and phase."""
    counts: dict[str, int] = {}
    for line in log:
        name = line.rpartition(" ")[0]
        counts[name] = counts.get(name, 0) + 1
    return counts


def check(
    what: str, found: dict[str, Any], host: dict[str, Any], plain: list[Any] | None
) -> list[str]:
    """Faults: tokens or accepted drafts that are not the host's own draft's."""
    faults = []
    expected = plain or [None] * len(host["answers"])
    pairs = zip(found["answers"], host["answers"], expected, strict=True)
    for index, (mine, theirs, tokens) in enumerate(pairs):
        if tokens is not None and mine["tokens"] != tokens:
            faults.append(f"{what}: prompt {index}: {mine['tokens']}, plain decoding {tokens}")
        if mine != theirs:
            faults.append(f"{what}: prompt {index}: {mine}, with the host's own draft {theirs}")
    return faults


def check_classes(what: str, log: list[str], draft: str, steps: int) -> list[str]:
    """Faults: phases in which the draft's class did not run."""
    package = "sglang." if draft == "host" else "mtpc."
    drafts = {name for name in classes(log) if "NextN" in name or "MTP " in name}
    phases = {name.split()[1] for name in drafts if name.startswith(package)}
    foreign = sorted(name for name in drafts if not name.startswith(package))
    # DECODE makes the drafts after the first; the chain's one graph is in the place of all these.
    expected = PHASES - {"DECODE"} if draft == "mtpc-graph" or steps == 1 else PHASES
    if phases == expected and not foreign:
        return []
    return [f"{what}: ran in {sorted(phases)}, expected {sorted(expected)}; others: {foreign}"]


def check_acceptance(case: str, draft: str, answers: list[Any], steps: int) -> list[str]:
    """Faults: drafts of a kind that the case is there for did not occur."""
    # The host leaves out what did not occur at the end.
    histograms = [answer["histogram"] for answer in answers]
    total = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    if case.endswith("-accepting"):
        if all(answer["accept_length"] == steps + 1 for answer in answers):
            return []
        return [f"{case}, {draft}: accept length is not {steps + 1} throughout"]
    if total[0] and total[-1] and (steps == 1 or any(total[1:-1])):
        return []
    return [f"{case}, {draft}: full, partial and no acceptance did not all occur: {total}"]


if __name__ == "__main__":
    raise SystemExit(main())
