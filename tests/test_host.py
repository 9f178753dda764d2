"""The lower level: an example host with a scheduler of its own, and mtpc kept to its contract."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import host as example
import pytest
import torch
from conftest import CPU_FAMILY_NAMES, FAMILY_NAMES, TINY
from oracles import Oracle
from test_theorem import PROMPTS
from torch import Tensor

import mtpc
from mtpc.capture.effects import analyse
from mtpc.errors import HostError, OptionError
from mtpc.host.contract import term_of
from mtpc.layout import StepKey
from mtpc.sampling_params import FLOATS, INTS

OPTIONS: dict[str, Any] = {
    **TINY,
    **dict(batch_buckets=(3,), num_pages=14, backend="eager", dtype="float64"),
}
"""13 pages of 4 tokens: the longest request alone fits, three do not."""
DEFAULT = [("mimo", 0), ("mimo", 3), ("qwen3_next", 3)]
"""Plain and speculative; pages alone, and recurrent state. The slow run takes all families."""
WILD = {torch.int32: 2**30, torch.int64: -(2**40)}


@pytest.fixture(scope="module")
def hosted(checkpoint: Callable[..., Path]) -> Callable[..., mtpc.HostedModel]:
    """hosted(family, K): halves and whole steps, compiled once."""
    made: dict[Any, mtpc.HostedModel] = {}

    def get(family: str, spec_tokens: int = 3, **changes: Any) -> mtpc.HostedModel:
        key = (family, spec_tokens, *sorted(changes.items()))
        if key not in made:
            options = {**OPTIONS, **changes, "spec_tokens": spec_tokens}
            made[key] = mtpc.compile_host(checkpoint(family), form="both", **options)
        return made[key]

    return get


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, so that NaN equals NaN: [first dim, ...]."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)


def poison(tensors: Mapping[str, Tensor]) -> None:
    """NaN and wild ids in everything that the contract does not say the host has written."""
    for name, tensor in tensors.items():
        if name != "batch.state_indices":
            tensor.fill_(math.nan if tensor.is_floating_point() else WILD.get(tensor.dtype, 1))


def layers_of(model: mtpc.HostedModel) -> tuple[int, int]:
    """Layers of the target, and rows before a step's own that chained MTP layers compute again."""
    layers = {int(name.split(".")[1]) for name in model.buffers if name.startswith("kv.")}
    chained = [b for name, b in model.buffers.items() if name == "state.chain_ids"]
    window = chained[0].shape[1] if chained else 0
    return max(layers) + 1 - (window + 1 if model.options.spec_tokens else 0), window


class Watched:
    """A `HostProgram` under watch: what each replay writes, where tensors are, and fused replay.

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
        """Bytes that the contract allows this half to write in a buffer."""
        tensor = self._tensors(self.program)[name]
        allowed = torch.zeros(bits(tensor).shape, dtype=torch.bool)
        by = {"verify", "propose"} if part == "both" else {part}
        if isinstance(name, tuple):
            allowed[:] = name[0] == key and bool(by & set(term_of(name[1]).by))
            return allowed
        is_target = name.startswith("kv.") and int(name.split(".")[1]) < self.num_target_layers
        halves = {"verify"} if is_target else {"propose"}
        if not by & halves & set(term_of(name).by):
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
        """The places of a step's rows, and of K drafts behind them, in pages that requests own."""
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
        """The fused step, from the state before verify: the same drafts, bit for bit."""
        shadows = self._tensors(self.fused)
        for name, shadow in shadows.items():
            shadow.copy_(self.before[name])
        self.fused.step(key)
        for name, tensor in self._tensors(self.program).items():
            if isinstance(name, tuple) and not name[1].startswith(("batch.out", "batch.num")):
                continue  # What crosses is not written by a fused step; metadata is its own.
            assert torch.equal(bits(tensor), bits(shadows[name])), f"{name} after {key}"
        drafts = self.program.shared["state.token_ids"][self._slots(key), 1:]
        self.seen["drafts compared"] += drafts.numel()


