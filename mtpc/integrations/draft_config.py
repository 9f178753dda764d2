"""Finds the family and the config of a draft from a host's config or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from mtpc.errors import CheckpointError, UnsupportedModelError
from mtpc.models import ModelFamily
from mtpc.models.hf import HostedLayer, run_mtp_layer
from mtpc.models.load import find_family
from mtpc.models.read_config import config_class

_DROPPED = (
    *("model_type", "quantization_config", "transformers_version", "_name_or_path"),
    "architectures",
)
"""Entries of config.json that describe the checkpoint, not the model."""
_PLAIN = HostedLayer(
    width=lambda config: config.hidden_size,
    run=lambda *given: run_mtp_layer(*given)[0],
    readout=lambda layer: layer.final_norm,
)
"""An MTP layer around a block of transformers, with one residual stream."""


def draft_config(
    source: Any, architecture: str | None = None, host_loads: bool = False
) -> tuple[ModelFamily, Any]:
    """Find a model's family, and make a new config of transformers' own class.

    Args:
        source: a transformers config (whose class a host may have changed), a dict with its
            entries, or a checkpoint: a directory, or a name in the local hub cache.
        architecture: the target's architecture, as in `architectures` of config.json. It is needed
            if `source` has the name of a host's draft class there.
        host_loads: whether the host loads linear layers and experts. Then they may be quantised.

    Returns:
        The family and the config, which nothing else refers to.

    Raises:
        CheckpointError: the checkpoint has no config.json.
        UnsupportedModelError: the architecture is unknown; its MTP layers keep state that a host's
            attention cannot hold; or the checkpoint is quantised, and the draft loads its weights.
    """
    fields = _entries(source)
    names = [architecture] if architecture else list(fields.get("architectures") or [])
    family = find_family(names, fields.get("text_config") or fields)
    quantised = fields.get("quantization_config") or fields.get("compression_config")
    if quantised and not host_loads:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({method}); a traced draft holds unquantised "
            "weights: use an unquantised checkpoint, or the host's own draft"
        )
    kind = config_class(family)
    # Another class, as a host may have it, adds defaults under names that are aliases in this one.
    twice = {alias for alias, name in kind.attribute_map.items() if name in fields}
    fields = {name: value for name, value in fields.items() if name not in twice}
    if "text_config" not in getattr(kind, "sub_configs", {}):
        fields = dict(fields.get("text_config") or fields)
    config = kind(**{k: v for k, v in fields.items() if k not in _DROPPED})
    _check_state(family, config.get_text_config(decoder=True))
    return family, config


def hosted_layer(family: ModelFamily) -> HostedLayer | None:
    """How the family's MTP layer runs over a host's attention; None: it cannot."""
    return _PLAIN if family.parts is None else family.parts.hosted


def _check_state(family: ModelFamily, config: Any) -> None:
    """Refuse MTP layers with state other than K and V, a latent or a window in a host's cache."""
    specs = family.cache_specs(config, config.num_hidden_layers, torch.bfloat16)
    roles = {spec.name.rpartition(".")[2].removeprefix("ring_") for spec in specs}
    if hosted_layer(family) is None or not roles <= {"k", "v", "latent", "window"}:
        kinds = ", ".join(sorted(roles))
        raise UnsupportedModelError(
            f"{family.name}: its MTP layers hold state of their own kind ({kinds}); a traced "
            "draft can use only the host's attention over K and V, a latent or a window: use the "
            "host's own draft"
        )


def _entries(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, Path)):
        entries, _ = transformers.PreTrainedConfig.get_config_dict(source, local_files_only=True)
        if not entries:
            raise CheckpointError(
                f"{str(source)!r} has no config.json; expected a checkpoint directory, or a name "
                "in the local hub cache"
            )
        return entries
    return dict(source.to_dict())
