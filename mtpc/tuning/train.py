"""Trains MTP layers: the loss of all K drafts, the schedule, and the state that a run saves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.tuning.chain import TrainedModel

DEPTH_DECAY = 0.8
"""Weight of a draft's loss relative to the draft before it, as in EAGLE-3 (arXiv:2503.01840)."""
WARM_UP, LAST_RATE = 0.03, 0.02
"""Share of a run in which the learning rate grows; and its last value, relative to the highest."""
CLIP = 1.0
FEATURE_BYTES = 2 << 30
"""The most bytes of the target's features to keep; others are computed again for each use."""
LOGIT_VALUES = 1 << 26
"""The most logits of drafts in memory at once: 256 MiB in float32. A step with more splits its
batch."""
TELL_SECONDS, SAVE_SECONDS = 5.0, 60.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Schedule:
    """The length of a run, its batches and its learning rate.

    Attributes:
        steps: the most steps; None: only `minutes` ends the run.
        minutes: the most wall time of the steps; None: only `steps` ends the run.
        batch: texts per step.
        learning_rate: the highest learning rate.
        seed: seed of the order of texts.
    """

    steps: int | None
    minutes: float | None
    batch: int
    learning_rate: float
    seed: int

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is done, 0..1."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.minutes is not None:
            shares.append(seconds / (60 * self.minutes))
        return min(max(shares), 1.0)

    def rate(self, progress: float) -> float:
        """The learning rate: a warm-up, then half a cosine."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * progress)
        return (
            self.learning_rate
            * min(1.0, (progress + 1e-3) / WARM_UP)
            * (LAST_RATE + (1 - LAST_RATE) * cosine)
        )

    def drawn(self, step: int, count: int) -> Tensor:
        """The indices of a step's texts, below `count`; each epoch has its own random order."""
        places = torch.arange(step * self.batch, (step + 1) * self.batch)
        epochs = {int(epoch) for epoch in places // count}
        order = {epoch: self._order(epoch, count) for epoch in epochs}
        return torch.stack([order[int(p) // count][int(p) % count] for p in places])

    def _order(self, epoch: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed << 32) + epoch)
        return torch.randperm(count, generator=generator)


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: number of finished steps.
        seconds: wall time of these steps.
        processor_seconds: CPU time of these steps, of all threads.
        curve: entries every few seconds: step, mean loss, and share of right drafts by position.
    """

    step: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


class FeatureCache:
    """The target's features of texts, kept up to a limit.

    Args:
        model: has the target.
        texts: token ids, [N, L].
        limit: the most bytes to keep.
    """

    def __init__(self, model: TrainedModel, texts: Tensor, limit: int = FEATURE_BYTES):
        self._model, self._texts, self._left = model, texts, limit
        self._kept: dict[int, Tensor] = {}

    def get(self, places: Tensor) -> Tensor:
        """Features of the texts at `places`, [B, L, H]."""
        return torch.stack([self._one(place) for place in places.tolist()])

    def _one(self, place: int) -> Tensor:
        if place in self._kept:
            return self._kept[place]
        # One text at a time, so that rounding does not depend on the other texts of a batch.
        features = self._model.features(self._texts[place : place + 1])[0]
        if features.nbytes <= self._left:
            self._kept[place] = features
            self._left -= features.nbytes
        return features


def draft_losses(model: TrainedModel, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss of all drafts of texts [B, L], and the share of right drafts [K].

    The loss of a draft is its cross-entropy to the target's distribution, not to the text's next
    token, because a draft is accepted if it is the target's choice.
    """
    truth = model.target_logits(features[:, 1:]).float()
    best, wanted = truth.argmax(-1, keepdim=True), truth.softmax(-1)
    total, right = truth.new_zeros(()), []
    weights = [DEPTH_DECAY**depth for depth in range(model.count)]
    for depth, states in enumerate(model.draft_states(ids, features)):
        logits = model.draft_logits(depth, states).float()
        total = total + weights[depth] / sum(weights) * Loss.apply(logits, wanted[:, depth:])
        seen = logits.detach()
        # argmax takes six times as long as amax.
        right.append((seen.gather(-1, best[:, depth:]) == seen.amax(-1, keepdim=True)).float())
    return total, torch.stack([hits.mean() for hits in right])


class Loss(torch.autograd.Function):
    """Mean cross-entropy of logits [..., V] to distributions [..., V].

    It is `functional.cross_entropy` in fewer passes: the gradient is made in softmax's memory.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        softmax = logits.softmax(-1)
        # The largest probability is 1 / sum(exp(logits - largest)).
        log_sums = logits.amax(-1) - softmax.amax(-1).log()
        loss = (log_sums - torch.linalg.vecdot(logits, wanted)).mean()
        ctx.save_for_backward(softmax.sub_(wanted).div_(log_sums.numel()))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (of_logits,) = ctx.saved_tensors
        return of_logits * gradient, None


class Training:
    """The training on texts. It can stop after any step and continue.

    Args:
        model: the model to train.
        texts: token ids, int64 [N, L].
        schedule: the schedule.
        state: the file of the saved state; if it exists, the training continues from it.
    """

    def __init__(self, model: TrainedModel, texts: Tensor, schedule: Schedule, state: Path):
        self._model, self._texts, self._schedule, self._state = model, texts, schedule, state
        self._features = FeatureCache(model, texts)
        values = model.count * texts.shape[1] * model.loaded.vocab_size
        self._together = max(1, LOGIT_VALUES // values)
        self._optimizer = torch.optim.AdamW(
            model.trained.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.progress = Progress()
        if state.is_file():
            self._restore()

    def run(self, tell: Tell) -> Progress:
        """Train to the end of the schedule. Saves the state every minute and at the end."""
        at, saved, found = self.progress, time.monotonic(), list[tuple[float, list[float]]]()
        told = saved
        while self._share() < 1:
            start, used = time.monotonic(), time.process_time()
            found.append(self._step())
            now = time.monotonic()
            at.step, at.seconds = at.step + 1, at.seconds + now - start
            at.processor_seconds += time.process_time() - used
            is_over = self._share() >= 1
            if now - told > TELL_SECONDS or is_over:
                point = {"step": at.step, "seconds": round(at.seconds, 1), **_means(found)}
                at.curve.append(point)
                right = " ".join(f"{share:.1%}" for share in point["right"])
                tell(
                    f"{self._share():.0%}: step {at.step}, loss {point['loss']:.3f}, "
                    f"right drafts {right}"
                )
                told, found = now, []
            if now - saved >= SAVE_SECONDS or is_over:
                self.save()
                saved = now
        return at

    def _share(self) -> float:
        return self._schedule.progress(self.progress.step, self.progress.seconds)

    def _step(self) -> tuple[float, list[float]]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(self._share())
        places = self._schedule.drawn(self.progress.step, len(self._texts))
        self._optimizer.zero_grad()
        loss, right = 0.0, torch.zeros(self._model.count)
        for part in places.split(self._together):
            share = len(part) / len(places)
            with self._model.mixed():
                features = self._features.get(part)
                one, hits = draft_losses(self._model, self._texts[part], features)
            (share * one).backward()
            loss, right = loss + share * one.item(), right + share * hits.cpu()
        torch.nn.utils.clip_grad_norm_(self._model.trained.values(), CLIP)
        self._optimizer.step()
        return loss, right.tolist()

    def save(self) -> None:
        """Save the state; the file is replaced atomically."""
        value = {
            "progress": asdict(self.progress),
            "trained": self._model.trained,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._state) as scratch, scratch.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())

    @torch.no_grad()
    def _restore(self) -> None:
        try:
            value = torch.load(self._state, weights_only=True, map_location="cpu")
            self.progress = Progress(**value["progress"])
            for name, parameter in self._model.trained.items():
                parameter.copy_(value["trained"][name])
            self._optimizer.load_state_dict(value["optimizer"])
        except Exception as error:  # torch raises errors of any kind.
            raise unreadable(self._state, error) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write within the block, which then takes the place of `path`.

    Raises:
        CheckpointError: it cannot be written; nothing is left of it.
    """
    scratch = path.with_suffix(".new")
    try:
        yield scratch
        scratch.replace(path)
    except (OSError, RuntimeError) as error:  # torch hides the error of the system.
        raise CheckpointError(
            f"cannot write {path}: {error}; free space, and continue with --resume"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file of an interrupted run that is damaged."""
    reason = f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"cannot read {path}: {reason:.300}; remove {path.parent} to begin anew, without --resume"
    )


def _means(found: list[tuple[float, list[float]]]) -> dict[str, Any]:
    """The mean loss of several steps, and the mean shares of right drafts by position."""
    losses, shares = zip(*found, strict=True)
    right = [round(fmean(column), 4) for column in zip(*shares, strict=True)]
    return {"loss": round(fmean(losses), 4), "right": right}
