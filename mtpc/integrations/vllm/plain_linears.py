"""Makes vLLM's CPU build call `F.linear`, so that a compilation backend sees the weights.

vLLM's own method packs each weight into a oneDNN object and frees the parameter. Dynamo's graph
then calls a vLLM operator without weights, and mtpc's passes find no linear layer in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class PlainLinearMethod(UnquantizedLinearMethod):
    """Keeps a layer's weight as it was loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: mtpc packs the weights that the compiled graph reads."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        weight: Any = layer.weight
        return F.linear(x, weight, bias)


class PlainLinears(QuantizationConfig):
    """The value "mtpc" of vLLM's option `quantization`. It quantises nothing."""

    def get_name(self) -> str:
        return "mtpc"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainLinears:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of linear layers. None for other layers, which keep vLLM's own method."""
        return PlainLinearMethod() if isinstance(layer, LinearBase) else None
