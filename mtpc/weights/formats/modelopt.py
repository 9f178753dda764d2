"""Weights of NVIDIA's ModelOpt: NVFP4, FP8, or some of each.

`quant_algo` names the kind:

- NVFP4, W4A16_NVFP4: X.weight uint8 [N, K / 2] and X.weight_scale float8_e4m3fn [N, K / 16], which
  is multiplied by X.weight_scale_2, one float32.
- FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO: X.weight float8_e4m3fn [N, K], and X.weight_scale
  float32: one; one for each row [N]; or one for each block, [N / 128, 1, K / 128, 1].
- MIXED_PRECISION: `quantized_layers` has one for each layer.

Tensors alone show which weights are quantised, and how. `exclude_modules` and `ignore` list those
that are not, MTP layers often among them. They are not read, because lists of released checkpoints
name a head that is quantised (vLLM #45102), or lack parts of plain MTP layers (vLLM #38832).

Sources: modelopt/torch/export of ModelOpt; model_executor/layers/quantization/modelopt.py of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtpc.errors import CheckpointError
from mtpc.weights.formats import compressed_tensors, nvfp4
from mtpc.weights.formats.stored import Config, QuantisedWeight, Tensors

LEAVES = ("weight_scale", "weight_scale_2", "pre_quant_scale")
IGNORED = compressed_tensors.IGNORED
_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
)
_BLOCK = 128


def find(tensors: Tensors, says: Config, config: Mapping[str, Any]) -> list[QuantisedWeight]:
    apart = says.get("quantization")  # As hf_quant_config.json has it.
    _check_algorithms(apart if isinstance(apart, dict) else says)
    found = []
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        if stored.dtype == "U8":
            scales = (f"{name}_scale", f"{name}_scale_2")
            found.append(nvfp4.weight_of(tensors, name, name, *scales, divides=False))
        elif stored.dtype == "F8_E4M3":
            # Scales show by their shape what shares one.
            scale = tensors.get(f"{module}.weight_scale")
            shape = () if scale is None else scale.shape
            strategy = (
                "block" if len(shape) == 4 else "channel" if max(shape, default=1) > 1 else "tensor"
            )
            settings: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
            settings["block_structure"] = [_BLOCK, _BLOCK]
            found.append(compressed_tensors.plain_weight(tensors, module, settings, "float"))
    return found


def _check_algorithms(says: Config) -> None:
    """Refuse a way to quantise whose tensors mean something else. Raises CheckpointError:
    `quant_algo`, or that of a layer, is none of `_ALGORITHMS`."""
    layers = says.get("quantized_layers") or {}
    if not isinstance(layers, dict):
        raise CheckpointError(
            f"quantization_config has quantized_layers {layers!r}; expected an object: layer -> "
            "its quant_algo"
        )
    named = {"": says, **layers}
    for layer, entry in named.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, dict) else entry
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            of = f" for {layer}" if layer else ""
            raise CheckpointError(
                f"quantization_config has quant_algo {algorithm!r}{of}; expected one of "
                f"{', '.join(_ALGORITHMS)}: dequantise the checkpoint to bfloat16 first"
            )
