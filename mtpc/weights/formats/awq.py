"""Weights of AWQ (arXiv:2306.00978), as AutoAWQ's version "gemm" writes them.

A weight X.weight [N, K] is three tensors: X.qweight int32 [K, N / 8], X.qzeros int32
[K / group, N / 8] and X.scales [K / group, N]. An int32 holds codes of eight adjacent outputs, the
low bits first, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.weights.formats.stored import (
    Config,
    Grid,
    QuantisedWeight,
    Tensors,
    group_size,
    packed_parts,
    setting,
    texts,
    unpack_words,
)
from mtpc.weights.grouped import Decoded

LEAVES = ("qweight", "qzeros", "scales")
IGNORED: tuple[str, ...] = ()
_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight adjacent outputs is in an int32."""


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    stems = [name.rpartition(".")[0] for name in tensors if name.endswith(".qweight")]
    left_out = texts(says, "modules_to_not_convert")
    setting(says, "version", "gemm", "gemm", "GEMM")
    setting(says, "bits", 4, 4)
    setting(says, "zero_point", True, True)
    for stem in stems:
        if any(part in stem for part in left_out):
            raise CheckpointError(
                f"{stem}.qweight is quantised, but modules_to_not_convert in quantization_config "
                "leaves it out; expected either, not both"
            )
    return [_weight(tensors, stem, says) for stem in stems]


def _weight(tensors: Tensors, module: str, says: Config) -> QuantisedWeight:
    name, stored = f"{module}.weight", tensors[f"{module}.qweight"]
    if len(stored.shape) != 2 or stored.dtype != "I32":
        raise CheckpointError(f"{module}.qweight is {stored}; expected I32 [K, N / 8]")
    shape = (stored.shape[1] * 8, stored.shape[0])
    group = group_size(says, name, shape)
    parts = packed_parts(tensors, module, shape, shape[1] // group, 4)
    layout = f"AWQ int4 in groups of {group}"
    return QuantisedWeight(
        name,
        shape,
        layout,
        "int4",
        Grid(1, group),
        True,
        parts,
        _decode,
        tensors[parts["scales"]].dtype_name,
        rows={"codes": (1, 8), "scales": (1, 1), "zeros": (1, 8)},
    )


def _decode(parts: Mapping[str, Tensor]) -> Decoded:
    scales = parts["scales"].t().contiguous()
    return Decoded(_outputs(parts["codes"]), scales, _outputs(parts["zeros"]))


def _outputs(words: Tensor) -> Tensor:
    """int32 [n, N / 8] -> uint8 [N, n]."""
    codes = unpack_words(words, 4).unflatten(-1, (-1, 8))[..., list(_PLACE)]
    return codes.flatten(-2).t().contiguous()
