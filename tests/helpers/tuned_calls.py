"""A call of `mtpc::paged_attention` in a step of its own, and a process that tunes it.

    tuned_calls.py STORE CONFIG    # prints how many launches were timed, and what was chosen

The process's timer prefers the configuration of index CONFIG, and is slow; nothing is launched.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mtpc.ops  # noqa: F401  (registers the references)
from mtpc.backends.measured import Table
from mtpc.backends.triton_kernels.configs import Config, configs_of
from mtpc.backends.triton_kernels.plans import node_launches
from mtpc.backends.triton_kernels.tuning import Call, Tuner
from mtpc.capture.graph import StepGraph
from mtpc.layout import Layout, StepKey
from mtpc.store.entries import EntryStore
from mtpc.weights.weights import Weights

DEVICE = "no device"


def paged_call(
    rows: int = 8, pages: int = 40, dtype: torch.dtype = torch.float16, dim: int = 64
) -> Call:
    """Two requests, block tables of 16 pages of 16 positions, 4 heads on 2."""
    shapes = {
        "q": ((rows, 4, dim), dtype),
        "k_cache": ((pages, 16, 2, dim), dtype),
        "v_cache": ((pages, 16, 2, dim), dtype),
        "block_table": ((2, 16), torch.int32),
        "seq_lens": ((2,), torch.int32),
        "query_start_loc": ((3,), torch.int32),
    }
    graph = fx.Graph()
    arguments = []
    with FakeTensorMode():
        for name, (shape, kind) in shapes.items():
            arguments.append(graph.placeholder(name))
            arguments[-1].meta["val"] = torch.empty(shape, dtype=kind)
    node = graph.call_function(torch.ops.mtpc.paged_attention.default, (*arguments, 0.1))
    graph.output(())
    module = fx.GraphModule(nn.Module(), graph)
    step = StepGraph(module, StepKey.decode(2, 3), Layout((), {}), Weights({}))
    return Call(next(n for n in step.graph.nodes if n.name == node.name), step)


def names_of(call: Call) -> list[str]:
    """The names of the configurations of the only kernel with several."""
    return [str(config) for config in configs_of(node_launches(call.node)[0], "cuda")]


def main(root: str, preferred: str) -> None:
    call, timed = paged_call(), list[str]()
    best = names_of(call)[int(preferred)]

    def timer(call: Call, index: int, configs: Sequence[Config]) -> list[float]:
        timed.extend(map(str, configs))
        time.sleep(1)
        return [1.0 if str(config) == best else 2.0 for config in configs]

    print("ready", flush=True)
    sys.stdin.readline()
    configs, notes = Tuner(Table(EntryStore(Path(root)), DEVICE), timer)(call.node, call.graph)
    print(json.dumps({"timed": len(timed), "configs": configs, "notes": notes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
