"""Model families, and how a checkpoint or an HF model becomes something to step."""

from mtpc.models.deepseek_v3 import DEEPSEEK_V3
from mtpc.models.deepseek_v4 import DEEPSEEK_V4
from mtpc.models.family import ModelFamily
from mtpc.models.glm4_moe import GLM4_MOE
from mtpc.models.mimo import MIMO

FAMILIES: tuple[ModelFamily, ...] = (MIMO, GLM4_MOE, DEEPSEEK_V3, DEEPSEEK_V4)
"""The family table: a new model is one file and one row here."""

__all__ = ["FAMILIES", "ModelFamily"]
