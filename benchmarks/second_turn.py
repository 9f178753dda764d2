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

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.results import Record, Table, publish
from benchmarks.harness.sampling import Tell
from benchmarks.peers.llama_decoder import LlamaFiles
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.vllm_decoder import VllmError, VllmProcess
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
COLUMNS = (
    "model", "engine", "K", "tokens", "turn", "cold s", "ms to first token", "of a cold start",
    "reused", "samples",
)  # fmt: skip
NOTES = (
    "cold s: to the first token of the prompt with nothing known; medians.",
    "turn: second: prompt, answer and a new message; stripped: without half of the answer.",
    "of a cold start: the ratio of the medians.",
    "reused: tokens of the turn's prompt that were not computed again.",
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


Answer = tuple[float, list[int], int]
"""Seconds to the first token, `ANSWER` tokens, and the number of reused prompt tokens."""


@dataclass(frozen=True)
class Chat:
    """An engine that answers one prompt after another, until it is closed."""

    engine: str
    spec_tokens: int
    answer: Callable[[list[int]], Answer]
    close: Callable[[], None] = lambda: None


def _ours(spec: mtpc.SpecModel, prompt: list[int]) -> Answer:
    before = spec.stats.reused_tokens
    answer = spec.generate(prompt, ANSWER, ignore_eos=True)
    return answer.first_token_s, list(answer), spec.stats.reused_tokens - before


def _vllms(process: VllmProcess, prompt: list[int]) -> Answer:
    done = process.ask({"turn": prompt, "new_tokens": ANSWER})
    return done["seconds"], done["answer"], done["reused"]


@dataclass(frozen=True)
class Turn:
    """One turn of a chat, and the cold start before it: seconds to the first token."""

    model: str
    spec_tokens: int
    prompt_tokens: int
    turn: str
    cold_s: float
    turn_s: float
    reused: int
    engine: str = "mtpc"


def measure(chat: Chat, model: str, length: int, seed: int) -> Iterator[Turn]:
    """Measure a cold start, and the turns that continue it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 8192, (length + MESSAGE,), generator=generator).tolist()
    prompt, message = ids[:length], ids[length:]
    cold, answer, known = chat.answer(prompt)
    if known:
        raise RuntimeError(f"{chat.engine} knew {known} tokens of a prompt that it never had")
    for turn, left_out in TURNS.items():
        seconds, _, reused = chat.answer(prompt + answer[left_out:] + message)
        yield Turn(model, chat.spec_tokens, length, turn, cold, seconds, reused, chat.engine)


def table(record: Record) -> Table:
    """A record's table: a row for each model, K and kind of turn."""
    groups = dict[tuple[Any, ...], list[Turn]]()
    for row in record["rows"]:
        turn = Turn(**row)
        key = turn.model, turn.engine, turn.spec_tokens, turn.prompt_tokens, turn.turn
        groups.setdefault(key, []).append(turn)
    body = list[list[str]]()
    for key, turns in groups.items():
        cold = median(turn.cold_s for turn in turns)
        seconds = median(turn.turn_s for turn in turns)
        measured = (f"{cold:.2f}", f"{1e3 * seconds:.0f}", f"{seconds / cold:.1%}")
        reused = str(min(turn.reused for turn in turns))
        body.append([*map(str, key), *measured, reused, str(len(turns))])
    return Table("The second turn of a chat", COLUMNS, body, NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell, rows = command.begin(args), list[dict[str, Any]]()
    with command.working_directory(args.workdir) as place:
        for model in args.families:
            directory = write(model, place / model)
            for chat in _chats(model, directory, args, tell):
                with closing(chat):
                    for seed in range(args.seed, args.seed + args.repeats):
                        for turn in measure(chat, model, args.prompt_tokens, seed):
                            tell(f"{turn}")
                            rows.append(asdict(turn))
    publish("second_turn", args, {"rows": rows}, table)
    return 0


def _chats(model: str, directory: Path, args: argparse.Namespace, tell: Tell) -> Iterator[Chat]:
    """Yield the engines of a model. Each is started after the previous one has ended."""
    longest = args.prompt_tokens + 4 * ANSWER
    for spec_tokens in args.spec_tokens:
        tell(f"compile {model} K={spec_tokens}")
        options = dict[str, Any](batch_buckets=(1,), max_len=longest, backend=args.backend)
        spec = mtpc.compile(directory, spec_tokens=spec_tokens, **options)
        yield Chat("mtpc", spec_tokens, partial(_ours, spec))
    for spec_tokens in args.spec_tokens if args.vllm_python else ():
        tell(f"start vLLM, {model} K={spec_tokens}")
        sizes = (spec_tokens, longest, 1, directory.parent / "vllm" / model)
        try:
            process = VllmProcess.of(
                args.vllm_python, directory, *sizes, enable_prefix_caching=True
            )
        except VllmError as error:
            tell(f"vLLM does not run {model} at K={spec_tokens}: {error}")
            continue
        yield Chat("vLLM", spec_tokens, partial(_vllms, process), process.close)
    if args.llama_bench and model == "mimo":
        tell("start llama.cpp's server")
        files = LlamaFiles(args.llama_bench, args.gguf_python, directory, directory / "gguf")
        log, threads = directory.parent / "llama-server.log", torch.get_num_threads()
        place = (args.llama_bench, files.write("BF16"), longest, threads, log)
        server = LlamaServer(*place)  # In bfloat16.
        yield Chat("llama.cpp", 0, partial(server.answer, new_tokens=ANSWER), server.close)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser(
        "second_turn", __doc__, *command.FILES, "--threads", "--seed", *command.PEERS, "--backend",
        prompt_tokens=8192, spec_tokens=[1], repeats=1,
    )  # fmt: skip
    families = dict[str, Any](nargs="+", choices=SHAPES, metavar="NAME")
    parser.add_argument("--families", default=list(SHAPES), **families)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
