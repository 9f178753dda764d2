"""Device memory that neither torch's allocator nor a step's graph shows, from what is known of it.

- A driver keeps a copy of every graph on the device. `NODE_BYTES` is from figures that a user of
  NVIDIA's forum gives for graphs of 500, 1,000 and 2,000 kernels (driver 470, CUDA 11.2): 362, 395
  and 458 MB. https://forums.developer.nvidia.com/t/increasing-memory-footprint-with-large-task-graphs/244901
- torch gives cuBLAS one workspace for each handle and stream: ":4096:2:16:8" in KiB, or 32 MiB on
  Hopper (https://github.com/pytorch/pytorch/pull/89027), and in some versions on Blackwell
  (https://github.com/pytorch/pytorch/pull/175344). On ROCm hipBLASLt's is 128 MiB
  (https://github.com/ROCm/hipBLASLt/pull/1212). `CUBLAS_WORKSPACE_CONFIG` is not looked at.
"""

from __future__ import annotations

import torch

from mtpc.backends.triton_kernels import call_launches
from mtpc.capture.effects import analyse
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of

NODE_BYTES = 64 << 10
"""Of a graph's kernel, in the driver's copy."""
_KIB, _MIB = 1 << 10, 1 << 20
_AMPERE, _HOPPER, _ROCM = (2 * 4096 + 8 * 16) * _KIB, 32 * _MIB, 128 * _MIB
_STREAMS = 2
"""With a workspace: the stream that captures, and torch's current one."""


def kernel_count(graph: StepGraph) -> int:
    """Kernels of a step, from above: one for each node that computes or writes, and all launches of
    mtpc's. Inductor fuses many."""
    effects, count = analyse(graph.graph), 0
    with fake_mode_of(graph.graph):
        for node in graph.graph.nodes:
            acts = node in effects.roots[node] or effects.writes[node]
            if node.op == "call_function" and acts:
                count += len(call_launches(node)) or 1
    return count


def workspace_bytes(device: str) -> int:
    """Bytes of the workspaces of libraries for matrix products; those of a Hopper where `device` is
    no GPU, as in a plan for another machine."""
    if not device.startswith("cuda"):
        return _STREAMS * _HOPPER
    if torch.version.hip:
        return _STREAMS * _ROCM
    major, _ = torch.cuda.get_device_capability(device)
    return _STREAMS * (_HOPPER if major >= 9 else _AMPERE)
