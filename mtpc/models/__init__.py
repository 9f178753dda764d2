"""Model families, and loading: from a checkpoint or a transformers model to a `LoadedModel`."""

from mtpc.models.families.deepseek_v4 import DEEPSEEK_V4
from mtpc.models.families.deepseek_v32 import DEEPSEEK_V32
from mtpc.models.families.ernie4_5_moe import ERNIE4_5_MOE
from mtpc.models.families.exaone_moe import EXAONE_MOE
from mtpc.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from mtpc.models.families.glm_moe_dsa import GLM_MOE_DSA
from mtpc.models.families.longcat_flash import LONGCAT_FLASH
from mtpc.models.families.mimo import MIMO
from mtpc.models.families.mimo_v2 import MIMO_V2
from mtpc.models.families.nemotron_h import NEMOTRON_H
from mtpc.models.families.nextn import DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE, GLM4V_MOE
from mtpc.models.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mtpc.models.families.qwen4_exp import QWEN4_EXP
from mtpc.models.families.step3p7 import STEP3P5, STEP3P7
from mtpc.models.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (
    MIMO,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM4V_MOE,
    GLM_MOE_DSA,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN4_EXP,
    STEP3P5,
    STEP3P7,
    MIMO_V2,
    ERNIE4_5_MOE,
    EXAONE_MOE,
    NEMOTRON_H,
    LONGCAT_FLASH,
    GEMMA4,
    GEMMA4_UNIFIED,
)
"""Families that need words for their MTP layers, modules or names, which transformers lacks.

One file in `families/` and one row here each; `mtpc.models.derived` has all others.
"""

__all__ = ["FAMILIES", "ModelFamily"]
