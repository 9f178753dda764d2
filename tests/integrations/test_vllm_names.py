"""vLLM's names of MTP draft architectures: which ones mtpc replaces, and why not the others.

The names are data of vLLM 0.32: those with "MTP" in `_SPECULATIVE_DECODING_MODELS` of
model_executor/models/registry.py, with the targets for which config/speculative.py chooses them.
"""

from __future__ import annotations

import pytest
from helpers import tiny
from helpers.places import ROOT

from mtpc.errors import UnsupportedModelError
from mtpc.integrations.draft_config import draft_config
from mtpc.integrations.vllm.rules import HOST_RULES
from mtpc.models import FAMILIES
from mtpc.models.load import find_family

VLLM = {
    "MiMoMTPModel": ("MiMoForCausalLM",),
    "MiMoV2MTPModel": ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
    "MiMoV2OmniMTPModel": ("MiMoV2OmniForCausalLM",),
    "DeepSeekMTPModel": ("DeepseekV3ForCausalLM",),
    "DeepseekV32MTPModel": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    "DeepSeekV4MTPModel": ("DeepseekV4ForCausalLM",),
    "Gemma4MTPModel": ("Gemma4ForConditionalGeneration",),
    "ErnieMTPModel": ("Ernie4_5_MoeForCausalLM",),
    "ExaoneMoeMTP": ("ExaoneMoeForCausalLM",),
    "NemotronHMTPModel": ("NemotronHForCausalLM",),
    "LongCatFlashMTPModel": ("LongcatFlashForCausalLM",),
    "Glm4MoeMTPModel": ("Glm4MoeForCausalLM",),
    "Glm4MoeLiteMTPModel": ("Glm4MoeLiteForCausalLM",),
    "Qwen3NextMTP": ("Qwen3NextForCausalLM",),
    "Qwen4ExpMTP": ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    "Step3p5MTP": ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    "Qwen3_5MTP": ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeMTP": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
}
"""Those of models that have a family here, but for MiMoV2Omni. The registry has these, too, of
models without one: BailingMoeV25MTPModel, BailingMoeV3MTPModel, Dots3NoteMTPModel, Exaone4_5_MTP,
Glm5NextMTPModel, GlmOcrMTPModel, HYV3MTPModel, HYV4MTPModel, InklingMTPModel, InternS2MobiusMTP,
KimiK3MTPModel, MiniMaxM3MTP, OpenPanguMTPModel; and EagleDeepSeekMTPModel, an EAGLE head."""
STATE, NORM = "state of its own", "no final norm of its own"
SINKS, ASSISTANT, UNTRIED, IMAGES = "sinks", "an assistant", "untried", "images"
LEFT = {
    **dict.fromkeys(("DeepseekV32MTPModel", "Qwen4ExpMTP"), STATE),
    "ErnieMTPModel": NORM,
    **dict.fromkeys(("DeepSeekV4MTPModel", "MiMoV2MTPModel"), SINKS),
    "Gemma4MTPModel": ASSISTANT,
    **dict.fromkeys(("NemotronHMTPModel", "LongCatFlashMTPModel", "Step3p5MTP"), UNTRIED),
    **dict.fromkeys(("Qwen3_5MTP", "Qwen3_5MoeMTP"), IMAGES),
}
"""vLLM's own class runs, and why; docs/embedding-vllm.md says the same."""


def test_each_name_of_a_family_is_replaced_or_left_for_a_reason() -> None:
    known = {name for family in FAMILIES for name in family.architectures}
    ours = {name for name, targets in VLLM.items() if known & set(targets)}
    assert ours == HOST_RULES.keys() | LEFT.keys()
    assert not HOST_RULES.keys() & LEFT.keys()
    for name, rules in HOST_RULES.items():
        assert rules.architecture in VLLM[name]
        assert rules.architecture in known


@pytest.mark.parametrize("name", [name for name in VLLM if name != "MiMoV2OmniMTPModel"])
def test_what_is_refused_is_left(name: str) -> None:
    """A traced draft takes the config of each name but for those that the reason excludes."""
    for architecture in VLLM[name]:
        if LEFT.get(name) == ASSISTANT:
            continue
        entries = tiny.CONFIGS[find_family([architecture]).name]
        if LEFT.get(name) == STATE:
            with pytest.raises(UnsupportedModelError, match="hold state of their own kind"):
                draft_config(entries, architecture)
            continue
        family, _ = draft_config(entries, architecture)
        assert bool(family.wiring.final_norm) == (LEFT.get(name) != NORM)


def test_the_page_says_so() -> None:
    page = (ROOT / "docs" / "embedding-vllm.md").read_text()
    for name in (*HOST_RULES, *LEFT):
        assert f"`{name}`" in page, name
