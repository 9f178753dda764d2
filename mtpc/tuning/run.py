"""A whole run of `mtpc tune-head`.

A run reads texts, measures acceptance, trains, writes the new checkpoint and measures acceptance
again. It keeps its state in a directory next to the new checkpoint, from which `resume` continues.
Files there are replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import mtpc
from mtpc.engine.stats import DraftCounts
from mtpc.errors import CheckpointError, OptionError
from mtpc.models.mtp_faults import MTPTensors, find_faults
from mtpc.models.mtp_layers import tensors_as_stored
from mtpc.plan import make_plan
from mtpc.tuning.chain import TrainedModel
from mtpc.tuning.texts import PROMPT_TOKENS, Texts, continue_rows, measure_drafts, read_texts
from mtpc.tuning.train import Progress, Schedule, Tell, Training, replacing, unreadable
from mtpc.weights.checkpoint import Checkpoint, listing
from mtpc.weights.shards import copy_replacing, files_beside, refuse_existing
from mtpc.weights.tensor_file import save_tensors
from mtpc.wiring import check_rules

_PREPARED, _STATE, _SETTINGS = "prepared.safetensors", "state.pt", "settings"


@dataclass(frozen=True)
class Plan:
    """The settings of a run.

    Attributes:
        schedule: the schedule of the training.
        length: tokens of a training text.
        continuations: the most training texts whose last three quarters the target writes.
        prompts: the most held-out prompts.
        new_tokens: tokens to decode after each held-out prompt.
    """

    schedule: Schedule
    length: int
    continuations: int
    prompts: int
    new_tokens: int


@dataclass(frozen=True)
class Tuned:
    """The result of a run.

    Attributes:
        before: drafts of the old checkpoint on held-out text.
        after: drafts of the new checkpoint on the same text.
        texts: number of training texts, and of tokens in each.
        progress: steps and times of the training.
        tensors: names of the replaced tensors.
    """

    before: DraftCounts
    after: DraftCounts
    texts: tuple[int, int]
    progress: Progress
    tensors: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Relative gain in accepted drafts per step: 0.1 is ten per cent more."""
        return self.after.per_step / self.before.per_step - 1 if self.before.per_step else 0.0


