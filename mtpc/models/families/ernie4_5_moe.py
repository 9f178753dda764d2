"""ERNIE 4.5: grouped-query attention, mixture of experts, and a dense MTP layer.

The MTP layer stores no final norm: the target's is applied after its block. transformers drops the
layer, whose tensors are named `model.mtp_*.0`. Experts end at `moe_layer_end_index`, at most the
target's last layer, so the MTP block is dense.

Source: the authors' FastDeploy (ernie4_5_mtp.py): the embedding first in the concatenation, the
target's norm after the block, whose output goes to the head and to the next draft. vLLM's
ernie_mtp.py reads the same names and leaves the norm out.
"""

from __future__ import annotations

from mtpc.models.family import ModelFamily, MTPWiring

ERNIE4_5_MOE = ModelFamily(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    wiring=MTPWiring(
        embedding_norm="emb_norm.0",
        hidden_norm="hidden_norm.0",
        projection="linear_proj.0",
        final_norm="",
    ),
    layer_prefix=lambda num_hidden_layers, i: "model.mtp_",
    block_prefix="block.0.",
    stored_names=(("mlp.moe_statics.", "mlp.gate.moe_statics."),),
)
