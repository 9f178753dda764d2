"""What vLLM's and SGLang's linear layers and fused experts have in common.

Both hosts have classes of the same names. Their layers cut weights among the ranks, follow the
host's quantisation config, and load the checkpoint's tensors by their own loaders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.integrations.layer_sites import ExpertsSite, LinearSite


class ParallelLayers(ABC):
    """Makes and loads a host's layers; see `HostLayers`.

    Args:
        ranks: number of ranks of tensor parallelism.
        quant_config: the host's quantisation config, or None.
        quantises_joint: whether the host's own class of the architecture quantises the projection
            of embedding and hidden state. Other classes never quantise it.

    Attributes:
        host: the host's name.
        instead: what makes the host run its own draft class, for errors.
    """

    host: ClassVar[str]
    instead: ClassVar[str]

    def __init__(self, ranks: int, quant_config: Any, quantises_joint: bool):
        self.ranks, self.quant_config = ranks, quant_config
        self._quantises_joint = quantises_joint

    def linear(self, site: LinearSite) -> nn.Module:
        """Make the host's linear layer, by the checkpoint's name, as in quantisation configs."""
        is_plain = site.is_joint and not self._quantises_joint
        return self.make_linear(
            site,
            dict(
                input_size=site.in_features,
                output_size=site.out_features,
                bias=site.has_bias,
                quant_config=None if is_plain else self.quant_config,
                prefix=site.name,
            ),
        )

    def experts(self, site: ExpertsSite) -> nn.Module:
        """Make the host's fused experts; the draft's graph chooses among them.

        Raises:
            UnsupportedModelError: experts without a gate.
        """
        if not site.projections[0]:
            raise UnsupportedModelError(
                f"{site.name} are experts without a gate, which mtpc does not support in "
                f"{self.host}; {self.instead}"
            )
        return self.make_experts(site)

    def load(self, module: nn.Module, name: str, tensor: Tensor) -> set[str]:
        """See `HostLayers.load`."""
        try:
            return self.load_tensor(module, name, tensor)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{self.inner(module).extra_repr()}: {self.host} does not load {name} "
                f"{tuple(tensor.shape)} of {tensor.dtype}: {error}; download the checkpoint again, "
                "or correct its quantization_config"
            ) from error

    def parameters(self, module: nn.Module) -> set[str]:
        """See `HostLayers.parameters`. `g_idx` may be absent; the host then computes it."""
        names = (name for name, _ in self.inner(module).named_parameters())
        return {name for name in names if "g_idx" not in name}

    @abstractmethod
    def make_linear(self, site: LinearSite, options: dict[str, Any]) -> nn.Module:
        """Make the host's linear layer, with these arguments of all the host's classes."""

    @abstractmethod
    def make_experts(self, site: ExpertsSite) -> nn.Module:
        """Make the host's experts, which have a gate."""

    @abstractmethod
    def load_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> set[str]:
        """Load a tensor by the host's loader. Raises what the loader raises, or LookupError."""

    @abstractmethod
    def inner(self, module: nn.Module) -> nn.Module:
        """The host's own module within what `make_linear` or `make_experts` returned."""
