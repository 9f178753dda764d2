"""Model families, and loading: from a checkpoint or a transformers model to a `LoadedModel`.

`FAMILIES` are those that need words for their MTP layers, modules or names, which transformers
lacks; `mtpc.models.derived` has all others. It opens every file of `families/`, and a checkpoint
only its own: `mtpc.models.families.serving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtpc.models.families import every_family
from mtpc.models.family import ModelFamily

if TYPE_CHECKING:
    FAMILIES: tuple[ModelFamily, ...]

__all__ = ["FAMILIES", "ModelFamily"]


def __getattr__(name: str) -> Any:
    if name != "FAMILIES":
        raise AttributeError(f"module 'mtpc.models' has no attribute {name!r}")
    return every_family()
