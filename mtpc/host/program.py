"""Replays over the host's tensors, in the order that the contract asks for."""

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
    """What a step came to in one row of its batch.

    Attributes:
        token_ids: emitted tokens; none for a row that is off and a chunk not a prompt's last.
        num_accepted: drafts that were right.
        stop_reason: why the request has ended, or None.
    """

    token_ids: list[int]
    num_accepted: int
    stop_reason: StopReason | None


class HostProgram:
    """Captured steps over tensors that the host owns; `HostedModel.bind` makes it.

    It holds the tensors and allocates none; it is for one thread at a time.

    Attributes:
        shared: the host's tensors that all steps use, by name.
        steps: the host's tensors of each step, by key and name.
        replays: how often each graph ran, by step and part.
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
        """The target's forward and acceptance: afterwards the results can be read.

        With K = 0 this is the whole step, and `propose` has nothing to do.

        Raises:
            HostError: there is no such step, or it was compiled in fused form only.
        """
        part: Part = "verify" if key.spec_tokens else "step"
        self._run(key, part)
        self._verified = key

    def propose(self, key: StepKey) -> None:
        """Drafts for the next step, and the requests' rows moved on.

        Raises:
            HostError: the last call was not `verify` of the same step.
        """
        if self._verified != key:
            last = f"verify({self._verified})" if self._verified else "not a verify"
            raise HostError(f"propose({key}) must follow verify({key}); the last call was {last}")
        if key.spec_tokens:
            self._run(key, "propose")
        self._verified = None

    def step(self, key: StepKey) -> None:
        """The whole iteration: one fused graph where it was compiled, else verify and propose.

        Raises:
            HostError: there is no such step.
        """
        if (key, "step") in self._runs:
            self._run(key, "step")
        else:
            self.verify(key)
            self.propose(key)

    def results(self, key: StepKey) -> list[RowResult]:
        """What the last `verify` or `step` of this key came to, a value for each row.

        On a device this waits for it.
        """
        own = self._tensors(key)
        rows = zip(
            own["batch.out_token_ids"].tolist(),
            own["batch.num_emitted"].tolist(),
            own["batch.num_accepted"].tolist(),
            own["batch.stop_reason"].tolist(),
            strict=True,
        )
        return [
            RowResult(token_ids[:emitted], accepted, STOP_REASONS.get(code))
            for token_ids, emitted, accepted, code in rows
        ]

    def _run(self, key: StepKey, part: Part) -> None:
        self._tensors(key)
        if (key, part) not in self._runs:
            raise HostError(
                f"{step_name(key, part)} was not compiled: compile_host(form='both') makes the "
                "fused step and its halves"
            )
        self._verified = None
        self._runs[key, part]()
        self.replays[key, part] += 1

    def _tensors(self, key: StepKey) -> Mapping[str, Tensor]:
        if key not in self.steps:
            raise HostError(f"no step {key!s}; steps: {', '.join(map(str, self.steps))}")
        return self.steps[key]
