"""Formats of quantised weights: which of a checkpoint's tensors are one weight, and how to read it.

Each format is a module of this package, imported when a checkpoint has it. It has

- `find`, (tensors, quantization_config, config of the language model) -> its weights, which raises
  CheckpointError;
- `LEAVES`, last parts of the names of tensors that make up quantised weights: each such tensor must
  belong to a weight;
- `IGNORED`, last parts of the names of tensors that mtpc does not read: scales of activations.

`FORMATS` is the table of formats.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpc.errors import CheckpointError

if TYPE_CHECKING:
    from mtpc.weights.formats.stored import QuantisedWeight, Tensors

ADVICE = "dequantise the checkpoint to bfloat16 first"


@dataclass(frozen=True)
class Format:
    """A format of quantised weights: its module in this package, and the entry of
    quantization_config that lists modules with plain weights; None if it has no such list."""

    module: str
    left_out: str | None = None


FORMATS: Mapping[str, Format] = {
    "fp8": Format("block_fp8", "modules_to_not_convert"),
    "compressed-tensors": Format("compressed_tensors", "ignore"),
    "gptq": Format("gptq"),
    "awq": Format("awq", "modules_to_not_convert"),
    "gguf": Format("gguf"),
    "mxfp4": Format("mxfp4", "modules_to_not_convert"),
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), Format("modelopt", "ignore")),
}
"""Value of `quant_method` in config.json -> its format."""
_UNNAMED = "fp8"
"""The format of FP8 weights that config.json does not announce."""


def find_quantised(
    tensors: Tensors, config: Mapping[str, Any]
) -> tuple[dict[str, QuantisedWeight], list[str]]:
    """The quantised weights of a checkpoint by name, and names of tensors that are not read.

    Raises:
        CheckpointError: weights are quantised in a way that mtpc does not read; or a tensor of
            theirs is missing, or of another dtype or shape.
    """
    text = config.get("text_config") or config
    says = config.get("quantization_config") or text.get("quantization_config") or {}
    method = says.get("quant_method", "modelopt" if "quant_algo" in says else _UNNAMED)
    if method not in FORMATS:
        near = difflib.get_close_matches(str(method), FORMATS, n=1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        raise CheckpointError(
            f"config.json has quant_method {method!r}{hint}; expected one of "
            f"{', '.join(map(repr, FORMATS))}, or weights that are not quantised; {ADVICE}"
        )
    form = import_module(f"{__name__}.{FORMATS[method].module}")
    weights = {weight.name: weight for weight in form.find(tensors, says, text)}
    used = {name for weight in weights.values() for name in weight.parts.values()}
    # No tensor that looks like a part of a quantised weight belongs to none.
    for name, stored in tensors.items():
        leaf = name.rpartition(".")[2]
        if name in used:
            continue
        if leaf in form.LEAVES:
            raise CheckpointError(
                f"{name} belongs to no quantised weight of this checkpoint; expected the codes of "
                f"a weight beside it; {ADVICE}"
            )
        if leaf in ("weight", "bias") and not stored.is_wide:
            raise CheckpointError(
                f"{stored.path}: {name} is {stored}; expected floating-point weights of at least "
                f"16 bits, or quantised weights that config.json announces; {ADVICE}"
            )
    return weights, [name for name in tensors if name.rpartition(".")[2] in form.IGNORED]
