"""A model compiled for a host: the buffers that it needs, and binding it to the host's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from mtpc.errors import HostError
from mtpc.host.checks import check_tensors
from mtpc.host.contract import HostBuffer, host_buffers
from mtpc.host.program import HostProgram
from mtpc.layout import Form, Layout, StepKey, parts_of, step_keys
from mtpc.plan import Plan
from mtpc.program.program import BuiltSteps, StepBinder
from mtpc.weights.served_model import ServedModel


@dataclass(frozen=True)
class HostedModel:
    """Steps compiled for tensors that the host provides, of given shapes and dtypes.

    Attributes:
        served: vocabulary, end-of-sequence ids, tokenizer.
        options: what it was compiled with; nothing in it is open.
        form: which graphs a step has.
        device: torch's name of the device where the host's tensors must be.
        fallbacks: what runs in another way than the options ask for -> count; a key says why.
    """

    served: ServedModel
    options: Plan
    form: Form
    device: str
    fallbacks: Counter[str]
    _built: BuiltSteps = field(repr=False)

    @property
    def keys(self) -> tuple[StepKey, ...]:
        """Keys of all steps: one decode step for each bucket and K, and one prefill step."""
        return step_keys(self.options)

    @cached_property
    def buffers(self) -> dict[str, HostBuffer]:
        """Buffers that all steps share, by name: `state.*` and `kv.*`."""
        layout = self._layout(self.keys[0])
        return host_buffers(layout, [name for name in layout if name.startswith(("state.", "kv."))])

    def step_buffers(self, key: StepKey) -> dict[str, HostBuffer]:
        """Buffers of one step, by name: `batch.*` and `cross.*`.

        Raises:
            HostError: the program has no such step.
        """
        if key not in self._step_buffers:
            known = ", ".join(map(str, self.keys))
            raise HostError(f"{key!s} is no step of this program; expected {known}")
        return self._step_buffers[key]

    @cached_property
    def _step_buffers(self) -> dict[StepKey, dict[str, HostBuffer]]:
        layouts = {key: self._layout(key) for key in self.keys}
        return {
            key: host_buffers(layout, [n for n in layout if n.startswith(("batch.", "cross."))])
            for key, layout in layouts.items()
        }

    def _layout(self, key: StepKey) -> Layout:
        return self._built.steps[key, parts_of(key, self.form)[-1]].layout

    @property
    def prefill_key(self) -> StepKey:
        """Key of the prefill step.

        The step holds at most `bucket.num_tokens` tokens of at most `bucket.num_reqs` requests, and
        all tokens may belong to one request. With `prefill_rows=1` it holds one request.
        """
        return next(key for key in self.keys if key.phase == "prefill")

    def decode_key(self, num_reqs: int, spec_tokens: int | None = None) -> StepKey:
        """Key of the smallest decode step that holds `num_reqs` rows.

        Args:
            num_reqs: at most the largest of `options.batch_buckets`.
            spec_tokens: K, one of `options.tiers`; None is the largest.

        Raises:
            HostError: there is no such step.
        """
        wanted = self.options.spec_tokens if spec_tokens is None else spec_tokens
        buckets = [size for size in self.options.batch_buckets if size >= num_reqs]
        if not buckets or wanted not in self.options.tiers:
            raise HostError(
                f"no decode step has {num_reqs} rows and K = {wanted}; expected at most "
                f"{max(self.options.batch_buckets)} rows and K among {self.options.tiers}"
            )
        return StepKey.decode(min(buckets), wanted)

    @property
    def num_slots(self) -> int:
        """The highest slot that a request may have; the lowest is 1, because slot 0 is scratch."""
        return max(self.options.batch_buckets)

    def pages_for(self, num_committed: int, num_input: int = 1) -> int:
        """Number of pages that a request must own before a step.

        Args:
            num_committed: committed tokens before the step.
            num_input: certain tokens of the step: 1 to decode, else the length of its chunk.
        """
        return self.options.blocks_per_request(num_committed + num_input)

    def bind(
        self,
        shared: Mapping[str, Tensor],
        steps: Mapping[StepKey, Mapping[str, Tensor]],
    ) -> HostProgram:
        """Bind all steps to the host's tensors, which they use in place.

        Further calls bind other sets of tensors; all of them share the weights.

        Args:
            shared: a tensor for each of `buffers`.
            steps: for each key, a tensor for each of `step_buffers(key)`.

        Raises:
            HostError: tensors are missing or do not fit; the message lists all of them.
            CheckpointError: weights hold NaN or infinity; they are read here.
        """
        check_tensors((self.buffers, shared), (self._step_buffers, steps), self.device)
        common = _as_stated(self.buffers, shared)
        own = {key: _as_stated(self._step_buffers[key], steps[key]) for key in self.keys}
        runs = {
            (key, part): StepBinder(self._built, common | own[key]).bind(step).replay
            for (key, part), step in self._built.steps.items()
        }
        self._built.weights.check()
        return HostProgram(shared, steps, runs)


def _as_stated(
    buffers: Mapping[str, HostBuffer], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Views of tensors with exactly the strides that the steps were compiled for.

    A contiguous tensor may have any stride along a dimension of size 1, and packages compare
    strides.
    """
    return {n: tensors[n].detach().as_strided(b.shape, b.strides) for n, b in buffers.items()}
