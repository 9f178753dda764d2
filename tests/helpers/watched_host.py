"""A host over poisoned memory that checks every write of every replay."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import host as example
import torch
from torch import Tensor
from transformers import AutoConfig

import mtpc
from helpers.families import TINY
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from mtpc.layout import StepKey

OPTIONS: dict[str, Any] = {
    **TINY,
    **dict(batch_buckets=(3,), num_pages=14, backend="eager", dtype="float64"),
}
"""13 pages of 4 tokens: the longest request alone fits, three do not."""
WILD = {torch.int32: 2**30, torch.int64: -(2**40)}


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, [first dim, ...], so that NaN equals NaN."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)


def poison(tensors: Mapping[str, Tensor]) -> None:
    """Write NaN and invalid ids to everything that, by the contract, the host need not write."""
    for name, tensor in tensors.items():
        if name != "batch.state_indices":
            tensor.fill_(math.nan if tensor.is_floating_point() else WILD.get(tensor.dtype, 1))


def layers_of(model: mtpc.HostedModel) -> tuple[int, int]:
    """Layers of the target, and rows before a step's own that chained MTP layers compute again."""
    directory = model.served.directory
    assert directory is not None
    config = AutoConfig.from_pretrained(directory).get_text_config()
    chained = [b for name, b in model.buffers.items() if name == "state.chain_ids"]
    window = chained[0].shape[1] if chained else 0
    return config.num_hidden_layers, window


