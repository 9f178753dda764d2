"""Draft architectures of SGLang that mtpc's traced drafts stand in for, under the host's names."""

from __future__ import annotations

from typing import Any

from mtpc.integrations.sglang.draft import HostedDraft


class MiMoMTP(HostedDraft):
    """MiMo's."""

    target = "MiMoForCausalLM"


class Glm4MoeForCausalLMNextN(HostedDraft):
    """GLM-4.5's to 4.7's."""

    target = "Glm4MoeForCausalLM"


class DeepseekV3ForCausalLMNextN(HostedDraft):
    """DeepSeek-V3's and R1's; V3.2's attention index is refused."""

    target = "DeepseekV3ForCausalLM"


class Qwen3NextForCausalLMMTP(HostedDraft):
    """Qwen3-Next's, whose MTP layer is one of full attention."""

    target = "Qwen3NextForCausalLM"


class Qwen3_5ForCausalLMMTP(HostedDraft):
    """Qwen3.5's, dense or with experts: the host has one name for both."""

    @classmethod
    def target_architecture(cls, config: Any) -> str:
        """By the config's model type."""
        text = getattr(config, "text_config", config)
        return "Qwen3_5MoeForCausalLM" if "moe" in text.model_type else "Qwen3_5ForCausalLM"


EntryClass = [
    MiMoMTP,
    Glm4MoeForCausalLMNextN,
    DeepseekV3ForCausalLMNextN,
    Qwen3NextForCausalLMMTP,
    Qwen3_5ForCausalLMMTP,
]
