"""`compile_host` on the cuda backend, without its device: captured over the host's own memory.

The backend is real, its graphs are the null device's: capture and replay of exactly the addresses
that were bound. What `torch.cuda.CUDAGraph` does with them has never been seen (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import host as example
import pytest
import torch
from helpers.families import FAMILY_NAMES
from helpers.oracles import Oracle
from helpers.tapes import lower_eagerly, storages, taken
from helpers.theorem import PROMPTS
from helpers.watched_host import OPTIONS, Server, bind_poisoned, bits, finish, serve, tensors_for

import mtpc
from mtpc.backends import BACKENDS
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.graph_artifact import GraphArtifact
from mtpc.backends.graphs import static_tensors
from mtpc.backends.null import NullGraphs


@pytest.fixture
def graphs() -> NullGraphs:
    return NullGraphs()


@pytest.fixture
def backend(graphs: NullGraphs, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """What `backend="cuda"` opens in the test: its own code, on recorded graphs."""
    made = CudaBackend(graphs, lower_eagerly, (), device="cpu")
    monkeypatch.setitem(
        BACKENDS, "cuda", replace(BACKENDS["cuda"], make=lambda report, store: made)
    )
    return made


@pytest.fixture
def hosted(
    backend: CudaBackend, checkpoint: Callable[..., Path]
) -> Callable[..., mtpc.HostedModel]:
    def make(family: str, spec_tokens: int = 3, form: Any = "both") -> mtpc.HostedModel:
        options = {**OPTIONS, "backend": "cuda", "spec_tokens": spec_tokens}
        return mtpc.compile_host(checkpoint(family), form=form, **options)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_host_of_its_own_on_captured_graphs(
    family: str, hosted: Callable[..., Any], oracle: Callable[..., Oracle], graphs: NullGraphs
) -> None:
    """Joins, leaves, aborts, preemption over recorded graphs; every replay of them watched."""
    server = Server(hosted(family))
    recorded = len(graphs.tapes)
    serve(server, oracle(family), 1)
    assert len(graphs.tapes) == recorded, "nothing is captured while requests are served"
    seen = server.watched.seen
    assert seen["replays"] > 20
    assert seen["drafts compared"] > 20
    replays = server.watched.program.replays
    assert sum(tape.replays for tape in graphs.tapes) >= sum(replays.values()) == seen["replays"]
    accepted = [server.accepted[count] for count in range(4)]
    assert accepted[0] > 0
    assert sum(accepted[1:]) > 0


def test_graphs_hold_the_hosts_addresses_and_no_other_pool(
    hosted: Callable[..., Any], backend: CudaBackend, graphs: NullGraphs
) -> None:
    """Every tensor that a graph touches: the host's, a weight, or what the graph itself made."""
    model = hosted("mimo", 1, form="split")
    parts = [(key, step.artifact) for key, step in model._built.steps.items()]
    assert all(isinstance(part, GraphArtifact) for _, part in parts)
    for _, part in parts:
        held = static_tensors(part.graph).values()
        assert {t.device.type for t in held} == {"meta"}, "no memory held"
    assert graphs.tapes == [], "nothing is captured before there are tensors"
    shared, steps = tensors_for(model)
    bind_poisoned(model, shared, steps)
    assert len(backend.captured) == len(parts) == len(graphs.tapes)
    weights = {id(w): w for _, part in parts for _, w in part.graph.weights.items()}
    pools = storages(tensor for name, tensor in shared.items() if name.startswith("kv."))
    touched = set[int]()
    # Parts are bound in the order of their capture.
    for ((key, _), part), tape in zip(parts, graphs.tapes, strict=True):
        own = {**shared, **steps[key]}
        captured = backend.captured[part.graph.name]
        for name in part.graph.buffers():
            assert captured.addresses[name] == own[name].data_ptr(), name
        known = storages(own.values()) | storages(weights.values())
        touched |= taken(tape, known)
    assert pools <= touched, "each of the host's pools is used by some graph"


def test_a_moved_pool_is_seen_and_may_be_bound_anew(
    hosted: Callable[..., Any], oracle: Callable[..., Oracle], backend: CudaBackend
) -> None:
    """Two sets of tensors of one model: each program keeps to its own."""
    model = hosted("mimo", 1, form="split")
    first, second = example.Host(model), example.Host(model)
    wanted = oracle("mimo").generate(PROMPTS[3], 6, stop=False)
    idle = {name: tensor.clone() for name, tensor in second.shared.items()}
    request = first.add(PROMPTS[3], 6)
    finish(first)
    assert request.output == wanted
    for name, tensor in second.shared.items():
        assert torch.equal(bits(tensor), bits(idle[name])), f"{name} is the other program's"
    request = second.add(PROMPTS[3], 6)
    finish(second)
    assert request.output == wanted
    assert not {t.data_ptr() for t in first.shared.values()} & {
        t.data_ptr() for t in second.shared.values()
    }
    moved = dict(backend.captured["decode[R=3,Q=2,K=1].verify"].addresses)
    assert moved["state.token_ids"] == second.shared["state.token_ids"].data_ptr()
