"""A whole run of `mtpc tune-head` or `mtpc train-draft`.

A run reads texts, lets the target continue them, keeps what the target says of them, trains, and
writes the drafter. Its files lie in a directory next to the new one, from which `resume` continues.
They are replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
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
from mtpc.tuning.chain import Teacher, TrainedModel, cache_kind
from mtpc.tuning.files import replacing, unreadable
from mtpc.tuning.forms import FORMS, write_new_drafter
from mtpc.tuning.store import CHUNK_ROWS, MOST_PROBABLE, TargetRows, row_bytes, write_rows
from mtpc.tuning.texts import (
    PROMPT_TOKENS,
    Limits,
    Texts,
    known_tokens,
    measure_drafts,
    read_texts,
)
from mtpc.tuning.train import Progress, Schedule, Tell, Training
from mtpc.weights.checkpoint import DRAFT, Checkpoint, listing
from mtpc.weights.paired_checkpoint import INVERSE_MAP, PairedCheckpoint
from mtpc.weights.served_model import ServedModel
from mtpc.weights.shards import copy_replacing, files_beside, refuse_existing
from mtpc.weights.tensor_file import save_tensors
from mtpc.wiring import check_rules

_PREPARED, _STATE, _SETTINGS = "prepared.safetensors", "state.pt", "settings"
_NEW = "new"
"""Directory of a drafter that is not trained yet."""
_DIGEST_BYTES = 16 << 20
HELD_OUT_ROWS = 32
"""The most held-out texts that choose the best weights."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run.

    Attributes:
        length: tokens of a training text.
        continuations: the most training texts; the target writes the last three quarters of each.
        prompts: the most held-out prompts.
        new_tokens: tokens to decode after each held-out prompt.
        vocabulary: the most tokens that drafts learn: the target's most frequent ones.
        disk: the most bytes to keep of what the target says; fewer texts are used for less.
    """

    schedule: Schedule
    length: int
    continuations: int
    prompts: int
    new_tokens: int
    vocabulary: int = 8192
    disk: int = 4 << 30


@dataclass(frozen=True)
class Tuned:
    """The result of a run.

    Attributes:
        before: drafts of the old checkpoint on held-out text; None if there was no drafter.
        after: drafts of the new one on the same text.
        texts: number of training texts, and of tokens in each.
        tensors: names of the trained tensors.
    """

    before: DraftCounts | None
    after: DraftCounts
    texts: tuple[int, int]
    progress: Progress
    tensors: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Relative gain in accepted drafts per step: 0.1 is ten per cent more."""
        before = self.before.per_step if self.before else 0.0
        return self.after.per_step / before - 1 if before else 0.0


