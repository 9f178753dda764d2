"""Step-3.5-Flash: the text model of Step-3.7 by itself.

transformers (5.17 to 5.24) has the text model and its config (`Step3p7TextModel`, model type
"step3p5"), but a causal language model only inside Step-3.7's multimodal one. The class here adds
the head to the text model, under the names of the released checkpoints.

Source: entries of the released config and tensor names, as vLLM's step3p5 reads them. Everything
else is the same as in Step-3.7.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from mtpc.models.families.step3p7 import STEP3P7

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
