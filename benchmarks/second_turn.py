"""Time to the first token of a chat's second turn, compared with a cold start.

    python -m benchmarks.second_turn                       # 8,192 tokens, both shapes, K = 1
    python -m benchmarks.second_turn --families step3p5 --prompt-tokens 2048 --spec-tokens 0 1
    python -m benchmarks.second_turn --vllm-python VENV/bin/python --llama-bench DIRECTORY

The models are small hybrid shapes with random weights, because the times depend on how much of the
prompt is computed again. The cold prompt is computed with an empty cache. The second turn is that
prompt, its answer and a new message. The *stripped* turn leaves out the first half of the answer,
as templates leave out thinking.

Other engines run one after the other, each in its own process: vLLM with its prefix cache at each
K, and llama.cpp's server, which keeps one conversation, for the dense shape. If an engine cannot
run a case, that is reported, and there is no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.decoders import Decoder, MtpcDecoder
from benchmarks.harness.tables import Column, Record, Row, TableForm, fields
from benchmarks.peers.llama_decoder import LlamaFiles
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.vllm_decoder import VllmDecoder, VllmError
from mtpc.models import FAMILIES
from mtpc.models.hf import model_class
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.read_config import config_class
from mtpc.models.save import save_checkpoint

ANSWER, MESSAGE = 64, 40
"""Tokens of the first answer and of the second message."""
_COMMON: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    max_position_embeddings=65536,
    num_nextn_predict_layers=1,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=0,
    eos_token_id=1,
)
TURNS = {"second": 0, "stripped": ANSWER // 2}
"""Number of the answer's tokens that each kind of turn leaves out."""
_SLIDING = [["full_attention", "sliding_attention"][i % 4 > 0] for i in range(9)]
SHAPES: dict[str, dict[str, Any]] = {
    "mimo": {**_COMMON, "num_key_value_heads": 2},
    "qwen3_5": {
        **_COMMON,
        "mtp_num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": [["linear_attention", "full_attention"][i % 4 > 2] for i in range(8)],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "step3p5": {
        **_COMMON,
        "pad_token_id": 0,
        "layer_types": _SLIDING,
        "mlp_layer_types": ["dense"] * 9,
        "rope_theta": [1e5 if kind == "full_attention" else 1e4 for kind in _SLIDING],
        "partial_rotary_factors": [1.0] * 9,
        "swiglu_limits": [0.0] * 9,
        "swiglu_limits_shared": [0.0] * 9,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8},
        "head_dim": 64,
        "sliding_window": 512,
        "moe_intermediate_size": 128,
        "share_expert_dim": 128,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_layers_enum": "",
    },
}


def write(family_name: str, directory: Path) -> Path:
    """A checkpoint of a shape with random weights."""

    family = next(f for f in FAMILIES if f.name == family_name)
    torch.manual_seed(0)
    config = config_class(family)(**SHAPES[family_name])
    target = model_class(family)(config).to(torch.bfloat16).eval()
    layer = build_mtp_layer(family, target, 0, ("head",) if family_name == "step3p5" else ())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return save_checkpoint(target, [layer.to(torch.bfloat16)], directory, family)


def turns(chat: Decoder, model: str, length: int, seed: int) -> Iterator[Row]:
    """A cold start, and the turns that continue it; seconds are those to the first token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 8192, (length + MESSAGE,), generator=generator).tolist()
    prompt, message = ids[:length], ids[length:]
    cold, answer, known = chat.turn(prompt, ANSWER)
    if known:
        raise RuntimeError(f"{chat.engine} knew {known} tokens of a prompt that it never had")
    for turn, left_out in TURNS.items():
        seconds, _, reused = chat.turn(prompt + answer[left_out:] + message, ANSWER)
        case = dict(model=model, engine=chat.engine, spec_tokens=chat.spec_tokens)
        figures = dict(cold_s=cold, turn_s=seconds, reused=reused)
        yield {**case, "prompt_tokens": length, "turn": turn, **figures}


CASE = ("model", "engine", "spec_tokens", "prompt_tokens", "turn")


def _rows(record: Record) -> list[Row]:
    """A row for each model, engine, K and kind of turn."""
    groups = dict[tuple[Any, ...], list[Row]]()
    for turn in record["rows"]:
        groups.setdefault(tuple(turn.get(name, "mtpc") for name in CASE), []).append(turn)
    shown = []
    for case, found in groups.items():
        cold, seconds = (median(turn[name] for turn in found) for name in ("cold_s", "turn_s"))
        figures = dict(cold_s=cold, turn_s=seconds, ratio=seconds / cold, samples=len(found))
        reused = min(turn["reused"] for turn in found)
        shown.append({**dict(zip(CASE, case, strict=True)), **figures, "reused": reused})
    return shown


FORM = TableForm(
    "The second turn of a chat",
    (
        *fields("model, engine, K=spec_tokens, tokens=prompt_tokens"),
        Column(
            "turn", "turn", "",
            "second: prompt, answer and a new message; stripped: without half of the answer.",
        ),
        Column(
            "cold s", "cold_s", ".2f",
            "to the first token of the prompt with nothing known; medians.",
        ),
        Column("ms to first token", "turn_s", ".0f", factor=1e3),
        Column("of a cold start", "ratio", ".1%", "the ratio of the medians."),
        Column("reused", "reused", "", "tokens of the turn's prompt that were not computed again."),
        Column("samples"),
    ),
    rows=_rows,
)  # fmt: skip


def measure(run: Run) -> Iterator[list[Row]]:
    """The turns of each engine, of each model."""
    for model in run.args.families:
        directory = write(model, run.workdir / model)
        for chat in _chats(model, directory, run):
            with closing(chat):
                for seed in range(run.args.seed, run.args.seed + run.args.repeats):
                    rows = list(turns(chat, model, run.args.prompt_tokens, seed))
                    run.tell(f"{rows}")
                    yield rows


def _chats(model: str, directory: Path, run: Run) -> Iterator[Decoder]:
    """Yield the engines of a model. Each is started after the previous one has ended."""
    args, longest = run.args, run.args.prompt_tokens + 4 * ANSWER
    for k in args.spec_tokens:
        run.tell(f"compile {model} K={k}")
        options = dict[str, Any](batch_buckets=(1,), max_len=longest, backend=args.backend)
        yield MtpcDecoder.compile(directory, spec_tokens=k, **options)
    for k in args.spec_tokens if args.vllm_python else ():
        run.tell(f"start vLLM, {model} K={k}")
        place = (directory, k, longest, 1, directory.parent / "vllm" / model)
        try:
            yield VllmDecoder(args.vllm_python, *place, enable_prefix_caching=True)
        except VllmError as error:
            run.tell(f"vLLM does not run {model} at K={k}: {error}")
    if args.llama_bench and model == "mimo":
        run.tell("start llama.cpp's server")
        files = LlamaFiles(args.llama_bench, args.gguf_python, directory, directory / "gguf")
        log, threads = directory.parent / "llama-server.log", torch.get_num_threads()
        yield LlamaServer(args.llama_bench, files.write("BF16"), longest, threads, log)


BENCHMARK = Benchmark(
    "second_turn",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--threads", "--seed", *command.PEERS, "--backend"),
    dict(prompt_tokens=8192, spec_tokens=[1], repeats=1),
    {"--families": dict(nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")},
)
main, table = BENCHMARK.commands(__name__)
