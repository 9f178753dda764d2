"""One file a family: its architectures, MTP wiring, state, and names in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module

from mtpc.models.family import ModelFamily

MODULES: Mapping[str, tuple[str, ...]] = {
    "mimo": ("MiMoForCausalLM",),
    "nextn": (
        "Glm4MoeForCausalLM",
        "Glm4vMoeForConditionalGeneration",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM",),
    "deepseek_v32": ("DeepseekV32ForCausalLM",),
    "deepseek_v4": ("DeepseekV4ForCausalLM",),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    "step3p7": ("Step3p7ForConditionalGeneration", "Step3p5ForCausalLM"),
    "mimo_v2": ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM",),
    "exaone_moe": ("ExaoneMoeForCausalLM",),
    "nemotron_h": ("NemotronHForCausalLM",),
    "longcat_flash": ("LongcatFlashForCausalLM",),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
}
"""The modules of this package, and the architectures that the families of each serve.

A module is imported when one of its architectures is asked for. A test compares both.
"""


def serving(architectures: Collection[str]) -> ModelFamily | None:
    """The family that serves one of these architectures; None: `mtpc.models.derived` may."""
    served = (
        family
        for name, known in MODULES.items()
        if not set(known).isdisjoint(architectures)
        for family in _families(name)
        if not set(family.architectures).isdisjoint(architectures)
    )
    return next(served, None)


def every_family() -> tuple[ModelFamily, ...]:
    return tuple(family for name in MODULES for family in _families(name))


def _families(name: str) -> list[ModelFamily]:
    """The families of a module, but for those that it imports."""
    values = vars(import_module(f"{__name__}.{name}")).values()
    families = (value for value in values if isinstance(value, ModelFamily))
    return [each for each in families if set(each.architectures) <= set(MODULES[name])]
