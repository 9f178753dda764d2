"""Compares a program in bfloat16 with two references that get its state before every step.

In bfloat16, another order of sums gives other bits. So texts would diverge after the first near tie
and could not be compared any more. Here, before each step, the references get the program's own
buffers (its text, its cache, its drafts), and then all three take that step. Each row that the
heads read, each row of logits, and each row of a cache or a state that the step wrote is compared
with float32; the error of PyTorch's own bfloat16 is the measure. The step's tokens must be exactly
those of the program's own logits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from mtpc.backends.base import Run
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.graph_artifact import GraphBackend
from mtpc.capture.graph import StepGraph, get_tensor, set_tensor
from mtpc.layout import RUNNING, StepKey
from mtpc.program.program import Program

_CHOOSE = ("aten.max.dim", "aten.argmax.default", "row_max.default", "sample.default")
_FLOOR = 2.0**-9
"""Half a unit in the last place of bfloat16; a smaller error counts as 0."""
_TIMES = 2.0
"""The largest allowed error, relative to that of PyTorch's bfloat16."""
_WILD = 0.1
"""A row with a larger error has another expert, which rounding can choose."""
_WILD_SHARE = 0.02
"""The share of rows that may have such an error, beyond twice PyTorch's; only with experts."""


def rows_of_head(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(hidden rows, logits) of a node that chooses tokens; None of any other. Hidden rows that no
    node has, because the head norms them itself, become a node."""
    if not any(str(node.target).endswith(name) for name in _CHOOSE):
        return None
    logits = node.args[0]
    if not isinstance(logits, fx.Node) or not logits.meta["val"].is_floating_point():
        return None
    head = logits
    while "linear" not in str(head.target):
        inputs = [n for n in head.all_input_nodes if n.op == "call_function"]
        if not inputs:
            return None
        head = inputs[0]
    return _normed(head) or head.all_input_nodes[0], logits


def _normed(head: fx.Node) -> fx.Node | None:
    """What a linear reads of the norm that it computes itself; None if it computes none."""
    if "norm_linear" not in str(head.target):
        return None
    x, added, *norm = head.args[:5]
    with head.graph.inserting_before(head):
        both = head.graph.call_function(torch.ops.mtpc.add_rms_norm.default, (x, added, *norm))
        hidden = head.graph.call_function(operator.getitem, (both, 1))
    value = x.meta["val"]  # type: ignore[union-attr]
    both.meta = {"val": (value, value), "piece": "step"}
    hidden.meta = {"val": value, "piece": "step"}
    return hidden


class Probed(GraphBackend):
    """A backend whose steps also leave what their heads read and give.

    Args:
        backend: does the work.

    Attributes:
        seen: (hidden rows, logits) of each head of a step, in order, by the step's name.
        experts: whether some step has experts.
        whole_logits: a draft's logits of the vocabulary that it has [R, V_d] -> of all tokens.
    """

    def __init__(self, backend: CudaBackend):
        self._backend, self.experts = backend, False
        self.whole_logits: nn.Module = nn.Identity()
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def lower(self, graph: StepGraph) -> Run:
        """Compile the step with a copy of each head's input and logits to buffers."""
        self.seen[graph.name] = [
            (self._keep(graph, hidden, f"{i}_hidden"), self._keep(graph, logits, f"{i}_logits"))
            for i, (hidden, logits) in enumerate(_heads(graph))
        ]
        targets = (str(node.target) for node in graph.graph.nodes)
        self.experts |= any("experts" in target for target in targets)
        graph.module.recompile()
        return self._backend.lower(graph)

    def capture(self, run: Run, graph: StepGraph) -> Run:
        """As the backend does that does the work."""
        return self._backend.capture(run, graph)

    def _keep(self, graph: StepGraph, node: fx.Node, name: str) -> Tensor:
        value = node.meta["val"]
        kept = torch.zeros(value.shape, dtype=value.dtype, device=self._backend.device)
        set_tensor(graph.module, f"probe.head_{name}", kept)
        with graph.graph.inserting_after(node):
            place = graph.graph.get_attr(f"probe.head_{name}")
            place.meta = {"val": value, "piece": "step"}
        with graph.graph.inserting_after(place):
            copied = graph.graph.call_function(torch.ops.aten.copy_.default, (place, node))
            copied.meta = {"val": value, "piece": "step"}
        return get_tensor(graph.module, f"probe.head_{name}")


def _heads(graph: StepGraph) -> list[tuple[fx.Node, fx.Node]]:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    found = map(rows_of_head, nodes)
    return list(dict.fromkeys(pair for pair in found if pair is not None))


@dataclass
class Errors:
    """Errors relative to float32 of rows of one kind: the program's, and PyTorch's in bfloat16."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
        """Rows [n, width] of each."""
        for errors, rows in ((self.ours, ours), (self.theirs, theirs)):
            errors += row_errors(rows, truth).tolist()

    def faults(self, what: str, experts: bool) -> Iterator[str]:
        """The errors that bfloat16 does not explain."""
        mine, other = (_most(errors) for errors in (self.ours, self.theirs))
        if not mine <= _TIMES * other + _FLOOR:
            yield f"{what} err by {mine:.2g}, PyTorch's by {other:.2g}"
        wild, usual = (sum(not e <= _WILD for e in es) for es in (self.ours, self.theirs))
        if wild > _TIMES * usual + experts * (1 + _WILD_SHARE * len(self.ours)):
            yield f"{wild} of {len(self.ours)} {what} err by more than {_WILD}, PyTorch's {usual}"

    def __str__(self) -> str:
        return f"{len(self.ours)} rows, {_most(self.ours):.2g} against {_most(self.theirs):.2g}"


def row_errors(rows: Tensor, truth: Tensor) -> Tensor:
    """|row - truth| / |truth| of rows [n, width], by the Euclidean norm; infinite for NaN."""
    wanted = truth.double()
    error = (rows.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)
    return error.nan_to_num(float("inf"))


def _most(errors: list[float]) -> float:
    """The 90th percentile."""
    return sorted(errors)[int(0.9 * (len(errors) - 1))] if errors else 0.0


@dataclass
class Found:
    """The results of all steps so far.

    Attributes:
        hidden: rows that heads read.
        logits: rows that heads gave.
        caches: rows of caches and states that were written.
        choices: tokens that were chosen, drafts included.
        others: of them, those that float32 chooses otherwise on the same text.
        regret: by how much the most, of float32's logits.
        slack: the largest error of a logit in PyTorch's bfloat16.
        wrong: tokens, acceptance or drafts that are not those of the program's own logits.
    """

    hidden: Errors = field(default_factory=Errors)
    logits: Errors = field(default_factory=Errors)
    caches: Errors = field(default_factory=Errors)
    choices: int = 0
    others: int = 0
    regret: float = 0.0
    slack: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def faults(self, experts: bool) -> list[str]:
        """The faults of the program; empty if it is right."""
        kinds = {"hidden rows": self.hidden, "logits": self.logits, "cache rows": self.caches}
        found = [fault for what, kind in kinds.items() for fault in kind.faults(what, experts)]
        if not self.hidden.ours or not self.caches.ours:
            found.append("no row was compared")
        if not experts and self.regret > 4 * self.slack + 1e-3:
            found.append(
                f"a choice is {self.regret:.2g} below float32's best logit; bfloat16 errs by "
                f"{self.slack:.2g}"
            )
        return [*found, *dict.fromkeys(self.wrong)]

    def __str__(self) -> str:
        return (
            f"errors against PyTorch's own bfloat16: hidden {self.hidden}, logits {self.logits}, "
            f"caches {self.caches}; {self.others} of {self.choices} choices other than float32's, "
            f"the furthest {self.regret:.2g} below"
        )


class Lockstep:
    """A program that is compared at each step; other attributes are the program's own.

    Args:
        ours: the program in bfloat16, on the tested backend.
        theirs: the same on the reference operators.
        truth: the same in float32.
        backends: the backends of the three, in this order.
        greedy: whether tokens are the largest logits.
    """

    def __init__(
        self,
        ours: Program,
        theirs: Program,
        truth: Program,
        backends: tuple[Probed, Probed, Probed],
        greedy: bool = True,
    ):
        self._programs, self._backends, self._greedy = (ours, theirs, truth), backends, greedy
        self.found = Found()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs[0], name)

    @property
    def experts(self) -> bool:
        """Whether the model has any: rounding may then choose others."""
        return self._backends[0].experts

    @torch.no_grad()
    def run(self, key: StepKey) -> Mapping[str, Tensor]:
        """Run a step on all three from the same state; returns the program's own buffers."""
        three = [program.steps[key].buffers for program in self._programs]
        before = {name: tensor.clone() for name, tensor in three[0].items()}
        for buffers in three[1:]:
            for name, tensor in before.items():
                buffers[name].copy_(tensor)
        for program in self._programs:
            program.run(key)
        slots = before["batch.state_indices"].long()
        live = (slots != 0) & (before["state.remaining_tokens"][slots] > 0)
        if key.phase == "decode" and live.any():
            self._compare_heads(key, before, slots, live)
        if all(_agree(three, "batch.out_token_ids", live)) and all(
            _agree(three, "state.token_ids", slots[live])
        ):
            self._compare_written(three, before)
        return three[0]

    def _compare_heads(
        self, key: StepKey, before: Mapping[str, Tensor], slots: Tensor, live: Tensor
    ) -> None:
        """Compare the target's head, then each draft's, while all three choose the same tokens."""
        steps = [program.steps[key] for program in self._programs]
        names = [step.graph.name for step in steps if step.graph is not None]
        heads = [b.seen[name] for b, name in zip(self._backends, names, strict=True)]
        three, width = [step.buffers for step in steps], key.spec_tokens + 1
        first = (width * live.nonzero() + torch.arange(width, device=live.device)).flatten()
        self._add([head[0] for head in heads], first)
        if self._greedy:
            self._check_tokens(three[0], before, slots, live, heads[0][0][1])
        live = live & (three[0]["batch.stop_reason"] == RUNNING)
        live[live.clone()] = _agree(three, "batch.out_token_ids", live)
        for index in range(1, len(heads[0])):
            at = live.nonzero().flatten()
            if not len(at):
                return
            self._add([head[index] for head in heads], at)
            logits = self._backends[0].whole_logits(heads[0][index][1][at])
            chosen = three[0]["state.token_ids"][slots[at], index]
            if self._greedy and not _is_largest(logits, chosen).all():
                self.found.wrong.append(f"draft {index} is not its logits' largest")
            live[at] = _agree(three, "state.token_ids", slots[at], index)

    def _add(self, heads: list[tuple[Tensor, Tensor]], at: Tensor) -> None:
        """The rows of one head."""
        found = self.found
        hidden, logits = ([head[i].flatten(0, -2)[at] for head in heads] for i in (0, 1))
        found.hidden.add(*hidden)
        found.logits.add(*logits)
        ours, theirs, truth = (rows.double() for rows in logits)
        found.slack = max(found.slack, float((theirs - truth).abs().max()))
        if self._greedy:
            regret = truth.amax(-1) - truth.gather(-1, ours.argmax(-1, True)).squeeze(-1)
            found.choices += len(at)
            found.others += int((regret > 0).sum())
            found.regret = max(found.regret, float(regret.max()))

    def _check_tokens(
        self,
        after: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        slots: Tensor,
        live: Tensor,
        logits: Tensor,
    ) -> None:
        """Check that tokens are the largest logits, and that the right drafts are accepted."""
        chosen = after["batch.out_token_ids"][live]
        width = chosen.shape[1]
        if not _is_largest(logits.view(len(live), width, -1)[live], chosen).all():
            self.found.wrong.append("a token is not its logits' largest")
        drafts = before["state.token_ids"][slots[live], 1:width]
        accepted = (drafts == chosen[:, :-1]).long().cumprod(1).sum(1)
        if not torch.equal(accepted, after["batch.num_accepted"][live].long()):
            self.found.wrong.append("other drafts accepted than the choices begin with")

    def _compare_written(self, three: list[Mapping[str, Tensor]], before: Any) -> None:
        """Compare rows of caches and states that one of the three has changed, without page 0."""
        for name, tensor in three[0].items():
            if name.startswith("batch.") or not tensor.is_floating_point() or tensor.dim() < 2:
                continue
            first = tensor.shape[1] if tensor.dim() > 2 else 1
            old, *rows = (
                (t.flatten(0, 1) if t.dim() > 2 else t)[first:].flatten(1)
                for t in (before[name], *(buffers[name] for buffers in three))
            )
            changed = torch.stack([(one != old.to(one.dtype)).any(1) for one in rows]).any(0)
            if changed.any():
                self.found.caches.add(*(one[changed] for one in rows))


def _agree(three: list[Mapping[str, Tensor]], name: str, *at: Any) -> Tensor:
    """Which rows of a buffer are the same in all three."""
    ours, *others = (buffers[name][at] for buffers in three)
    same = torch.stack([ours == other for other in others]).all(0)
    return same if same.dim() < 2 else same.all(1)


def _is_largest(logits: Tensor, chosen: Tensor) -> Tensor:
    """Whether the logits [..., V] of tokens [...] are their rows' largest."""
    return logits.gather(-1, chosen[..., None]).squeeze(-1) == logits.amax(-1)
