"""MTP layers by derivation: those that transformers' `MtpModel` builds for any causal LM.

A class needs no words for them. `get_mtp_config` says of which kinds the layers are, `MtpModel` how
they are wired and what they attend to, and transformers' conversions how released checkpoints name
them: as decoder layers after the last one (GLM-4.5, DeepSeek-V3, Sarvam), or below `mtp.` (Mellum).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from mtpc.errors import UnsupportedModelError
from mtpc.models.families.nextn import GLM4_MOE
from mtpc.models.families.qwen3_next import QWEN3_NEXT
from mtpc.models.family import ModelFamily, nextn_layers
from mtpc.models.hf import StepParts
from mtpc.models.observe import Kept, ObservedCaches, Observer, observe, redirect, rows

_COUNT = "num_mtp_layers"
"""transformers' name of the number of MTP layers."""
_COMMON_NORM = "chain_norm"
"""Released name of a final norm that all MTP layers share."""
_OF_LOGITS = ("logits_mup_width_multiplier", "unpadded_vocab_size")
_WITHOUT = "use spec_tokens=0 to decode without drafts"


def with_mtp_layers(family: ModelFamily, kind: Any, entries: Mapping[str, Any]) -> ModelFamily:
    """A derived family with the MTP layers of its config; the family itself if that counts none."""
    if not (entries.get(_COUNT) or entries.get("num_nextn_predict_layers")):
        return family
    ignored = kind._keys_to_ignore_on_load_unexpected or ()
    is_below = any(re.search(pattern, "mtp.fc.weight") for pattern in ignored)
    released, root = (QWEN3_NEXT, "mtp.") if is_below else (GLM4_MOE, "model.mtp.")
    norm = released.wiring.final_norm
    if "chain_hidden_post_norm" in entries:
        norm = _COMMON_NORM if entries["chain_hidden_post_norm"] else None
    common = {f"{_COMMON_NORM}.weight": f"{root}{_COMMON_NORM}.weight"}
    observed = ObservedCaches(partial(_observe, kind))
    # What transformers renames in the layers.
    found = get_checkpoint_conversion_mapping(family.name) or ()
    renamed = [each for each in found if isinstance(each, WeightRenaming)]
    pairs = [(each.source_patterns[0], each.target_patterns[0]) for each in renamed]
    plain = [(a.replace(r"\.", ".").lstrip("."), b.lstrip(".")) for a, b in pairs]
    return replace(
        family,
        wiring=replace(
            released.wiring,
            hidden_first=bool(entries.get("mtp_hidden_states_first")),
            first_features="before" if entries.get("tie_last_hidden_states") is False else "after",
            final_norm=norm,
            head="target",
            embedding="target",
        ),
        num_mtp_layers=_count,
        layer_prefix=released.layer_prefix,
        block_prefix=released.block_prefix,
        shared_tensors=GLM4_MOE.shared_tensors,
        common_tensors=common if norm == _COMMON_NORM else {},
        make_block=_make_block,
        rotary_type=_rotary_type,
        stored_names=tuple(pair for pair in plain if re.fullmatch(r"[\w. ]+", " ".join(pair))),
        cache_specs=lambda config, layer, dtype: (
            family.cache_specs if layer < config.num_hidden_layers else observed
        )(config, layer, dtype),
        parts=_parts(entries),
    )


def _count(config: Any) -> int:
    """Number of MTP layers, by transformers' name or by that of released configs."""
    told = getattr(config, _COUNT, None)
    return nextn_layers(config) if told is None else int(told)


def _counted(config: Any) -> Any:
    counted = copy.deepcopy(config)
    setattr(counted, _COUNT, _count(config))
    return counted


def _mtp_config(config: Any) -> Any:
    """transformers' config of the MTP layers, whose numbers begin at 0. Raises
    UnsupportedModelError: transformers cannot tell of which kinds the layers are."""
    try:
        return _counted(config).get_mtp_config()
    except ValueError as error:
        raise UnsupportedModelError(
            f"config.json does not say of which kinds its MTP layers are ({error}); {_WITHOUT}"
        ) from error


def _make_block(kind: Any, config: Any, number: int) -> nn.Module:
    """The decoder block of an MTP layer, as `MtpModel` makes it."""
    block: nn.Module = kind(_mtp_config(config), number - config.num_hidden_layers)
    _renumber(block, number)
    return block


def _renumber(block: nn.Module, number: int) -> None:
    """Give a block the number by which mtpc knows its layer's state."""
    for module in block.modules():
        if "layer_idx" in vars(module):
            vars(module)["layer_idx"] = number


def _rotary_type(config: Any, index: int) -> str | None:
    """The layer type whose angles an MTP layer has; None where all types have the same."""
    made = _mtp_config(config)
    kinds: Any = getattr(made, "layer_types", None) or ()
    angles = getattr(made, "rope_parameters", None) or {}
    return str(kinds[index]) if any(kind in angles for kind in kinds) else None


def _observe(kind: Any, config: Any) -> Mapping[int, Kept]:
    """What MTP layers keep, by their numbers after the decoder's layers."""
    try:
        return observe(kind, _counted(config), _run_layers)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"its MTP layers cannot draft: {error}; {_WITHOUT}") from error


def _run_layers(model: Any, observer: Observer) -> None:
    """Run the MTP layers of a model, whose cache is `observer`."""
    config = model.config.get_text_config(decoder=True)
    with torch.device("meta"):
        layers = MtpModel(model, config.num_mtp_layers).to(model.dtype).eval()
    redirect(layers)
    ids, positions = rows()
    hidden = torch.empty((*ids.shape, config.hidden_size), dtype=model.dtype, device="meta")
    for index, layer in enumerate(layers.layers):
        _renumber(layer, config.num_hidden_layers + index)
        given = {"input_ids": ids, "mtpc_context": observer}
        hidden = layers.forward_layer(index, hidden, positions, observer, **given)


class _MtpHead(nn.Module):
    """Logits as `MtpModel` makes them: of divided features, and -inf where the vocabulary is
    padded."""

    def __init__(self, head: nn.Linear, divisor: float, size: int):
        super().__init__()
        self.head, self.divisor, self.size = head, divisor, min(size, head.out_features)
        self.is_padded = self.size < head.out_features

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features / self.divisor)
        if not self.is_padded:
            return logits
        padding = torch.full_like(logits[..., self.size :], float("-inf"))
        return torch.cat([logits[..., : self.size], padding], -1)


def _parts(entries: Mapping[str, Any]) -> StepParts | None:
    """How drafts are read with a muP multiplier or a padded vocabulary; None: as usual. Raises
    UnsupportedModelError: an entry is no such number."""
    found = {name: entries[name] for name in _OF_LOGITS if entries.get(name) is not None}
    if not found:
        return None
    for name, value in found.items():
        if type(value) not in (int, float) or value <= 0:
            raise UnsupportedModelError(f"{name} is {value!r}; expected a number above 0")
    divisor, size = (found.get(name) for name in _OF_LOGITS)

    def draft_head(model: Any, layer: Any) -> nn.Module:
        head = model.get_output_embeddings()
        return _MtpHead(head, divisor or 1.0, int(size or head.out_features))

    return StepParts(draft_head=draft_head)
