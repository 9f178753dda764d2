"""SGLang's draft architectures that mtpc's traced drafts replace, under SGLang's names."""

from __future__ import annotations

from typing import Any

from mtpc.integrations.sglang.draft import HostedDraft


class MiMoMTP(HostedDraft):
    """The draft of MiMo."""

    target = "MiMoForCausalLM"


class Glm4MoeForCausalLMNextN(HostedDraft):
    """The draft of GLM-4.5 to GLM-4.7."""

    target = "Glm4MoeForCausalLM"


class DeepseekV3ForCausalLMNextN(HostedDraft):
    """The draft of DeepSeek-V3 and R1. That of V3.2, with an attention index, is refused."""

    target = "DeepseekV3ForCausalLM"


class DeepseekV4ForCausalLMNextN(HostedDraft):
    """The draft of DeepSeek-V4. SGLang passes residual streams on as flat rows, from the target and
    from draft to draft."""

    target = "DeepseekV4ForCausalLM"
    has_window_alone = True
    # SGLang's own class does so, too, and by the released config they are FP8.
    quantises_joint = True


class Qwen3NextForCausalLMMTP(HostedDraft):
    """The draft of Qwen3-Next, whose MTP layer has full attention."""

    target = "Qwen3NextForCausalLM"


class Qwen3_5ForCausalLMMTP(HostedDraft):
    """The draft of Qwen3.5, dense or with experts. SGLang has one name for both."""

    @classmethod
    def target_architecture(cls, config: Any) -> str:
        """The target's architecture, from the config's model type."""
        text = getattr(config, "text_config", config)
        return "Qwen3_5MoeForCausalLM" if "moe" in text.model_type else "Qwen3_5ForCausalLM"


class Step3p5MTP(HostedDraft):
    """One MTP layer of Step-3.5, or of the text model of Step-3.7.

    SGLang chains the layers (multi-layer EAGLE): each is fed what the one before returned, before
    its final norm. Each has its own head.
    """

    target = "Step3p5ForCausalLM"


EntryClass = HostedDraft.__subclasses__()
