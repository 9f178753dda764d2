"""Memory by device and the time of a step, computed on paper. No device has confirmed it.

    step time = (weights read + caches read) / memory bandwidth
                + bytes sent by collectives / link bandwidth + collectives * latency

Nothing overlaps, and arithmetic takes no time. A device reads each dense weight once a step, and
of experts those that some row chooses, each row `k` of `E` at random: a share 1 - (1 - k/E)^rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

from torch import Tensor, nn

from mtpc.backends.eager import EagerBackend
from mtpc.errors import UnsupportedModelError
from mtpc.layout import Layout
from mtpc.layout.slot_state import rows_of_slot
from mtpc.models.load import LoadedModel
from mtpc.models.shards import Collective, ShardPlan
from mtpc.models.weight_recipes import stored_weights
from mtpc.plan import Plan
from mtpc.program.compiler import StepCompiler
from mtpc.weights.quantise import is_head, spec_by_scheme

ALLOWANCE = 256 << 20
"""Bytes of a device for activations, workspaces and copies of graphs: on paper, where no step is
traced. `memory_plan` computes them."""
CHOICE_BYTES = 12
"""A rank's largest logit and its token id: all that it sends of its part of the vocabulary if
choice is greedy."""
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_k", "moe_top_k")
_REWRITTEN = ("recurrent",)
"""Roles of buffers that a step reads and writes whole."""


@dataclass(frozen=True)
class Device:
    """Published figures of one device.

    Attributes:
        title: its name, and where the figures are from.
        memory: bytes.
        bandwidth: bytes a second of its memory.
        link: bytes a second that it sends to the others of its machine, in one direction.
    """

    title: str
    memory: int
    bandwidth: float
    link: float


DEVICES: Mapping[str, Device] = {
    "h200": Device(
        "NVIDIA H200 SXM (data sheet: 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways)",
        141 * 10**9,
        4.8e12,
        450e9,
    ),
    "mi300x": Device(
        "AMD Instinct MI300X (data sheet: 192 GB, 5.3 TB/s, 7 links of 128 GB/s both ways)",
        192 * 10**9,
        5.3e12,
        448e9,
    ),
}


@dataclass(frozen=True)
class Weight:
    """A tensor as rank 0 holds it, which holds the most.

    Attributes:
        part: "target" or "mtp.I".
        kind: of its shard.
        nbytes: that the rank holds.
        role: "dense", "experts", or "rows": only a few rows of it are read.
        total: experts, or rows of the vocabulary.
        numel: elements of the whole tensor.
    """

    part: str
    kind: str
    nbytes: int
    role: str
    total: int
    numel: int


@dataclass(frozen=True)
class Sum:
    """A collective behind one module; `width` is the bytes of a row of its result."""

    part: str
    kind: Collective
    width: int

    def sent(self, rows: int, ranks: int) -> float:
        """Bytes that each rank sends, around a ring."""
        share = (ranks - 1) / ranks
        return rows * self.width * share * (2 if self.kind == "all_reduce" else 1)


@dataclass(frozen=True)
class Cache:
    """A buffer of one layer as a rank holds it: bytes a token, and bytes a request."""

    part: str
    token: float
    request: int
    rewritten: bool


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by term.

    Attributes:
        weights: reading weights.
        caches: reading KV and state of every request.
        transfer: bytes of collectives over the link.
        latency: number of collectives times their latency.
        collectives: how many there are.
        read: bytes that a rank reads.
        sent: bytes that a rank sends.
    """

    weights: float
    caches: float
    transfer: float
    latency: float
    collectives: int
    read: float
    sent: float

    @property
    def total(self) -> float:
        """Seconds of all terms together."""
        return self.weights + self.caches + self.transfer + self.latency