class Server(example.Host):
    """The example host; some requests end because it says so, between verify and propose."""

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
    """Random arrivals; each text is plain decoding's, an aborted one its beginning."""
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
    """Until nothing is left to do."""
    while server.step():
        pass


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param(family, k, marks=[] if (family, k) in DEFAULT else [pytest.mark.slow])
        for family in FAMILY_NAMES
        for k in range(4)
        if family in CPU_FAMILY_NAMES or k in (1, 3)
    ],
)
def test_a_host_of_its_own(
    family: str, spec_tokens: int, hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Random arrivals, joins, leaves, aborts, preemption, poisoned memory; every replay watched."""
    server = Server(hosted(family, spec_tokens))
    for seed in range(3):
        serve(server, oracle(family), seed)
    seen = server.watched.seen
    assert seen["replays"] > 60
    assert server.num_preempted > 0
    if spec_tokens:
        assert seen["drafts compared"] > 60
        assert all(server.accepted[count] > 0 for count in range(spec_tokens + 1))


def test_the_watch_sees(hosted: Callable[..., Any], oracle: Callable[..., Oracle]) -> None:
    """A half that writes one number too many is caught: the checks above can fail."""
    model = hosted("mimo", 3)
    for name, row in (("kv.0.k", 7), ("state.stop_ids", 3), ("batch.prompt_ids", 0)):
        server = Server(model)
        inner, steps = server.watched.program, server.steps
        tensor = server.shared.get(name, steps[model.prefill_key].get(name))
        runs = dict(inner._runs)

        def wrong(replay: Callable[[], None], tensor: Tensor = tensor, row: int = row) -> None:
            replay()
            tensor[row].fill_(5)

        inner._runs = {k: lambda run=run: wrong(run) for k, run in runs.items()}
        server.add(PROMPTS[3], 4)
        with pytest.raises(AssertionError, match=f"wrote outside.*{name}"):
            finish(server)


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [*DEFAULT, *(pytest.param(f, 3, marks=pytest.mark.slow) for f in FAMILY_NAMES[4:])],
)
def test_the_halves_write_what_the_contract_says(
    family: str, spec_tokens: int, hosted: Callable[..., Any]
) -> None:
    """Read off the graphs: of each buffer, which half writes it."""
    model = hosted(family, spec_tokens)
    written: dict[str, set[str]] = {}
    for (key, part), lowered in model._parts.items():
        if part == "step" and key.spec_tokens:
            continue
        effects = analyse(lowered.graph.graph)
        for node in lowered.graph.graph.nodes:
            for name in effects.buffer_writes(node):
                written.setdefault(name, set()).add(part)
    shared = set(model.buffers)
    own = {name for key in model.keys for name in model.step_buffers(key)}
    num_target_layers, _ = layers_of(model)
    for name in shared | own:
        wanted = set(term_of(name).by) - {"host"}
        if spec_tokens == 0:
            wanted = {"step"} if wanted else set()
        elif name.startswith("kv."):
            is_target = int(name.split(".")[1]) < num_target_layers
            wanted &= {"verify"} if is_target else {"propose"}
        elif (family, name) == ("deepseek_v4", "batch.slot_mapping"):
            wanted = {"verify"}  # Its drafts write rings; nobody reads slots of pages there.
        assert written.get(name, set()) == wanted, name


@pytest.mark.parametrize("family", ["mimo", "qwen3_next"])
def test_a_host_may_move_a_request(
    family: str, hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Rows by slot and pages are all there is of a request: copied elsewhere, it goes on."""
    server, plain = Server(hosted(family, 3)), oracle(family)
    request = server.add(PROMPTS[8], 16)
    while len(request.output) < 6:
        server.step()
    old_slot, old_pages = request.slot, request.pages
    request.slot = server.free_slots.pop(0)
    request.pages = [server.free_pages.pop(0) for _ in old_pages]
    for name, tensor in server.shared.items():
        if server.model.buffers[name].is_paged:
            tensor[request.pages] = tensor[old_pages]
            tensor[old_pages] = math.nan
        else:
            tensor[request.slot] = tensor[old_slot]
            tensor[old_slot] = 2**30
    table = server.shared["state.block_table"][request.slot]
    table[: len(old_pages)] = torch.tensor(request.pages)
    server.free_slots.append(old_slot)
    server.free_pages += old_pages
    finish(server)
    assert request.output == plain.generate(request.prompt, 16, stop=False)


def test_a_host_may_bring_its_own_drafts(
    hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Right ones are accepted, all of them; wrong ones change nothing."""
    server, plain = Server(hosted("mimo", 3)), oracle("mimo")
    request = server.add(PROMPTS[5], 13)
    truth = plain.generate(PROMPTS[5], 13, stop=False)
    rows, turn = server.shared["state.token_ids"], 0
    while server.step():
        known = len(request.output)
        if known and known + 3 <= len(truth):
            drafts = torch.tensor(truth[known : known + 3])
            rows[request.slot, 1:] = drafts if turn % 2 else (drafts + 1) % 96
            turn += 1
    assert request.output == truth
    assert server.accepted[3] >= 2
    assert server.accepted[0] >= 2


def bind_poisoned(
    model: mtpc.HostedModel, shared: Mapping[str, Any], steps: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Bind tensors full of garbage, and see that binding leaves the shared ones as they were."""
    for tensors in (shared, *steps.values()):
        poison(tensors)
    before = {name: bits(tensor).clone() for name, tensor in shared.items()}
    model.bind(shared, steps)
    assert all(torch.equal(bits(tensor), before[name]) for name, tensor in shared.items())


def tensors_for(model: mtpc.HostedModel) -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """What a host would hand over."""
    steps = {
        key: {name: buffer.allocate() for name, buffer in model.step_buffers(key).items()}
        for key in model.keys
    }
    return {name: buffer.allocate() for name, buffer in model.buffers.items()}, steps


DECODE, PREFILL = StepKey.decode(3, 3), StepKey.prefill(4, 2, 3)


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Changes one tensor of those that are handed over."""

    def apply(shared: Any, steps: Any) -> None:
        owner = shared if name in shared else steps[DECODE]
        owner[name] = change(owner[name])

    return apply


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "missing": (
        lambda shared, steps: shared.pop("state.block_table"),
        r"1 problem.*\n  state.block_table is missing; expected int32 \[4, 18\]",
    ),
    "unknown": (
        lambda shared, steps: shared.update({"state.blocktable": torch.zeros(1)}),
        r"state.blocktable is no buffer of this program; did you mean state.block_table\?",
    ),
    "dtype": (
        replaced("state.block_table", lambda t: t.long()),
        "state.block_table is int64; expected int32",
    ),
    "shape": (
        replaced("kv.0.k", lambda t: t[1:]),
        r"kv.0.k has shape \[13, 4, 2, 16\]; expected \[14, 4, 2, 16\]",
    ),
    "strides": (
        replaced("kv.0.k", lambda t: torch.stack([t, t], 1)[:, 0]),
        r"kv.0.k has strides \(256, 32, 16, 1\); expected \(128, 32, 16, 1\): a slice of whole",
    ),
    "device": (
        replaced("kv.0.k", lambda t: t.to("meta")),
        "kv.0.k is on meta; expected cpu",
    ),
    "gradient": (
        replaced("kv.0.k", lambda t: t.requires_grad_()),
        "kv.0.k requires a gradient",
    ),
    "no tensor": (
        replaced("state.stop_ids", lambda t: t.tolist()),
        r"state.stop_ids is a list; expected int64 \[4, 8\]",
    ),
    "of a step": (
        replaced("batch.out_token_ids", lambda t: t.int()),
        r"decode\[R=3,Q=4,K=3\] batch.out_token_ids is int32; expected int64",
    ),
    "one for two": (
        lambda shared, steps: shared.update({"kv.0.k": shared["kv.1.k"]}),
        "kv.0.k and kv.1.k share memory",
    ),
    "memory within a step": (
        lambda shared, steps: steps[DECODE].update(
            {"batch.seq_lens": steps[DECODE]["batch.num_emitted"]}
        ),
        "share memory; each needs its own",
    ),
    "no such step": (
        lambda shared, steps: steps.update({StepKey.decode(9, 3): {}}),
        r"decode\[R=9,Q=4,K=3\]: no such step; steps: decode\[R=3,Q=4,K=3\], prefill",
    ),
    "step forgotten": (
        lambda shared, steps: steps.pop(PREFILL),
        r"prefill\[R=4,Q=2,K=3\] batch.state_indices is missing",
    ),
    "no mapping": (
        lambda shared, steps: steps.update({DECODE: None}),
        "is a NoneType; expected a mapping of names to tensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused(case: str, hosted: Callable[..., Any]) -> None:
    """Each by one error that says what was found, and what was expected."""
    change, message = WRONG[case]
    shared, steps = tensors_for(hosted("mimo", 3))
    change(shared, steps)
    with pytest.raises(HostError, match=message):
        hosted("mimo", 3).bind(shared, steps)


def test_all_that_is_wrong_is_said_at_once(hosted: Callable[..., Any]) -> None:
    shared, steps = tensors_for(hosted("mimo", 3))
    shared["state.stop_ids"] = shared["state.stop_ids"].int()
    del shared["kv.2.v"]
    steps[PREFILL]["batch.num_input"] = None
    with pytest.raises(HostError) as raised:
        hosted("mimo", 3).bind(shared, steps)
    lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert "3 problem(s)" in lines[0]
    with pytest.raises(HostError, match=r"and \d+ more"):
        hosted("mimo", 3).bind({}, {})
    with pytest.raises(HostError, match="steps is a NoneType; expected a mapping of step keys"):
        hosted("mimo", 3).bind(shared, None)


def test_steps_may_share_memory_with_each_other(
    hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """One arena for what is a step's own: two steps never run at once."""

    class Sharing(example.Host):
        def __init__(self, model: mtpc.HostedModel):
            super().__init__(model)
            arena = {
                name: buffer.allocate()
                for key in (DECODE, PREFILL)
                for name, buffer in model.step_buffers(key).items()
            }
            for own in self.steps.values():
                for name, tensor in own.items():
                    flat = arena[name].flatten()
                    if flat.numel() >= tensor.numel() and flat.dtype == tensor.dtype:
                        own[name] = flat[: tensor.numel()].view(tensor.shape)
            self.program = model.bind(self.shared, self.steps)

    server = Sharing(hosted("mimo", 3))
    own = server.steps
    name = "batch.state_indices"
    assert own[DECODE][name].data_ptr() == own[PREFILL][name].data_ptr()
    requests = [server.add(prompt, 9) for prompt in PROMPTS[6:9]]
    finish(server)
    for request in requests:
        assert request.output == oracle("mimo").generate(request.prompt, 9, stop=False)


def test_the_order_of_calls_is_held(hosted: Callable[..., Any]) -> None:
    model = hosted("mimo", 3)
    program = model.bind(*tensors_for(model))
    with pytest.raises(HostError, match=r"must follow verify.*not a verify"):
        program.propose(DECODE)
    program.verify(PREFILL)
    with pytest.raises(HostError, match=r"must follow.*the last call was verify\(prefill"):
        program.propose(DECODE)
    program.verify(DECODE)
    program.propose(DECODE)
    with pytest.raises(HostError, match="must follow"):
        program.propose(DECODE)
    program.verify(DECODE)
    program.step(DECODE)
    with pytest.raises(HostError, match="must follow"):
        program.propose(DECODE)
    with pytest.raises(HostError, match=r"no step decode\[R=7,Q=4,K=3\]; steps: decode\[R=3"):
        program.verify(StepKey.decode(7, 3))
    with pytest.raises(HostError, match="no decode step of 4 rows with K = 3"):
        model.decode_key(4)
    with pytest.raises(HostError, match="K = 1"):
        model.decode_key(1, 1)
    assert program.replays[DECODE, "propose"] == 1
    assert [row.token_ids for row in program.results(DECODE)] == [[], [], []]


def test_a_half_that_was_not_compiled(hosted: Callable[..., Any]) -> None:
    model = hosted("mimo", 3)
    fused = replace(
        model, form="fused", _parts={k: v for k, v in model._parts.items() if k[1] == "step"}
    )
    program = fused.bind(*tensors_for(fused))
    program.step(DECODE)
    with pytest.raises(HostError, match=r"verify was not compiled: compile_host\(form='both'\)"):
        program.verify(DECODE)


@pytest.mark.slow
def test_on_the_null_device(hosted: Callable[..., Any], oracle: Callable[..., Oracle]) -> None:
    """Captured on the host's addresses, as on a device; binding leaves buffers as they were."""
    model = hosted("mimo", 1, backend="null")
    shared, steps = tensors_for(model)
    bind_poisoned(model, shared, steps)
    server = Server(model)
    requests = [server.add(prompt, 9) for prompt in PROMPTS[4:8]]
    finish(server)
    for request in requests:
        assert request.output == oracle("mimo").generate(request.prompt, 9, stop=False)


@pytest.mark.slow
def test_the_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python examples/host.py`, on the eager backend."""
    eager = partial(mtpc.compile_host, backend="eager")
    monkeypatch.setattr(mtpc, "compile_host", eager)
    monkeypatch.setattr(sys, "argv", ["host.py"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The with statement")
    assert lines[-1].startswith("steps by accepted drafts: {0: ")


class AnyK:
    """A hosted model whose decode steps draft as many tokens as chance says."""

    def __init__(self, model: mtpc.HostedModel):
        self._model, self._draw = model, random.Random(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decode_key(self, num_reqs: int) -> StepKey:
        return self._model.decode_key(num_reqs, self._draw.choice(self._model.options.tiers))


@pytest.mark.slow
def test_drafts_by_chance(hosted: Callable[..., Any], oracle: Callable[..., Oracle]) -> None:
    """K from step to step as the host likes: steps of 0, 1 and 3 drafts over the same rows."""
    model = hosted("mimo", "auto", spec_tiers=(0, 1, 3))
    server = Server(model)
    server.model = AnyK(model)
    requests = [server.add(prompt, 12) for prompt in PROMPTS[2:9]]
    finish(server)
    for request in requests:
        assert request.output == oracle("mimo").generate(request.prompt, 12, stop=False)
    used = {key.spec_tokens for key, _ in server.watched.program.replays if key.phase == "decode"}
    assert used == {0, 1, 3}


@pytest.mark.slow
def test_sampling_rows(
    hosted: Callable[..., Any], compiled: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """The columns that the contract names: the engine's text for the same parameters."""
    params = mtpc.SamplingParams(temperature=0.9, top_k=7, seed=11)
    whole = compiled("mimo", 3, batch_buckets=(3,), sampling=True)
    wanted = whole.generate(PROMPTS[4:7], 12, ignore_eos=True, sampling=params)

    class Sampling(Server):
        def _join(self, request: example.Request, num_pages: int) -> None:
            super()._join(request, num_pages)
            floats = [float(getattr(params, name)) for name in FLOATS]
            columns = {"seed": 11, "top_k": 7, "logprobs": -1}
            ints = [columns.get(name, 0) for name in INTS]
            state = self.shared
            state["state.sampling_floats"][request.slot] = torch.tensor(floats).double()
            state["state.sampling_ints"][request.slot] = torch.tensor(ints)
            state["state.bias_ids"][request.slot] = -1

    server = Sampling(hosted("mimo", 3, sampling=True))
    requests = [server.add(prompt, 12) for prompt in PROMPTS[4:7]]
    finish(server)
    assert [request.output for request in requests] == wanted
    assert wanted[0] != oracle("mimo").generate(PROMPTS[4], 12, stop=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "halves"}, "form is 'halves'; expected one of split, fused, both"),
        ({"prefix_caching": False}, "prefix_caching belongs to mtpc.compile"),
        ({"busy_prefill_chunk": 8}, "busy_prefill_chunk belongs to mtpc.compile"),
        ({"async_scheduling": True}, "async_scheduling belongs to mtpc.compile"),
        ({"require_sha256": "0" * 64}, "require_sha256 belongs to mtpc.compile"),
        ({"spec_token": 3}, "did you mean 'spec_tokens'"),
    ],
)
def test_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        mtpc.compile_host(tmp_path, **options)
