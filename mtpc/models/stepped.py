"""A loaded model over the state of a step: the modules that are traced."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mtpc.layout import CHAIN_EMBEDS, PROMPT_EMBEDS
from mtpc.models.caches import CachePool
from mtpc.models.hf import HandingDraft, LaterDraft, TextRotary, rotary_of
from mtpc.models.load import LoadedModel
from mtpc.step.drafting import Drafting


class SteppedModel:
    """A `LoadedModel` over given state tensors, as a `mtpc.step.model.StepModel`. Their names are
    `kv.<layer>.<role>`, and those of `image_specs`; `num_slots` counts the scratch slot."""

    def __init__(self, loaded: LoadedModel, pools: Mapping[str, Tensor], num_slots: int):
        family, target, config = loaded.family, loaded.target, loaded.config
        parts, decoder, pool = loaded.parts, target.get_decoder(), _pool(loaded, pools, num_slots)
        self.target: nn.Module = parts.target(decoder, pool, family.wiring)
        self.target_head: nn.Module = parts.target_head(target, family.wiring)
        rotaries = [
            TextRotary(rotary_of(decoder), family.position_grids, family.rotary_type(config, i))
            for i in range(len(loaded.mtp_layers))
        ]
        given = [
            (decoder, rotary, layer, pool)
            for rotary, layer in zip(rotaries, loaded.mtp_layers, strict=True)
        ]
        hands_on = bool(given) and family.hands_on(config)
        make, later = (HandingDraft, LaterDraft) if hands_on else (parts.draft, parts.later_draft)
        self.drafts = nn.ModuleList(make(*each) for each in given)
        self.later_draft: nn.Module | None = later(*given[-1]) if later and given else None
        self.draft_heads = nn.ModuleList(
            parts.draft_head(target, layer) for layer in loaded.mtp_layers
        )
        first = next(iter(loaded.mtp_layers), None)
        self.draft_entry = parts.draft_entry(first) if parts.draft_entry else None
        vocabulary = parts.draft_vocabulary(first) if first is not None else None
        self.draft_bias = parts.draft_bias(first) if first is not None else None
        self.draft_tokens = vocabulary.tokens if vocabulary else None
        self.draft_logits = vocabulary.logits if vocabulary else None
        says = (len(given), self.draft_entry is not None, vocabulary is not None, hands_on)
        self.drafting: Drafting = parts.drafting(*says) if given else Drafting(*says)
        if len(given) > 1:
            from mtpc.step.chaining import TrueChaining  # Not above: few models have more layers.

            fed = family.wiring.chaining == "target"
            self.drafting = TrueChaining(*says, feeds_target=fed, has_images=CHAIN_EMBEDS in pools)
        self.vocab_size = loaded.vocab_size


def _pool(loaded: LoadedModel, pools: Mapping[str, Tensor], num_slots: int) -> CachePool:
    """The state of all layers."""
    layers = {name: tensor for name, tensor in pools.items() if name.startswith("kv.")}
    images, shifts = None, None
    if PROMPT_EMBEDS in pools:
        from mtpc.models.image_inputs import image_inputs  # Not above: few models take images.

        images = image_inputs(pools, loaded.vocab_size)
    if loaded.kv_cache_dtype and loaded.shifts_keys:
        from mtpc.models.key_shifts import KeyShifts  # Not above: few caches hold codes.

        shifts = KeyShifts(loaded.target.get_decoder())
    return CachePool(layers, num_slots, loaded.family.cache_kinds, images, shifts)
