"""Trains MTP layers: the loss of all K drafts, the schedule, and the state that a run saves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mtpc.tuning.chain import TrainedModel, wide
from mtpc.tuning.files import replacing, unreadable
from mtpc.tuning.products import LinearProducts, weight_gradient
from mtpc.tuning.store import Rows, TargetRows

DEPTH_DECAY = 0.8
"""Weight of a draft's loss relative to the draft before it, as in EAGLE-3 (arXiv:2503.01840)."""
WARM_UP, LAST_RATE = 0.03, 0.02
"""Share of a run in which the learning rate grows; and its last value, relative to the highest."""
CLIP = 1.0
LOGIT_VALUES = 1 << 22
"""The most logits of drafts in memory at once: few enough for a processor's cache."""
MEASURE_STEPS = 50
"""Steps from one measurement on held-out text to the next."""
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
        seconds: wall time of the finished steps.
        processor_seconds: CPU time of these steps, of all threads.
        curve: entries every few seconds: step, mean loss, and share of right drafts by position, of
            the texts that are trained on. A draft counts if those before it are right.
        held_out: the same shares on held-out texts, every `MEASURE_STEPS` steps.
    """

    step: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)


def draft_losses(model: TrainedModel, rows: Rows) -> tuple[Tensor, Tensor]:
    """The weighted loss of all drafts of texts, and their acceptance [K].

    The loss of a draft is its cross-entropy to the target's distribution, not to the text's next
    token, because a draft is accepted if it is the target's choice. Of the distribution counts
    what is kept and is in the draft vocabulary. Where the target's choice is not, nothing is
    learned, and the draft is wrong. Drafts of the text's beginning, of which the target says
    nothing, do not count. Entry d of the acceptance is the share of rows in which drafts 0 to d
    are all right.
    """
    places = model.places[rows.tokens.long()]
    shares = rows.logprobs.exp() * (places >= 0) * (places[..., :1] >= 0)
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    weights = [DEPTH_DECAY**depth for depth in range(model.count)]
    total, right = torch.zeros(()), []
    # Row t of draft d drafts what the target says after token t + d + 1. It says nothing after the
    # first `silent` tokens.
    silent = rows.ids.shape[1] - places.shape[1]
    begin = max(silent - 1, 0)
    for depth, states in enumerate(model.draft_states(rows.ids, rows.fed)):
        start = max(silent - depth - 1, 0)
        given, head = model.head_rows(depth, states[:, start:])
        said = start + depth + 1 - silent
        wanted = [each[:, said:].flatten(0, 1).to(given.device) for each in (places, shares)]
        loss, hits = HeadLoss.apply(given.flatten(0, 1), head, *wanted)
        total = total.to(loss.device) + weights[depth] / sum(weights) * loss
        hits = hits.unflatten(0, given.shape[:2])
        right.append(hits[:, begin - start : rows.ids.shape[1] - model.count - start])
    return total, torch.stack(right).cumprod(0).float().mean((1, 2))


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of a head's logits to distributions over few tokens.

    The logits exist for `LOGIT_VALUES` at a time: the gradient is made with them.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, places: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean over the rows with shares, and whether the largest logit is the wanted one.

        Args:
            ctx: keeps the gradients.
            states: [T, H].
            head: [V_d, H].
            places: rows of the head, the wanted one first; -1 where it has none, int64 [T, N].
            shares: their probabilities, which sum to 1, or to 0 in a row that does not count.
        """
        counted = shares.sum(-1, keepdim=True)
        of_states = torch.empty_like(states)
        of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        loss, hits = shares.new_zeros(()), []
        size = max(1, LOGIT_VALUES // len(head))
        for x, out, *row in zip(
            *(each.split(size) for each in (states, of_states, places, shares, counted)),
            strict=True,
        ):
            found, gradient, hit = _head_part(functional.linear(x, head), *row)
            out.copy_((gradient @ head) * row[-1])
            if of_head is not None:
                of_head += weight_gradient(gradient, (x * row[-1]).to(x.dtype))
            loss = loss + found
            hits.append(hit)
        ctx.number = counted.sum().clamp(min=1)
        ctx.save_for_backward(of_states, of_head)
        right = torch.cat(hits)
        ctx.mark_non_differentiable(right)
        return loss / ctx.number, right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        of_states, of_head = ctx.saved_tensors
        scale = (gradient / ctx.number).to(of_states.dtype)
        return of_states * scale, None if of_head is None else of_head * scale, None, None


def _head_part(
    logits: Tensor, places: Tensor, shares: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of some rows, its gradient before `counted`, and which rows are right."""
    is_known = places >= 0
    known = torch.where(
        is_known, places, places[:, :1].clamp(min=0)
    )  # A place twice is written the same twice.
    shares = torch.where(is_known, shares, shares[:, :1])
    # argmax takes ten times as long as amax, and scatter_add_ of 16 bits copies all logits twice.
    largest, wanted = logits.amax(-1, keepdim=True), logits.gather(1, known)
    hits = (wanted[:, 0] == largest[:, 0]) & is_known[:, 0]
    gradient = logits.softmax(-1)
    normaliser = wide(largest) - wide(gradient.amax(-1, keepdim=True)).log()
    loss = ((normaliser - wide(wanted)) * shares * is_known).sum()
    changed = wide(gradient.gather(1, known)) - shares
    return loss, gradient.scatter_(1, known, changed.to(gradient.dtype)), hits


class Training:
    """The training on texts. It can stop after any step and continue from the file `state`.

    The first `held_out` texts of `source` measure, and are not trained on.
    """

    def __init__(
        self,
        model: TrainedModel,
        source: TargetRows,
        held_out: int,
        schedule: Schedule,
        state: Path,
    ):
        self._model, self._source, self._schedule, self._state = model, source, schedule, state
        self._held, self._count = torch.arange(held_out), len(source) - held_out
        self._masters = {name: wide(each.detach()) for name, each in model.trained.items()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.progress, self._best = Progress(), dict[str, Tensor]()
        if state.is_file():
            self._restore()

    def run(self, tell: Tell) -> Progress:
        """Train to the end of the schedule, and keep the best weights.

        The state is saved every minute and at the end.
        """
        at, saved, found = self.progress, time.monotonic(), list[tuple[float, list[float]]]()
        told = saved
        while self._share() < 1:
            start, used = time.monotonic(), time.process_time()
            found.append(self._step())
            at.step += 1
            at.seconds += time.monotonic() - start
            at.processor_seconds += time.process_time() - used
            now, is_over = time.monotonic(), self._share() >= 1
            if at.step % MEASURE_STEPS == 0 or is_over:
                self._measure()
            if now - told > TELL_SECONDS or is_over:
                at.curve.append({"step": at.step, "seconds": round(at.seconds, 1), **_means(found)})
                tell(self._line())
                told, found = now, []
            if now - saved >= SAVE_SECONDS or is_over:
                self.save()
                saved = now
        self._use(self._best)
        return at

    def _line(self) -> str:
        """Where the run is, for whoever waits."""
        at, share = self.progress, self._share()
        left = at.seconds * (1 - share) / max(share, 1e-9)
        line = f"{share:.0%}, {left / 60:.0f} min left: step {at.step}"
        line += f", loss {at.curve[-1]['loss']:.3f}, right drafts {_percent(at.curve[-1]['right'])}"
        if at.held_out:
            line += f"; held out {_percent(at.held_out[-1]['right'])}"
        return line

    def _share(self) -> float:
        return self._schedule.progress(self.progress.step, self.progress.seconds)

    def _step(self) -> tuple[float, list[float]]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(self._share())
        places = len(self._held) + self._schedule.drawn(self.progress.step, self._count)
        with LinearProducts():
            loss, right = draft_losses(self._model, self._source.get(places))
            loss.backward()
        for name, parameter in self._model.trained.items():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), CLIP)
        self._optimizer.step()
        self._use(self._masters)
        return loss.item(), right.tolist()

    @torch.no_grad()
    def _measure(self) -> None:
        """Note the acceptance on held-out texts, and keep the weights if it is the best so far."""
        found = []
        for places in self._held.split(self._schedule.batch):
            with LinearProducts():
                right = draft_losses(self._model, self._source.get(places))[1]
            found.append(len(places) / len(self._held) * right.cpu())
        right, at = torch.stack(found).sum(0), self.progress
        best = max((sum(point["right"]) for point in at.held_out), default=-1.0)
        rounded = [round(share, 4) for share in right.tolist()]
        at.held_out.append({"step": at.step, "seconds": round(at.seconds, 1), "right": rounded})
        if sum(rounded) > best:
            self._best = {name: p.detach().clone() for name, p in self._masters.items()}

    @torch.no_grad()
    def _use(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.trained.items():
            parameter.copy_(values[name])

    def save(self) -> None:
        """Save the state; the file is replaced atomically."""
        value = {
            "progress": asdict(self.progress),
            "trained": self._masters,
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._state) as scratch, scratch.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())

    def _restore(self) -> None:
        try:
            value = torch.load(self._state, weights_only=True, map_location="cpu")
            self.progress = Progress(**value["progress"])
            for name, master in self._masters.items():
                master.copy_(value["trained"][name])
            self._use(self._masters)
            self._best = value["best"]
            self._optimizer.load_state_dict(value["optimizer"])
        except Exception as error:  # torch raises errors of any kind.
            raise unreadable(self._state, error) from error


def _percent(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.1%}" for share in shares)


def _means(found: list[tuple[float, list[float]]]) -> dict[str, Any]:
    losses, shares = zip(*found, strict=True)
    right = [round(fmean(column), 4) for column in zip(*shares, strict=True)]
    return {"loss": round(fmean(losses), 4), "right": right}
