"""The lower level: an example host with a scheduler of its own, and mtpc kept to its contract."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import host as example
import pytest
import torch
from helpers.families import ASSISTED, CPU_FAMILY_NAMES, DRAFTED, FAMILY_NAMES, NEAR_FAMILIES
from helpers.oracles import Oracle
from helpers.theorem import PROMPTS
from helpers.watched_host import Server, bind_poisoned, finish, layers_of, serve, tensors_for
from torch import Tensor

import mtpc
from mtpc.backends.graph_artifact import GraphArtifact
from mtpc.capture.effects import analyse
from mtpc.layout import StepKey
from mtpc.sampling_params import FLOATS, INTS

DEFAULT = [("mimo", 3)]
"""The slow run takes all families and every K."""


@pytest.mark.parametrize(
    ("family", "spec_tokens"),
    [
        pytest.param(family, k, marks=[] if (family, k) in DEFAULT else [pytest.mark.slow])
        for family in (*FAMILY_NAMES, *NEAR_FAMILIES, DRAFTED[0], ASSISTED[0])
        for k in range(4)
        if family in CPU_FAMILY_NAMES or k in (1, 3)
    ],
)
def test_a_host_of_its_own(
    family: str, spec_tokens: int, hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Random arrivals, joins, leaves, aborts, preemption, poisoned memory; every replay watched."""
    server, counts = Server(hosted(family, spec_tokens)), range(spec_tokens + 1)
    for seed in range(12):
        serve(server, oracle(family), seed)
        if seed >= 2 and (spec_tokens == 0 or all(server.accepted[count] for count in counts)):
            break
    seen = server.watched.seen
    assert seen["replays"] > 60
    assert server.num_preempted > 0
    if spec_tokens:
        assert seen["drafts compared"] > 60
        assert all(server.accepted[count] for count in counts)


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
    for (key, part), step in model._built.steps.items():
        if part == "step" and key.spec_tokens:
            continue
        assert isinstance(step.artifact, GraphArtifact)
        graph = step.artifact.graph.graph
        effects = analyse(graph)
        for node in graph.nodes:
            for name in effects.buffer_writes(node):
                written.setdefault(name, set()).add(part)
    buffers = dict(model.buffers)
    for key in model.keys:
        buffers |= model.step_buffers(key)
    num_target_layers, _ = layers_of(model)
    for name in buffers:
        wanted = set(buffers[name].by) - {"host"}
        if spec_tokens == 0:
            wanted = {"step"} if wanted else set()
        elif name.startswith("kv."):
            is_target = int(name.split(".")[1]) < num_target_layers
            wanted &= {"verify"} if is_target else {"propose"}
        elif (family, name) == ("deepseek_v4", "batch.slot_mapping"):
            wanted = {"verify"}  # Its drafts write rings; nobody reads slots of pages there.
        assert written.get(name, set()) == wanted, name


@pytest.mark.parametrize(
    ("family", "spec_tokens"), [("mimo", 3), pytest.param("qwen3_next", 2, marks=pytest.mark.slow)]
)
def test_a_host_may_move_a_request(
    family: str, spec_tokens: int, hosted: Callable[..., Any], oracle: Callable[..., Oracle]
) -> None:
    """Rows by slot and pages are all there is of a request: copied elsewhere, it goes on."""
    server, plain = Server(hosted(family, spec_tokens)), oracle(family)
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
