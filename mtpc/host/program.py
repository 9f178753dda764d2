"""Replays over the host's tensors: verify, propose, or the whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtpc.backends.base import Run
from mtpc.errors import HostError
from mtpc.layout import STOP_REASONS, Part, StepKey, StopReason, step_name


@dataclass(frozen=True)
class RowResult:
    """The result of a step for one row of its batch.

    Attributes:
        token_ids: emitted tokens; empty for an inactive row, and for a chunk that is not the last
            of its prompt.
        num_accepted: number of accepted drafts.
        stop_reason: why the request has ended; None if it goes on.
    """

    token_ids: list[int]
    num_accepted: int
    stop_reason: StopReason | None


class HostProgram:
    """Captured steps over tensors that the host owns; made by `HostedModel.bind`.

    It keeps references to the tensors and allocates none. It is not safe to use from two threads at
    the same time.

    Attributes:
        shared: the host's tensors that all steps use, by name.
        steps: the host's tensors of each step, by key and name.
        replays: number of replays of each graph, by step and part.
    """

    def __init__(
        self,
        shared: Mapping[str, Tensor],
        steps: Mapping[StepKey, Mapping[str, Tensor]],
        runs: Mapping[tuple[StepKey, Part], Run],
    ):
        self.shared, self.steps = dict(shared), {key: dict(own) for key, own in steps.items()}
        self.replays: Counter[tuple[StepKey, Part]] = Counter()
        self._runs = dict(runs)
        self._verified: StepKey | None = None

    def verify(self, key: StepKey) -> None:
        """Run the target's forward and acceptance; the results can be read afterwards.

        With K = 0 this is the whole step, and `propose` does nothing.

        Raises:
            HostError: the program has no such step, or has it in fused form only.
        """
        part: Part = "verify" if key.spec_tokens else "step"
        self._run(key, part)
        self._verified = key

    def propose(self, key: StepKey) -> None:
        """Make the drafts for the next step, and update the requests' rows.

        Raises:
            HostError: the last call was not `verify` of the same step.
        """
        if self._verified != key:
            last = f"verify({self._verified})" if self._verified else "not a verify"
            raise HostError(
                f"propose({key}) was called and the last call was {last}; expected verify({key}) "
                "right before it"
            )
        if key.spec_tokens:
            self._run(key, "propose")
        self._verified = None

    def step(self, key: StepKey) -> None:
        """Run the whole step: its fused graph if it has one, else verify and propose.

        Raises:
            HostError: the program has no such step.
        """
        if (key, "step") in self._runs:
            self._run(key, "step")
        else:
            self.verify(key)
            self.propose(key)

    def results(self, key: StepKey) -> list[RowResult]:
        """Results of the last `verify` or `step` of this key, one for each row.

        Waits for the device.

        Raises:
            HostError: the program has no such step.
        """
        own = self._tensors(key)
        names = ("out_token_ids", "num_emitted", "num_accepted", "stop_reason")
        columns = [own[f"batch.{name}"].tolist() for name in names]
        return [
            RowResult(token_ids[:emitted], accepted, STOP_REASONS.get(code))
            for token_ids, emitted, accepted, code in zip(*columns, strict=True)
        ]

    def _run(self, key: StepKey, part: Part) -> None:
        self._tensors(key)
        if (key, part) not in self._runs:
            raise HostError(
                f"{step_name(key, part)} was not compiled; use compile_host(form='both'), which "
                "compiles the fused step and its halves"
            )
        self._verified = None
        self._runs[key, part]()
        self.replays[key, part] += 1

    def _tensors(self, key: StepKey) -> Mapping[str, Tensor]:
        if key not in self.steps:
            known = ", ".join(map(str, self.steps))
            raise HostError(f"{key!s} is no step of this program; expected {known}")
        return self.steps[key]