class RankModel:
    """One rank's part of a model.

    Args:
        loaded: the model, with or without values.
        plan: `max_len`, `page_size`, `spec_tokens`, `kv_cache_dtype` and `quantize` are read.
        ranks: devices that share the model.
        expert_parallel: as for `ShardPlan`.

    Raises:
        UnsupportedModelError, OptionError: as `ShardPlan`, `StepCompiler`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        ranks: int = 1,
        expert_parallel: bool = False,
    ):
        compiler = StepCompiler(loaded, plan, EagerBackend(), new_buffer=Layout.reserve)
        self.loaded, self.plan, self.ranks = compiler.loaded, compiler.plan, ranks
        self.shards = ShardPlan(self.loaded, ranks, expert_parallel)
        self.layout = compiler.layout(compiler.keys[0])
        self.weights = dict(self._weights())
        self.caches = tuple(self._caches())
        self.sums = tuple(self._sums())
        self.head = self._name_of(self.loaded.target.get_output_embeddings().weight)
        self.embedding = self._name_of(self.loaded.target.get_input_embeddings().weight)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of a rank."""
        return sum(weight.nbytes for weight in self.weights.values())

    def by_kind(self) -> dict[tuple[str, str], int]:
        """("target" or "mtp", kind of shard) -> bytes of a rank."""
        found = Counter[tuple[str, str]]()
        for weight in self.weights.values():
            found[weight.part.partition(".")[0], weight.kind] += weight.nbytes
        return found

    @property
    def token_bytes(self) -> float:
        """Bytes of KV pages a token."""
        return sum(cache.token for cache in self.caches)

    @property
    def request_bytes(self) -> int:
        """Bytes a request of what is in no page, for texts of `max_len`."""
        return sum(cache.request for cache in self.caches)

    def free(self, memory: int) -> int:
        """Bytes that are left for requests; negative if the weights do not fit."""
        return memory - ALLOWANCE - self.weight_bytes

    def largest_batch(self, memory: int) -> int:
        """Requests of `max_len` tokens that fit."""
        limit = self.plan.max_len
        pages = self.plan.blocks_per_request(limit) * self.plan.page_size
        return max(0, int(self.free(memory) // (pages * self.token_bytes + self.request_bytes)))

    def largest_context(self, memory: int) -> int:
        """Tokens of one request that fit, up to what the model's positions allow."""
        most = self.loaded.max_positions
        most = most or self.plan.max_len
        free = self.free(memory) - self.request_bytes
        if free < 0 or not self.token_bytes:
            return self.plan.max_len if free >= 0 else 0
        return min(most, int(free // self.token_bytes))

    def step_time(self, device: Device, batch: int, latency: float) -> StepTime:
        """A decode step of `batch` requests, each `max_len` tokens long.

        Args:
            device: bandwidths.
            batch: requests.
            latency: seconds of one collective, whatever it carries.
        """
        read, cached, sent, count = 0.0, 0.0, 0.0, 0
        context = self.plan.max_len
        for part, rows in self._runs(batch):
            read += fsum(self._read(w, rows) for n, w in self._used(part).items())
            cached += fsum(
                batch * (cache.token * context + cache.request * (1 + cache.rewritten))
                for cache in self.caches
                if cache.part == part
            )
            ends = [s for s in self.sums if s.part in (part, "ends")]
            sent += fsum(one.sent(rows, self.ranks) for one in ends)
            count += len(ends)
        return StepTime(
            read / device.bandwidth,
            cached / device.bandwidth,
            sent / device.link,
            count * latency,
            count,
            read + cached,
            sent,
        )

    def _runs(self, batch: int) -> Iterator[tuple[str, int]]:
        """(part, rows) for each run of the target and of an MTP layer in a step."""
        drafts, layers = self.plan.spec_tokens, len(self.loaded.mtp_layers)
        rows = batch * (drafts + 1)
        yield "target", rows
        for index in range(drafts):
            window = batch * (drafts + 1 + self.loaded.chain_window)
            yield f"mtp.{min(index, layers - 1)}", window if index < layers else batch

    def _used(self, part: str) -> dict[str, Weight]:
        """The weights that a run of a part reads: its own, and the target's ends."""
        ends = {n: w for n, w in self.weights.items() if n in (self.head, self.embedding)}
        own = {n: w for n, w in self.weights.items() if w.part == part}
        if part != "target":
            layer = self.loaded.mtp_layers[int(part.partition(".")[2])]
            if layer.head is not None:
                ends.pop(self.head, None)
        return own | ends

    def _read(self, weight: Weight, rows: int) -> float:
        if weight.role == "experts":
            return weight.nbytes * (1 - (1 - self._active / weight.total) ** rows)
        if weight.role == "rows":
            return weight.nbytes * min(1, rows / weight.total)
        return weight.nbytes

    @property
    def _active(self) -> int:
        """Experts that a token is given to."""
        config = self.loaded.config
        for name in _EXPERTS_A_TOKEN:
            if getattr(config, name, None) is not None:
                return int(getattr(config, name))
        raise UnsupportedModelError(
            f"the config of {self.loaded.source} does not say how many experts a token has; "
            f"expected one of {', '.join(_EXPERTS_A_TOKEN)}"
        )

    def _weights(self) -> Iterator[tuple[str, Weight]]:
        stored, scheme = stored_weights(self.loaded), self.plan.quantize
        specs = {n: s for n, s in (stored.specs if stored else {}).items() if not s.turned}
        tables = self.loaded.tables
        for name, tensor in self.loaded.weights().items():
            spec = specs.get(name) or spec_by_scheme(
                None if is_head(name) else scheme, name, tensor
            )
            shard = self.shards.shard(name, tensor)
            held = shard.count(tuple(tensor.shape), 0, self.ranks)
            nbytes = spec.nbytes(held) if spec else held * tensor.itemsize
            stacked = ".experts." in name and tensor.dim() == 3
            role = "rows" if id(tensor) in tables else "experts" if stacked else "dense"
            total = tensor.shape[0] if tensor.dim() else 1
            yield name, Weight(_part(name), shard.kind, nbytes, role, total, tensor.numel())

    def _caches(self) -> Iterator[Cache]:
        """Buffers that are kept from step to step."""
        layout, layers = self.layout, self.loaded.config.num_hidden_layers
        slots = layout.shape("state.committed_lens")[0]
        for name, spec in layout.items():
            if not spec.shared:
                continue
            is_layer, rows = name.startswith("kv."), layout.shape(name)[0]
            layer = int(name.split(".")[1]) if is_layer else 0
            part = "target" if layer < layers else f"mtp.{layer - layers}"
            cut = self.ranks if is_layer and self.shards.cuts_cache(name) else 1
            row = layout.nbytes(name) // rows // cut
            if spec.is_paged:
                yield Cache(part, row / self.plan.page_size, 0, False)
            else:
                own = rows_of_slot(name, rows, slots)
                yield Cache(part, 0, row * own, name.rpartition(".")[2] in _REWRITTEN)

    def _sums(self) -> Iterator[Sum]:
        """Collectives of the target, of each MTP layer, and of the ends that both use."""
        if self.ranks == 1:
            return
        target, layers = self.loaded.target, self.loaded.mtp_layers
        ends = (target.get_input_embeddings(), target.get_output_embeddings())
        roots = [("", target), *((f"mtp.{i}.", layer) for i, layer in enumerate(layers))]
        for prefix, root in roots:
            for name, module in root.named_modules():
                collective = self.shards.style(prefix + name).collective
                if collective is None or name in ("head", "embedding"):
                    continue  # An MTP layer's own ends have the collectives of the target's.
                is_head = module is ends[1]
                width = CHOICE_BYTES * self.ranks if is_head else self._width(module)
                yield Sum("ends" if module in ends else _part(prefix + name), collective, width)

    def _width(self, module: nn.Module) -> int:
        """Bytes of a row of a module's result."""
        weight: Any = getattr(module, "weight", None)
        wide = weight.shape[0] if isinstance(module, nn.Linear) else self.loaded.config.hidden_size
        return int(wide) * self.loaded.dtype.itemsize

    def _name_of(self, tensor: Tensor) -> str:
        return next(name for name, one in self.loaded.weights().items() if one is tensor)


def _part(name: str) -> str:
    """ "mtp.0.block.X" -> "mtp.0"; everything else is the target's."""
    return ".".join(name.split(".")[:2]) if name.startswith("mtp.") else "target"
