"""Custom ops: the few operations a step contains beyond ATen.

Each is a `torch.library` op `mtpc::name` with honest mutation annotations, a fake, and a plain
PyTorch reference that IS its specification. Backends register faster kernels for a device and
are tested against the reference. Importing this package registers the ops.
"""

from mtpc.ops.accept import accept
from mtpc.ops.attention import (
    expanded_latent_attention,
    latent_attention,
    paged_attention,
    write_cache,
)
from mtpc.ops.choose_slots import choose_slots
from mtpc.ops.experts import experts
from mtpc.ops.float32_linear import float32_linear
from mtpc.ops.gated_delta import gated_delta_rule
from mtpc.ops.packed import (
    packed_experts,
    packed_head_linear,
    packed_linear,
    packed_linear_max,
)
from mtpc.ops.sinkhorn import sinkhorn

__all__ = [
    "accept",
    "choose_slots",
    "expanded_latent_attention",
    "experts",
    "float32_linear",
    "gated_delta_rule",
    "latent_attention",
    "packed_experts",
    "packed_head_linear",
    "packed_linear",
    "packed_linear_max",
    "paged_attention",
    "sinkhorn",
    "write_cache",
]
