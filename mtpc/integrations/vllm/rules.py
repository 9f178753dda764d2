"""The draft architectures of vLLM that mtpc replaces, and how vLLM's own classes work.

vLLM imports this module in each of its processes, so it imports little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OWN_DRAFT = "leave mtpc out of VLLM_PLUGINS to run vLLM's own draft class"


@dataclass(frozen=True)
class HostRules:
    """How vLLM's own draft class of an architecture works. These rules change only drafts.

    Attributes:
        architecture: the target's architecture.
        zero_first_embedding: whether the class zeroes the embedding at position 0.
        recycles_unnormed: whether the class feeds the hidden state before the final norm to the
            next draft step.
        returns_pair: whether vLLM's proposer expects a pair from `forward`: the head's input, and
            the hidden state for the next draft step.
        quantises_joint: see `ParallelLayers`.
    """

    architecture: str
    zero_first_embedding: bool
    recycles_unnormed: bool = False
    returns_pair: bool = False
    quantises_joint: bool = False


HOST_RULES: Mapping[str, HostRules] = {
    "MiMoMTPModel": HostRules("MiMoForCausalLM", True),
    "Glm4MoeMTPModel": HostRules("Glm4MoeForCausalLM", True, recycles_unnormed=True),
    "Glm4MoeLiteMTPModel": HostRules("Glm4MoeLiteForCausalLM", True, recycles_unnormed=True),
    "ExaoneMoeMTP": HostRules("ExaoneMoeForCausalLM", False),
    "DeepSeekMTPModel": HostRules("DeepseekV3ForCausalLM", True, returns_pair=True),
    "Qwen3NextMTP": HostRules("Qwen3NextForCausalLM", False, quantises_joint=True),
}
"""By vLLM's names of draft architectures."""
