"""MTP layers by their released names: a page of plain code a family, and nothing of mtpc's.

A page reads the tensors of a checkpoint itself, and writes out how the family's authors wire an MTP
layer. Only the decoder layer is transformers' own. Tests compare mtpc's features, logits and drafts
with these.
"""

from __future__ import annotations

from collections.abc import Mapping

from helpers.released.base import ReleasedMTP
from helpers.released.deepseek_v4 import DeepseekV4
from helpers.released.eagle3 import Eagle3
from helpers.released.ernie import Ernie
from helpers.released.gemma4 import Gemma4Assistant
from helpers.released.longcat import Longcat
from helpers.released.mimo import Mimo
from helpers.released.mimo_v2 import MimoV2
from helpers.released.nemotron import Nemotron
from helpers.released.nextn import Glm4v, GlmDsa, NextN
from helpers.released.qwen import Exaone, Qwen
from helpers.released.qwen4 import Qwen4
from helpers.released.step import Step

PAGES: Mapping[str, type[ReleasedMTP | Eagle3 | Gemma4Assistant]] = {
    "mimo": Mimo,
    "glm4_moe": NextN,
    "deepseek_v3": NextN,
    "deepseek_v32": NextN,
    "glm4_moe_lite": NextN,
    "glm4v_moe": Glm4v,
    "glm_moe_dsa": GlmDsa,
    "ernie4_5_moe": Ernie,
    "exaone_moe": Exaone,
    "nemotron_h": Nemotron,
    "longcat_flash": Longcat,
    "qwen3_next": Qwen,
    "qwen3_5": Qwen,
    "qwen3_5_moe": Qwen,
    "qwen4_exp": Qwen4,
    "mimo_v2": MimoV2,
    "step3p5": Step,
    "step3p7": Step,
    "deepseek_v4": DeepseekV4,
    "gemma4": Gemma4Assistant,
    "gemma4_unified": Gemma4Assistant,
    "llama": Eagle3,
    "qwen2": Eagle3,
    "qwen3": Eagle3,
}

__all__ = ["PAGES", "ReleasedMTP"]