class Tuning:
    """One run.

    Args:
        checkpoint: the directory; its target is not trained.
        texts: UTF-8 files to train on.
        held_out: files of held-out text; () holds out the end of each text.
        out: the new directory; it appears when it is complete.
        plan: the run's settings.
        options: options of `mtpc.compile`, for decoding; `spec_tokens` is K.
        tell: receives lines that report progress.

    Raises:
        OptionError: `out` exists.
        CheckpointError: the MTP layers are absent, faulty or quantised.
    """

    def __init__(
        self,
        checkpoint: Path,
        texts: Sequence[Path],
        held_out: Sequence[Path],
        out: Path,
        plan: Plan,
        options: dict[str, Any],
        tell: Tell = lambda line: None,
    ):
        refuse_existing(out)
        self._paths, self._held_out, self._out = list(texts), list(held_out), out
        longest = max(plan.length, PROMPT_TOKENS + plan.new_tokens)
        self._options = {"max_len": longest, "batch_buckets": (8,), **options}
        parsed = mtpc.CompileOptions.parse(self._options)
        self._spec_tokens, self._parsed = _one_number(parsed, plan), parsed
        self._checkpoint, self._plan, self._tell = Checkpoint(checkpoint), plan, tell
        self.directory = out.absolute().with_name(f"{out.name}.tuning")
        _refuse_what_cannot_be_tuned(self._checkpoint, parsed.dtype)

    def run(self, resume: bool = False) -> Tuned:
        """Run from the start, or continue an interrupted run.

        Raises:
            OptionError: an interrupted run exists and `resume` is not set; or `resume` is set, and
                there is no run, or one with other settings.
            RequestError: see `read_texts`.
            CheckpointError: the new checkpoint or the state cannot be written, or the state that
                is resumed is damaged.
        """
        texts, before = self._prepare(resume)
        self._tell("load the target and its MTP layers")
        model = TrainedModel(
            self._checkpoint,
            self._spec_tokens,
            self._parsed.dtype,
            check_rules(self._parsed.wiring),
            _device(self._parsed.backend),
        )
        self._stored(model)  # Raises now if the trained tensors could not be written.
        state = self.directory / _STATE
        training = Training(model, texts.rows, self._plan.schedule, state)
        progress = training.run(self._tell)
        self._tell(f"write {self._out}")
        tensors = self._stored(model)
        copy_replacing(self._checkpoint, tensors, self._out)
        del model, training
        shutil.rmtree(self.directory)
        self._tell("decode held-out text with the new MTP layers")
        after = self._measure(mtpc.compile(self._out, self._tell_stage, **self._options), texts)
        count, length = texts.rows.shape
        return Tuned(before, after, (count, length), progress, tuple(tensors))

    def _prepare(self, resume: bool) -> tuple[Texts, DraftCounts]:
        """The texts and the acceptance before training, from an interrupted run or made now."""
        here = self.directory
        if here.exists() and not resume:
            raise OptionError(
                f"{here} is of a run that has not ended; give --resume to continue it, or remove it"
            )
        if resume and not here.exists():
            raise OptionError(f"there is no {here} to resume; expected that of an interrupted run")
        settings = self._settings()
        if (here / _PREPARED).is_file():
            return _read_prepared(here / _PREPARED, settings)
        self._tell("read the texts")
        model = mtpc.compile(self._checkpoint.directory, self._tell_stage, **self._options)
        lengths = (self._plan.length, self._plan.prompts)
        texts = read_texts(self._paths, self._held_out, model.served, *lengths)
        self._tell(f"decode {len(texts.prompts)} held-out prompts")
        before = self._measure(model, texts)
        count = min(self._plan.continuations, len(texts.rows))
        self._tell(f"let the target continue {count} of {len(texts.rows)} texts")
        texts = Texts(continue_rows(model, texts.rows, count), texts.prompts)
        here.mkdir(exist_ok=True)
        _write_prepared(here / _PREPARED, texts, before, settings)
        return texts, before

    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same when a run is resumed."""
        digests = {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in [*self._paths, *self._held_out]
            if path.is_file()
        }
        plan = asdict(self._plan)
        return {
            **plan.pop("schedule"),
            **plan,
            "spec_tokens": self._spec_tokens,
            "wiring": [list(rule) for rule in check_rules(self._parsed.wiring)],
            "dtype": self._parsed.dtype,
            "checkpoint": str(self._checkpoint.directory.resolve()),
            "texts": digests,
        }

    def _measure(self, model: mtpc.SpecModel, texts: Texts) -> DraftCounts:
        return measure_drafts(model, texts.prompts, self._plan.new_tokens)

    def _tell_stage(self, progress: mtpc.Progress) -> None:
        if progress.stage:
            self._tell(progress.stage)

    def _stored(self, model: TrainedModel) -> dict[str, Tensor]:
        """The trained tensors by their names in the checkpoint's files.

        Raises:
            CheckpointError: a stored tensor corresponds to no tensor of an MTP layer.
        """
        stored, family = MTPTensors.of(self._checkpoint), model.loaded.family
        found: dict[str, Tensor] = {}
        layers = zip(stored.layers(), model.loaded.mtp_layers, strict=False)
        for index, (names, layer) in enumerate(layers):
            prefix = stored.prefix(index)
            inner = [name.removeprefix(prefix) for name in names]
            ends = {name: f"{index}.{role}.weight" for name, role in family.shared_tensors.items()}
            wanted = [n for n in inner if n not in ends or ends[n] in model.trained]
            known = tensors_as_stored(layer, wanted, family)
            lost = [prefix + name for name in wanted if name not in known]
            if lost:
                raise CheckpointError(
                    f"{self._checkpoint.directory} stores {listing(lost)} in a form that mtpc "
                    "tune-head does not write; expected a tensor for each weight of an MTP layer"
                )
            found |= {prefix + name: tensor for name, tensor in known.items()}
        return found


def _one_number(options: mtpc.CompileOptions, plan: Plan) -> int:
    """K, as a single number that suits the length of a text."""
    tiers = make_plan(options).tiers
    count = max(tiers)
    if len(tiers) > 1 or not 1 <= count < plan.length - 1:
        raise OptionError(
            f"spec_tokens is {','.join(map(str, tiers))}; expected a number of drafts to "
            f"train for, from 1 to {plan.length - 2} with texts of {plan.length} tokens"
        )
    return count


def _refuse_what_cannot_be_tuned(checkpoint: Checkpoint, dtype: str | None) -> None:
    directory = checkpoint.directory
    if checkpoint.gguf:
        raise CheckpointError(
            f"{directory} is a GGUF file; expected safetensors files, which the new checkpoint is "
            "made of"
        )
    files_beside(directory, checkpoint.paths)
    faults = find_faults(directory, dtype)
    if faults:
        raise CheckpointError(
            f"the MTP layers of {directory} cannot be tuned: {faults[0].kind}: "
            f"{faults[0].problem}; {faults[0].remedy}"
        )
    stored = MTPTensors.of(checkpoint)
    prefixes = tuple(stored.prefix(index) for index in range(len(stored.layers())))
    quantised = [name for name in checkpoint.quantised if name.startswith(prefixes)]
    if quantised:
        raise CheckpointError(
            f"{len(quantised)} weights of the MTP layers of {directory} are quantised: "
            f"{listing(quantised)}; expected plain ones: tune the checkpoint that it was made of, "
            "and quantise the result (mtpc quantize), or put plain layers into this one: "
            f"mtpc graft PLAIN {directory} OUT"
        )


def _device(backend: str) -> str:
    """The device to train on, which is the one that decodes."""
    has_gpu = torch.cuda.is_available() and backend in ("auto", "cuda")
    return "cuda" if has_gpu else "cpu"


def _write_prepared(
    path: Path, texts: Texts, before: DraftCounts, settings: dict[str, Any]
) -> None:
    tensors = {
        "rows": texts.rows.contiguous(),
        "prompts": texts.prompts.contiguous(),
        "accepted": torch.tensor(before.accepted),
        "drafted": torch.tensor(before.drafted),
    }
    with replacing(path) as scratch:
        save_tensors(tensors, scratch, **{_SETTINGS: json.dumps(settings)})


def _read_prepared(path: Path, settings: dict[str, Any]) -> tuple[Texts, DraftCounts]:
    """Read what `_write_prepared` wrote.

    Raises:
        OptionError: the run had other settings.
        CheckpointError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            begun = json.loads(file.metadata()[_SETTINGS])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = Texts(found["rows"], found["prompts"])
        before = DraftCounts(found["accepted"].tolist(), found["drafted"].tolist())
        differ = [name for name, value in settings.items() if begun[name] != value]
    except Exception as error:  # A file of another kind lacks anything.
        raise unreadable(path, error) from error
    for name in differ:
        raise OptionError(
            f"the run in {path.parent} was begun with {name} {begun[name]!r}, and now it is "
            f"{settings[name]!r}; expected the same value: give that, or remove the directory to "
            "start again"
        )
    return texts, before
