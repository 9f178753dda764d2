"""The cost of quantisation: perplexity over plain weights', mean KL divergence, same next token.

    python -m benchmarks.quality [CHECKPOINT] --files FILE ... --texts TEXT ... --out RESULTS.json

A row is a scheme by which weights are rounded as they are loaded, a dtype of the KV cache, or a
file of another number of bits: a checkpoint that `mtpc quantize` wrote, or a GGUF file of
llama.cpp's. "weights alone" is transformers with the dequantised weights; "as run" is mtpc's cpu
backend, which rounds activations as well. Both are compared with the plain checkpoint in the same
program, token by token, so that a text's difficulty drops out of the standard error, which is that
of windows. The default text is of Python's help topics (`pydoc_data`), without the parts by which
`mtpc quantize --calibration` calibrates. A run whose results exist goes on behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.tables import Column, Row, TableForm, fields
from mtpc.cli.demo import chosen_checkpoint
from mtpc.config import SCHEMES
from mtpc.evaluation.engines import MtpcEngine
from mtpc.models.hf import model_class
from mtpc.models.load import family_of
from mtpc.models.read_config import read_config
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.quantise import TABLES, quantise, spec_by_scheme
from mtpc.weights.served_model import ServedModel

WINDOW = 256
CALIBRATES = 1000
"""`mtpc quantize --calibration` reads so many characters of each help topic."""
WAYS = ("schemes", "files", "kv_cache_dtypes")
"""Arguments that name rows: a run that goes on may have others."""


def over_plain(found: Tensor, plain: Tensor) -> tuple[float, float]:
    """Ratio of perplexities and its standard error, of losses [windows, tokens]."""
    means = (found - plain).mean(-1)
    ratio = math.exp(float(means.mean()))
    return ratio, ratio * float(means.std()) / math.sqrt(len(means))


@dataclass(frozen=True)
class Way:
    """One way of storing a model's weights.

    Attributes:
        checkpoint: its files.
        scheme: by which `mtpc.compile` rounds them; None leaves them as they are.
    """

    checkpoint: Checkpoint
    scheme: str | None = None

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights, dequantised, by name."""
        return {name: self._tensor(name) for name in self.checkpoint.target_tensors}

    def _tensor(self, name: str) -> Tensor:
        tensor = self.checkpoint.tensor(name)
        spec = None if name in self.checkpoint.specs else spec_by_scheme(self.scheme, name, tensor)
        return tensor if spec is None else quantise(tensor, spec).dequantise().to(tensor.dtype)

    def model(self) -> Any:
        """transformers' model of the weights, in bfloat16."""
        family = family_of(self.checkpoint)
        config = read_config(self.checkpoint, family)
        return model_class(family).from_pretrained(
            None, config=config, state_dict=self.tensors(), dtype=torch.bfloat16
        )

    @property
    def bits(self) -> float:
        """Bits of a weight of the matrices of which a step reads all."""
        total = count = 0
        for name in self.checkpoint.target_tensors:
            tensor = self.checkpoint.meta_tensor(name)
            if tensor.dim() < 2 or name.split(".")[-2] in TABLES:
                continue
            spec = self.checkpoint.specs.get(name) or spec_by_scheme(self.scheme, name, tensor)
            stored = spec.nbytes(tensor.numel()) if spec else tensor.nbytes
            total, count = total + 8 * stored, count + tensor.numel()
        return total / count


@torch.no_grad()
def distributions(model: Any, windows: Tensor) -> Iterator[Tensor]:
    """Log-probabilities of the tokens of each window but the first, [WINDOW - 1, vocabulary]."""
    for window in windows:
        yield model(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)


def losses(known: Tensor, window: Tensor) -> Tensor:
    """Losses [WINDOW - 1] of a window's tokens by their distributions."""
    return -known.gather(1, window[1:, None])[:, 0]


def plainly(model: Any, windows: Tensor) -> tuple[list[Tensor], Tensor]:
    """Distributions of all windows, rounded to float16, and losses [windows, WINDOW - 1]."""
    known, found = [], []
    for window, each in zip(windows, distributions(model, windows), strict=True):
        known.append(each.half())
        found.append(losses(each, window))
    return known, torch.stack(found)


