"""A model compiled for a host: what it asks for, and binding it to what it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor

from mtpc.config import CompileOptions
from mtpc.errors import HostError
from mtpc.host.checks import check_tensors
from mtpc.host.contract import HostBuffer, host_buffers
from mtpc.host.parts import Lowered
from mtpc.host.program import HostProgram
from mtpc.layout import Layout, Part, StepKey, step_keys
from mtpc.weights.served_model import ServedModel

Form = Literal["split", "fused", "both"]
"""Steps as `verify` and `propose`, as one graph, or as both."""


def parts_of(key: StepKey, form: Form) -> tuple[Part, ...]:
    """The graphs of one step. A step that proposes nothing is one graph in any form."""
    if form == "fused" or key.spec_tokens == 0:
        return ("step",)
    return ("verify", "propose") if form == "split" else ("step", "verify", "propose")


@dataclass(frozen=True)
class HostedModel:
    """Steps compiled against stated shapes and dtypes, over memory that is the host's.

    Attributes:
        served: vocabulary, end-of-sequence ids, tokenizer.
        options: what it was compiled with, `max_len` settled.
        form: which graphs there are.
        device: where the host's tensors must be, as torch names it.
        fallbacks: what runs otherwise than asked for, counted, with reasons.
    """

    served: ServedModel
    options: CompileOptions
    form: Form
    device: str
    fallbacks: Counter[str]
    _parts: Mapping[tuple[StepKey, Part], Lowered] = field(repr=False)
    _check: Callable[[], None] = field(repr=False)
    _keep: object = field(default=None, repr=False)

    @property
    def keys(self) -> tuple[StepKey, ...]:
        """Its steps: a decode step per bucket (and K), and one for prefill."""
        return step_keys(self.options)

    @cached_property
    def buffers(self) -> dict[str, HostBuffer]:
        """Tensors that all steps share, by name: `state.*` and `kv.*`."""
        layout = self._layout(self.keys[0])
        return host_buffers(layout, [name for name in layout if name.startswith(("state.", "kv."))])

    def step_buffers(self, key: StepKey) -> dict[str, HostBuffer]:
        """Tensors of one step, by name: `batch.*` and `cross.*`.

        Raises:
            HostError: there is no such step.
        """
        if key not in self._step_buffers:
            raise HostError(f"no step {key!s}; steps: {', '.join(map(str, self.keys))}")
        return self._step_buffers[key]

    @cached_property
    def _step_buffers(self) -> dict[StepKey, dict[str, HostBuffer]]:
        layouts = {key: self._layout(key) for key in self.keys}
        return {
            key: host_buffers(layout, [n for n in layout if n.startswith(("batch.", "cross."))])
            for key, layout in layouts.items()
        }

    def _layout(self, key: StepKey) -> Layout:
        return self._parts[key, parts_of(key, self.form)[-1]].layout

    @property
    def prefill_key(self) -> StepKey:
        """The prefill step: `bucket.num_tokens` tokens of `bucket.num_reqs` requests.

        At most; a request alone may take all the tokens. `prefill_rows=1` is one request a step.
        """
        return next(key for key in self.keys if key.phase == "prefill")

    def decode_key(self, num_reqs: int, spec_tokens: int | None = None) -> StepKey:
        """The smallest decode step that holds `num_reqs` rows.

        Args:
            num_reqs: at most the largest of `options.batch_buckets`.
            spec_tokens: K, where steps of several were compiled; None is the largest.

        Raises:
            HostError: there is none.
        """
        wanted = self.options.spec_tokens if spec_tokens is None else spec_tokens
        buckets = [size for size in self.options.batch_buckets if size >= num_reqs]
        if not buckets or wanted not in self.options.tiers:
            raise HostError(
                f"no decode step of {num_reqs} rows with K = {wanted}; batch_buckets are "
                f"{self.options.batch_buckets}, K is one of {self.options.tiers}"
            )
        return StepKey.decode(min(buckets), wanted)

    @property
    def num_slots(self) -> int:
        """Slots that requests may have: 1 to this. Slot 0 is scratch."""
        return max(self.options.batch_buckets)

    def pages_for(self, num_committed: int, num_input: int = 1) -> int:
        """Pages a request must own before a step.

        Args:
            num_committed: committed tokens that the step begins with.
            num_input: tokens that are certain in it: 1 to decode, a prefill chunk's length.
        """
        return self.options.blocks_per_request(num_committed + num_input)

    def bind(
        self,
        shared: Mapping[str, Tensor],
        steps: Mapping[StepKey, Mapping[str, Tensor]],
    ) -> HostProgram:
        """Replays over the host's tensors, which are used in place from now on.

        May be called again, for another set of tensors; weights exist once.

        Args:
            shared: a tensor for each of `buffers`.
            steps: for each key a tensor for each of `step_buffers(key)`.

        Raises:
            HostError: a tensor is missing or not what was asked for; all are listed.
            CheckpointError: weights, read now, hold NaN or infinity.
        """
        check_tensors((self.buffers, shared), (self._step_buffers, steps), self.device)
        common = _as_stated(self.buffers, shared)
        runs = {
            (key, part): lowered.bind(common | _as_stated(self._step_buffers[key], steps[key]))
            for (key, part), lowered in self._parts.items()
        }
        self._check()
        return HostProgram(shared, steps, runs)


def _as_stated(
    buffers: Mapping[str, HostBuffer], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Plain tensors with the strides that were compiled for, over the same memory.

    Along a dimension of size 1 a contiguous tensor may have any stride; packages compare them.
    """
    return {n: tensors[n].detach().as_strided(b.shape, b.strides) for n, b in buffers.items()}
