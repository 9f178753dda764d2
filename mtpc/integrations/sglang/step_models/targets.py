"""Target architectures whose weights and steps are mtpc's, under SGLang's names.

With `--speculative-algorithm MTPC_STEP`, SGLang's worker runs no forward of the target: the whole
iteration is one step of mtpc. So SGLang's model object holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.sglang.algorithm import STEP_NAME
from mtpc.models.families import MODULES


class HostedTarget(nn.Module):
    """SGLang's model object of a target that mtpc runs. It has no weights.

    Args:
        config: SGLang's config.
        quant_config: SGLang's quantisation config, which is mtpc's to read from the checkpoint.
        prefix: unused.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        self.config, self.quant_config = config, quant_config
        self._is_loaded = False

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        """Refuse: whatever asks for it would compute without mtpc's steps.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"SGLang ran {type(self).__name__} by itself ({forward_batch.forward_mode}); a target "
            f"of this package is run by --speculative-algorithm {STEP_NAME} alone"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Read nothing: mtpc's steps read the checkpoint themselves.

        Raises:
            UnsupportedModelError: it is asked again, so new weights shall replace the old ones.
        """
        if self._is_loaded:
            raise UnsupportedModelError(
                f"mtpc's steps of {type(self).__name__} keep the weights that they began with; "
                "start SGLang again to change weights"
            )
        self._is_loaded = True


EntryClass = [
    type(name, (HostedTarget,), {"__doc__": f"The target {name}."})
    for names in MODULES.values()
    for name in names
    if name.endswith("ForCausalLM")
]