def compared(model: Any, windows: Tensor, plain: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Losses, and the mean KL divergence from the plain model's distributions, in nats."""
    found, divergence = [], 0.0
    for window, known, wanted in zip(windows, distributions(model, windows), plain, strict=True):
        found.append(losses(known, window))
        each = torch.nn.functional.kl_div(known, wanted.float(), log_target=True, reduction="sum")
        divergence += float(each) / len(known)
    return torch.stack(found), divergence / len(windows)


def run_windows(checkpoint: Path, windows: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Losses and choices [windows, WINDOW - 1] of mtpc's cpu backend: a batch does not change a
    row."""
    sizes: dict[str, Any] = {"batch_buckets": (8,), "max_len": WINDOW + 16, "sampling": True}
    options = {"backend": "cpu", "spec_tokens": 0, **sizes, **options}
    engine = MtpcEngine(checkpoint, lambda _: None, **options)
    scored = engine.prompt_logprobs(windows.tolist(), [1] * len(windows))
    loss = torch.tensor([[-entry.logprob for entry in row] for row in scored])
    return loss, torch.tensor([[entry.top[0][0] for entry in row] for row in scored])


def measure(run: Run) -> Iterator[list[Row]]:
    """A row for each way, after those of a run that ended early."""
    args, rows = run.args, run.earlier_rows(WAYS)
    source = chosen_checkpoint(args.checkpoint)
    windows, plain = windows_of(source, args.texts, args.windows), Way(Checkpoint(source))
    run.tell(f"plain weights: {windows.numel()} tokens")
    known, wanted = plainly(plain.model(), windows)
    ran = run_windows(source, windows) if args.run else None
    run.facts |= {"tokens": wanted.numel(), "perplexity": math.exp(float(wanted.mean()))}
    yield rows
    for name, way, options in _ways(args, source):
        if any(row["name"] == name for row in rows):
            continue
        run.tell(name)
        row: Row = dict.fromkeys(FIGURES) | {"name": name, "bits": way.bits}
        if "kv_cache_dtype" not in options:
            found, row["divergence"] = compared(way.model(), windows, known)
            row["ratio"], row["ratio_error"] = over_plain(found, wanted)
        if ran is not None:
            loss, choices = run_windows(way.checkpoint.directory, windows, **options)
            row["run_ratio"], row["run_error"] = over_plain(loss, ran[0])
            row["same"] = float((choices == ran[1]).float().mean())
        run.tell(str(row))
        yield [row]


def _ways(args: Any, source: Path) -> Iterator[tuple[str, Way, dict[str, Any]]]:
    """Name, weights and options of each row."""
    for scheme in args.schemes:
        yield scheme, Way(Checkpoint(source), scheme), {"quantize": scheme}
    for file in args.files:
        yield file.name, Way(Checkpoint(file)), {}
    for kind in args.kv_cache_dtypes:
        yield f"KV cache {kind}", Way(Checkpoint(source)), {"kv_cache_dtype": kind}


def windows_of(checkpoint: Path, texts: Sequence[Path], count: int) -> Tensor:
    """Token ids [windows, WINDOW], spread evenly over the texts."""
    served = ServedModel(str(checkpoint), 0, (), checkpoint)
    text = "\n".join(path.read_text() for path in texts)
    text = text or "\n".join(topic[CALIBRATES:] for topic in topics.values())
    ids = torch.tensor(served.encode(text, special_tokens=False))
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[:: max(1, len(whole) // count)][:count]


FIGURES = (
    "name", "bits", "ratio", "ratio_error", "divergence", "run_ratio", "run_error", "same",
)  # fmt: skip
"""Of a row: bits of a weight of the matrices that a step reads; perplexity over that of the plain
weights, both in transformers, and its standard error, None for the KV cache; mean KL divergence
from the plain model's distribution of a token, in nats; perplexities' ratio in mtpc, and its error;
share of tokens for which mtpc chooses what it chooses with plain weights."""


def _with_error(ratio: str, error: str) -> Any:
    return lambda row, _: None if row[ratio] is None else f"{row[ratio]:.4f} ± {row[error]:.4f}"


FORM = TableForm(
    "What fewer bits cost",
    (
        *fields("weights=name, bits a weight=bits:.2f"),
        Column("weights alone", _with_error("ratio", "ratio_error")),
        Column("KL", "divergence", ".4f"),
        Column("as run", _with_error("run_ratio", "run_error")),
        Column("same next token", "same", ".1%"),
    ),
    lambda record: [
        "weights alone, as run: perplexity over that of plain weights, with its standard error",
        f"{record['tokens']} tokens in windows of {WINDOW}; plain perplexity "
        f"{record['perplexity']:.3f}",
    ],
)
BENCHMARK = Benchmark(
    "quality",
    __doc__,
    measure,
    FORM.of,
    (*command.RESULTS, "--threads"),
    options={
        "checkpoint": dict(nargs="?", type=Path, help="plain weights (default: the demo model)"),
        "--files": dict(nargs="*", type=Path, default=[], metavar="FILE", help="with fewer bits"),
        "--schemes": dict(nargs="*", choices=SCHEMES, default=list(SCHEMES), metavar="SCHEME"),
        "--kv-cache-dtypes": dict(nargs="*", default=[], metavar="NAME"),
        "--texts": dict(nargs="*", type=Path, default=[], metavar="FILE"),
        "--windows": command.NUMBER | dict(default=64, help=f"of {WINDOW} tokens (default: 64)"),
        "--no-run": dict(
            dest="run", action="store_false", help="measure transformers alone, without mtpc"
        ),
    },
)
main, table = BENCHMARK.commands(__name__)
