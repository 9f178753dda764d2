"""Step-3.7-Flash: gated attention, sliding-window layers, three MTP layers with true chaining.

Each attention type has its own rotary embedding and number of query heads. Norms multiply by
1 + weight. Some layers clamp their SwiGLU. The text model is part of a multimodal model, whose
vision tower is loaded with it, and runs outside of the steps.

Each MTP layer has an output head of its own. The target's hidden state from before its final norm
is fed to MTP layer 0, and what layer i gives before its own final norm to layer i + 1, in every
row. The embedding comes first in the concatenation.

Step-3.5-Flash is the text model by itself. transformers (5.17 to 5.24) has it and its config
(`Step3p7TextModel`, model type "step3p5"), but a causal language model only inside Step-3.7's
multimodal one. The class here adds the head, under the names of the released checkpoints. Of its
config and tensor names the source is vLLM's step3p5.

Source: transformers' Step3p7 for the target; for MTP layers the authors' own vLLM
(github.com/stepfun-ai/vllm, step3p5_mtp.py and multi_layer_eagle.py) and the released tensor names.
transformers' MtpModel differs in four points: it feeds features after both norms, it uses the
target's head, it forgets that sliding MTP layers have the number of heads of sliding layers
(`attention_other_setting`), and it gives MTP layer i the SwiGLU limit of decoder layer i.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mtpc.errors import UnsupportedModelError
from mtpc.layout import BufferSpec
from mtpc.models.caches import kv_specs
from mtpc.models.families.nextn import NEXTN_WIRING
from mtpc.models.family import ModelFamily, VisionParts, nextn_layers
from mtpc.models.seams import StandIn
from mtpc.ops.experts import experts

_SLIDING = "sliding_attention"


class ClampedExperts(StandIn):
    """SwiGLU experts with clamped gate and up projections, as `mtpc::experts`.

    transformers' experts interface does not reach them.
    """

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, H], expert_ids int64 [T, k], expert_weights [T, k]; returns [T, H]."""
        limit = [float(self.limit)] if 0 < self.limit < math.inf else []
        weights = (self.gate_up_proj, self.down_proj)
        return experts(x, *weights, expert_ids, expert_weights, *limit)


def _of_mtp_layers(config: Any, name: str) -> list[str]:
    """What a list of the config holds for the MTP layers, after its entries for the decoder's."""
    values, count = getattr(config, f"mtp_{name}"), nextn_layers(config)
    if values is None or len(values) != count:
        raise UnsupportedModelError(
            f"the config announces {count} MTP layers and has {values} in `mtp_{name}` for them; "
            f"expected one entry per MTP layer there, or in `{name}` after the decoder layers'"
        )
    return values


def _attention_type(config: Any, mtp_layer: int) -> str:
    return _of_mtp_layers(config, "layer_types")[mtp_layer]


def _block_config(config: Any) -> Any:
    """A copy of the config with the MTP layers after the decoder's."""
    extended, count = copy.deepcopy(config), nextn_layers(config)
    extended.num_hidden_layers += count
    for name in ("layer_types", "mlp_layer_types"):
        setattr(extended, name, [*getattr(config, name), *_of_mtp_layers(config, name)])
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        limits = getattr(config, name)
        if limits:
            setattr(extended, name, [*limits, *([0.0] * count)])
    extended.per_layer_config = {
        layer: {"num_attention_heads": config.num_sliding_attention_heads}
        for layer, kind in enumerate(extended.layer_types)
        if kind == _SLIDING
    }
    return extended


def _cache_specs(config: Any, layer: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    mtp_layer = layer - config.num_hidden_layers
    kind = config.layer_types[layer] if mtp_layer < 0 else _attention_type(config, mtp_layer)
    window = config.sliding_window if kind == _SLIDING else 0
    return kv_specs(layer, dtype, config.num_key_value_heads, (config.head_dim,) * 2, window)


STEP3P7 = ModelFamily(
    name="step3p7",
    architectures=("Step3p7ForConditionalGeneration",),
    wiring=replace(
        NEXTN_WIRING,
        final_norm="transformer.shared_head.norm",
        first_features="before",
        next_features="before",
    ),
    cache_specs=_cache_specs,
    block_config=_block_config,
    shared_tensors={
        "embed_tokens.weight": "embedding",
        "transformer.shared_head.output.weight": "head",
    },
    canonical={"Step3p7Experts": ClampedExperts},
    rotary_type=_attention_type,
    stored_names=(
        ("moe.gate.weight", "mlp.gate.weight"),
        ("moe.router_bias", "mlp.gate.e_score_correction_bias"),
        ("moe.down_proj.weight", "mlp.experts.down_proj"),
        ("share_expert.", "mlp.shared_experts."),
    ),
    stacked_gate_up=("moe.gate_proj.weight", "moe.up_proj.weight"),
    stored_prefixes=(("model.language_model.", "model."),),
    vision=VisionParts(
        "Step3p7Model",
        "crops",
        {
            "vision_model": ("vision_model.", "model.vision_model."),
            "multi_modal_projector": ("vit_large_projector.", "model.multi_modal_projector."),
        },
    ),
)

CLASS_NAME = "Step3p5ForCausalLM"


@cache
def step3p5_class() -> type[nn.Module]:
    """The causal language model. The first call makes it, as importing its bases takes long."""
    from transformers import GenerationMixin
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.step3p7 import modeling_step3p7 as hf

    from mtpc.models.seams import CACHE

    class Step3p5ForCausalLM(hf.Step3p7PreTrainedModel, GenerationMixin):
        """`Step3p7TextModel` with a head that is not tied to the embedding."""

        config_class = hf.Step3p7TextConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = hf.Step3p7TextModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Tensor | None = None, **options: Any) -> Any:
            """Token ids [B, L] -> logits [B, L, V], as in transformers' causal language models."""
            out = self.model(input_ids=input_ids, **options)
            logits = self.lm_head(out.last_hidden_state)
            return CausalLMOutputWithPast(logits=logits, **{CACHE: out[CACHE]})

    # Step-3.7's conversion of stored names, without the rules that nest the text model.
    known = get_checkpoint_conversion_mapping("step3p7")
    inner = [t for t in known if any("moe" in p or "share" in p for p in t.source_patterns)]
    register_checkpoint_conversion_mapping(CLASS_NAME, inner, overwrite=True)
    return Step3p5ForCausalLM


STEP3P5 = replace(
    STEP3P7,
    name="step3p5",
    architectures=(CLASS_NAME,),
    own_class=step3p5_class,
    stored_prefixes=(),
    vision=None,
)