class Tuning:
    """One run.

    Args:
        checkpoint: the directory or GGUF file; its target is not trained.
        texts: UTF-8 files to train on.
        held_out: files of held-out text; () holds out the end of each text.
        out: the new directory; it appears when it is complete.
        plan: the run's settings.
        options: options of `mtpc.compile`, for decoding; `spec_tokens` is K.
        tell: receives lines that report progress.
        form: of `FORMS`: train a new drafter, which `out` holds alone; None: train the
            checkpoint's MTP layers, and write all of it.

    Raises:
        OptionError: `out` exists, or `disk` holds no text.
        CheckpointError: the MTP layers to train are absent, faulty or quantised.
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
        form: str | None = None,
    ):
        refuse_existing(out)
        self._paths, self._held_out, self._out = list(texts), list(held_out), out
        longest = max(plan.length + 1, PROMPT_TOKENS + plan.new_tokens)
        self._options = {"max_len": longest, "batch_buckets": (CHUNK_ROWS,), **options}
        parsed = mtpc.CompileOptions.parse(self._options)
        tiers = make_plan(parsed).tiers
        count = max(tiers)
        if len(tiers) > 1 or not 1 <= count < plan.length - 1:
            raise OptionError(
                f"spec_tokens is {','.join(map(str, tiers))}; expected a number of drafts to "
                f"train for, from 1 to {plan.length - 2} with texts of {plan.length} tokens"
            )
        self._spec_tokens, self._parsed = count, parsed
        self._checkpoint, self._plan, self._tell = Checkpoint(checkpoint), plan, tell
        self._form = form
        if parsed.draft:
            raise OptionError(
                f"draft is {str(parsed.draft)!r}; leave it out: a new drafter is trained by mtpc "
                "train-draft, and MTP layers that the checkpoint holds by mtpc tune-head"
            )
        self.directory = out.absolute().with_name(f"{out.name}.tuning")
        if form is None:
            _refuse_what_cannot_be_tuned(self._checkpoint, parsed.dtype)
        read = MTPTensors.of(self._checkpoint)
        if form is None:
            cache_kind(read.family, read.config)  # Raises before the target writes for hours.
        layers = read.family.num_layers(read.config)
        self._layer_ids = FORMS[form or "mtp"].layer_ids(layers)
        self._limits = self._room(read.config.hidden_size * len(self._layer_ids))

    def _room(self, width: int) -> Limits:
        """How much text the disk holds, of `width` features."""
        plan = self._plan
        dtype: torch.dtype = getattr(torch, self._parsed.dtype or self._checkpoint.dtype)
        one = row_bytes(plan.length, width, dtype.itemsize)
        rows = plan.disk // one
        if rows < 2:
            raise OptionError(
                f"disk is {plan.disk} bytes, and what the target says of one text of {plan.length} "
                f"tokens takes {one}; expected {2 * one} at least"
            )
        return Limits(known_tokens(plan.length), rows, HELD_OUT_ROWS, plan.prompts)

    def run(self, resume: bool = False) -> Tuned:
        """Run from the start, or continue an interrupted run.

        Raises:
            OptionError: an interrupted run exists and `resume` is not set; or `resume` is set, and
                there is no run, or one with other settings.
            RequestError: see `read_texts`.
            CheckpointError: the new checkpoint or the state cannot be written, or the state that
                is resumed is damaged.
        """
        try:
            return self._run(resume)
        except KeyboardInterrupt:
            if self.directory.exists():
                self._tell(f"{self.directory} keeps what was made: go on with --resume")
            raise

    def _run(self, resume: bool) -> Tuned:
        texts, before = self._prepare(resume)
        source = TargetRows(self.directory, texts.rows)
        if not source.is_whole:
            self._write(source)
        self._tell("load the target")
        has_gpu = torch.cuda.is_available() and self._parsed.backend in ("auto", "cuda")
        device = "cuda" if has_gpu else "cpu"
        teacher = Teacher(self._checkpoint, self._parsed.dtype, device)
        size = teacher.model.get_input_embeddings().weight.shape[0]
        frequent = source.frequent(self._plan.vocabulary, texts.held_out, size)
        drafted, vocabulary = self._drafted(teacher, frequent)
        rules = check_rules(self._parsed.wiring)
        model = TrainedModel(drafted, self._spec_tokens, teacher, rules, vocabulary)
        files = drafted.draft if isinstance(drafted, PairedCheckpoint) else drafted
        _stored(model, files)  # Raises now if the trained tensors could not be written.
        schedule, state = self._plan.schedule, self.directory / _STATE
        training = Training(model, source, texts.held_out, schedule, state)
        progress = training.run(self._tell)
        self._tell(f"write {self._out}")
        tensors = _stored(model, files)
        copy_replacing(files, tensors, self._out)
        del model, training, source, teacher, drafted, files
        shutil.rmtree(self.directory)
        self._tell("decode held-out text with the new drafter")
        after = self._measure(self._compiled(self._out), texts)
        return Tuned(before, after, (texts.trained, self._plan.length), progress, tuple(tensors))

    def _drafted(self, teacher: Teacher, frequent: Tensor) -> tuple[Checkpoint, Tensor]:
        """The checkpoint whose drafter is trained, and the tokens that it learns.

        That is the given one, or one with a new drafter, which keeps its tokens when it is resumed.
        """
        if self._form is None:
            return self._checkpoint, frequent
        new = self.directory / _NEW
        if not new.exists():
            write_new_drafter(self._form, teacher, frequent, new)
        paired = PairedCheckpoint(self._checkpoint.directory, new)
        return paired, torch.tensor(paired.draft_vocab) if paired.draft_vocab else frequent

    def _compiled(self, out: Path | None, **more: Any) -> mtpc.SpecModel:
        """The model with its drafter, that of `out` if there is one."""
        checkpoint, options = self._checkpoint.directory, {**self._options, **more}
        if self._form is None:
            checkpoint = out or checkpoint
        elif out is not None:
            options["draft"] = out
        return mtpc.compile(checkpoint, self._tell_stage, **options)

    def _write(self, source: TargetRows) -> None:
        """Let the target write the texts that are missing."""
        kept = dict(hidden_state_layers=self._layer_ids, max_logprobs=MOST_PROBABLE, sampling=True)
        model = self._compiled(None, spec_tokens=0, **kept)
        what = f"the target writes {len(source)} texts"
        source.fill(
            lambda known: write_rows(model, known, self._plan.length),
            lambda share: self._tell(f"{what}: {share:.0%}"),
        )

    def _prepare(self, resume: bool) -> tuple[Texts, DraftCounts | None]:
        """The beginnings of texts and the acceptance before training, from an interrupted run or
        made now."""
        here = self.directory
        if here.exists() and not resume:
            raise OptionError(
                f"{here} is of a run that has not ended; give --resume to continue it, or remove it"
            )
        if resume and not here.exists():
            raise OptionError(f"there is no {here} to resume; expected that of an interrupted run")
        settings = self._settings()
        if (here / _PREPARED).is_file():
            texts, before = _read_prepared(here / _PREPARED, settings)
        else:
            self._tell("read the texts")
            source = self._checkpoint.directory
            served = ServedModel(str(source), 0, (), source)
            texts, before = read_texts(self._paths, self._held_out, served, self._limits), None
            if self._form is None:
                self._tell(f"decode {len(texts.prompts)} held-out prompts")
                before = self._measure(self._compiled(None), texts)
            here.mkdir(exist_ok=True)
            _write_prepared(here / _PREPARED, texts, before, settings)
        most = min(self._limits.rows, texts.held_out + self._plan.continuations)
        rows = texts.rows[: max(most, texts.held_out + 1)]
        return Texts(rows, texts.held_out, texts.prompts), before

    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same when a run is resumed.

        The others may change: a run goes on for longer, or with more text.
        """
        digests = {
            str(path): _digest(path) for path in [*self._paths, *self._held_out] if path.is_file()
        }
        plan = self._plan
        return {
            "seed": plan.schedule.seed,
            "length": plan.length,
            "prompts": plan.prompts,
            "new_tokens": plan.new_tokens,
            "vocabulary": plan.vocabulary,
            "form": self._form,
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


def _digest(path: Path) -> str:
    """Of a file's beginning, which tells texts apart: a file may be of any size."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(_DIGEST_BYTES)).hexdigest()


def _stored(model: TrainedModel, files: Checkpoint) -> dict[str, Tensor]:
    """The trained tensors by their names in a checkpoint's files. Raises CheckpointError: a stored
    tensor corresponds to no tensor of a drafter."""
    family, count = model.loaded.family, model.loaded.config.num_hidden_layers
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(model.loaded.mtp_layers):
        prefix = family.layer_prefix(count, index).removeprefix(DRAFT)
        inner = [name[len(prefix) :] for name in files.stored if name.startswith(prefix)]
        ends = {name: f"{index}.{role}.weight" for name, role in family.shared_tensors.items()}
        wanted = [n for n in inner if n not in ends or ends[n] in model.trained]
        known = tensors_as_stored(layer, wanted, family)
        lost = [prefix + name for name in wanted if name not in known and name != INVERSE_MAP]
        if lost:
            raise CheckpointError(
                f"{files.directory} stores {listing(lost)} in a form that mtpc tune-head does not "
                "write; expected a tensor for each weight of an MTP layer"
            )
        found |= {prefix + name: tensor for name, tensor in known.items()}
    return found


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


def _write_prepared(
    path: Path, texts: Texts, before: DraftCounts | None, settings: dict[str, Any]
) -> None:
    tensors = {
        "rows": texts.rows.contiguous(),
        "held_out": torch.tensor(texts.held_out),
        "prompts": texts.prompts.contiguous(),
        "accepted": torch.tensor(before.accepted if before else [], dtype=torch.int64),
        "drafted": torch.tensor(before.drafted if before else [], dtype=torch.int64),
    }
    with replacing(path) as scratch:
        save_tensors(tensors, scratch, **{_SETTINGS: json.dumps(settings)})


def _read_prepared(path: Path, settings: dict[str, Any]) -> tuple[Texts, DraftCounts | None]:
    """Read what `_write_prepared` wrote.

    Raises:
        OptionError: the run had other settings.
        CheckpointError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            begun = json.loads(file.metadata()[_SETTINGS])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = Texts(found["rows"], int(found["held_out"]), found["prompts"])
        counts = (found["accepted"].tolist(), found["drafted"].tolist())
        before = DraftCounts(*counts) if counts[0] else None
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