class Watched:
    """A `HostProgram` with checks: writes of each replay, addresses, and the fused replay.

    Attributes:
        seen: how often each check was made.
    """

    def __init__(self, model: mtpc.HostedModel, program: mtpc.HostProgram):
        self.model, self.program = model, program
        self.seen: Counter[str] = Counter()
        self.num_target_layers, self.window = layers_of(model)
        shadow = {name: buffer.allocate() for name, buffer in model.buffers.items()}
        steps = {
            key: {name: buffer.allocate() for name, buffer in model.step_buffers(key).items()}
            for key in model.keys
        }
        self.fused = model.bind(shadow, steps)
        self.addresses = {name: t.data_ptr() for name, t in self._tensors(program).items()}
        self.pools = {
            name: (t._base[: -t.shape[0]], bits(t._base[: -t.shape[0]]).clone())
            for name, t in program.shared.items()
            if t._base is not None
        }

    @staticmethod
    def _tensors(program: mtpc.HostProgram) -> dict[Any, Tensor]:
        own = {(key, n): t for key, step in program.steps.items() for n, t in step.items()}
        return {**program.shared, **own}

    def verify(self, key: StepKey) -> None:
        self.before = {name: t.clone() for name, t in self._tensors(self.program).items()}
        self._watch(key, "verify", self.program.verify)

    def propose(self, key: StepKey) -> None:
        self._watch(key, "propose", self.program.propose)
        self._compare_with_fused(key)

    def results(self, key: StepKey) -> Any:
        return self.program.results(key)

    def _watch(self, key: StepKey, part: str, replay: Callable[[StepKey], None]) -> None:
        tensors = self._tensors(self.program)
        start = {name: t.clone() for name, t in tensors.items()}
        replay(key)
        part = "both" if key.spec_tokens == 0 else part
        for name, tensor in tensors.items():
            changed = bits(tensor) != bits(start[name])
            allowed = self._may_write(key, part, name)
            assert not (changed & ~allowed).any(), f"{part} of {key} wrote outside: {name}"
            self.seen[f"{part} writes"] += int(changed.any())
        assert {name: t.data_ptr() for name, t in tensors.items()} == self.addresses
        for name, (pages, content) in self.pools.items():
            assert torch.equal(bits(pages), content), f"{name}: pages of the host's own pool"
        self.seen["replays"] += 1

    def _may_write(self, key: StepKey, part: str, name: Any) -> Tensor:
        """The bytes of a buffer that a half may write by the contract."""
        tensor = self._tensors(self.program)[name]
        allowed = torch.zeros(bits(tensor).shape, dtype=torch.bool)
        by = {"verify", "propose"} if part == "both" else {part}
        if isinstance(name, tuple):
            allowed[:] = name[0] == key and bool(by & set(self.model.step_buffers(key)[name[1]].by))
            return allowed
        is_target = name.startswith("kv.") and int(name.split(".")[1]) < self.num_target_layers
        halves = {"verify"} if is_target else {"propose"}
        if not by & halves & set(self.model.buffers[name].by):
            return allowed
        slots = len(self.before["state.committed_lens"]) - 1
        if self.model.buffers[name].is_paged:
            self._allow_pages(key, allowed, self.window if not is_target else 0)
        elif ".ring_" in name:
            pages = (tensor.shape[0] - 1) // slots
            for slot in self._slots(key):
                allowed[1 + (slot - 1) * pages : 1 + slot * pages] = True
        else:
            allowed[[0, *self._slots(key)]] = True
        return allowed

    def _slots(self, key: StepKey) -> list[int]:
        return [s for s in self.before[key, "batch.state_indices"].tolist() if s]

    def _allow_pages(self, key: StepKey, allowed: Tensor, window: int) -> None:
        """Allow the KV slots of a step's rows, and of K drafts, in pages that requests own."""
        size, before = self.model.options.page_size, self.before
        for slot in self._slots(key):
            start = int(before["state.committed_lens"][slot])
            rows = key.bucket.query_len
            if key.phase == "prefill":
                place = before[key, "batch.state_indices"].tolist().index(slot)
                decodes = bool(before[key, "batch.is_decoding"][place])
                prompt = int(before[key, "batch.num_input"][place])
                rows = key.max_emitted if decodes else prompt
            for position in range(max(start - window, 0), start + rows + key.spec_tokens):
                page = int(before["state.block_table"][slot, position // size])
                if page:
                    allowed[page, position % size] = True

    def _compare_with_fused(self, key: StepKey) -> None:
        """Run the fused step from the state before verify, and compare its drafts bit for bit."""
        shadows = self._tensors(self.fused)
        for name, shadow in shadows.items():
            shadow.copy_(self.before[name])
        self.fused.step(key)
        for name, tensor in self._tensors(self.program).items():
            if isinstance(name, tuple) and not name[1].startswith(("batch.out", "batch.num")):
                continue  # A fused step writes no `cross.*` buffers, and has its own metadata.
            assert torch.equal(bits(tensor), bits(shadows[name])), f"{name} after {key}"
        drafts = self.program.shared["state.token_ids"][self._slots(key), 1:]
        self.seen["drafts compared"] += drafts.numel()


class Server(example.Host):
    """The example host, which ends some requests between verify and propose."""

    def __init__(self, model: mtpc.HostedModel):
        super().__init__(model)
        poison(self.shared)
        for name, tensor in self.shared.items():
            if model.buffers[name].is_paged:
                tensor._base.fill_(math.nan)
        for step in self.steps.values():
            poison(step)
        self.watched = self.program = Watched(model, self.program)  # type: ignore[assignment]
        self.limits: dict[example.Request, int] = {}

    def take(self, request: example.Request, row: Any) -> None:
        super().take(request, row)
        if len(request.output) >= self.limits.get(request, 99):
            self.abort(request)


def serve(server: Server, plain: Oracle, seed: int) -> None:
    """Run random arrivals; each text must be plain decoding's, or its beginning if aborted."""
    draw, stop = random.Random(seed), next(iter(plain.stop_ids))
    arrivals = sorted((draw.randrange(12), draw.randrange(len(PROMPTS))) for _ in range(8))
    requests, step = [], 0
    while arrivals or server.running or server.waiting:
        while arrivals and arrivals[0][0] <= step:
            prompt, new = PROMPTS[arrivals.pop(0)[1]], draw.randint(1, 20)
            request = server.add(prompt, new, (stop,) if draw.random() < 0.5 else ())
            requests.append(request)
            if draw.random() < 0.25:
                server.limits[request] = draw.randint(1, new)
        server.step()
        step += 1
    for request in requests:
        wanted = plain.generate(request.prompt, request.max_new, bool(request.stop_ids))
        if request in server.limits:
            assert len(request.output) >= min(server.limits[request], len(wanted))
            wanted = wanted[: len(request.output)]
        assert request.output == wanted
    assert sorted(server.free_pages) == list(range(1, OPTIONS["num_pages"]))
    assert sorted(server.free_slots) == [1, 2, 3]


def finish(server: example.Host) -> None:
    """Run until nothing is left to do."""
    while server.step():
        pass


def bind_poisoned(
    model: mtpc.HostedModel, shared: Mapping[str, Any], steps: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Bind poisoned tensors, and check that binding does not change shared ones."""
    for tensors in (shared, *steps.values()):
        poison(tensors)
    before = {name: bits(tensor).clone() for name, tensor in shared.items()}
    model.bind(shared, steps)
    assert all(torch.equal(bits(tensor), before[name]) for name, tensor in shared.items())


def tensors_for(model: mtpc.HostedModel) -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """The tensors of a host."""
    steps = {
        key: {name: buffer.allocate() for name, buffer in model.step_buffers(key).items()}
        for key in model.keys
    }
    return {name: buffer.allocate() for name, buffer in model.buffers.items()}, steps
