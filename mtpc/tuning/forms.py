"""New drafters in released formats, made of their target: MTP layers of MiMo, or an EAGLE-3 head.

A new drafter is a checkpoint of its own. What it has in common with the target's last layer begins
as a copy of it, so that training starts from the target's own words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpc.errors import UnsupportedModelError
from mtpc.models.draft import with_mimo_layers
from mtpc.models.eagle3 import ARCHITECTURES, LAYER_IDS, authors_layers
from mtpc.models.families.mimo import MIMO
from mtpc.models.family import ModelFamily
from mtpc.models.hf import decoder_layers, rotary_of, target_norm
from mtpc.models.mtp_layers import build_mtp_layer, stored_tensors
from mtpc.tuning.chain import Teacher
from mtpc.weights.checkpoint_files import MTP_COUNT_NAMES
from mtpc.weights.json_file import CONFIG
from mtpc.weights.paired_checkpoint import DRAFT_VOCAB, INVERSE_MAP, TOKEN_MAP
from mtpc.weights.shards import new_directory, write_json

_SPREAD = 0.02
"""Standard deviation of weights that the target has no counterpart of."""
Made = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Form:
    """A format of drafters.

    Attributes:
        layer_ids: number of the target's layers -> those whose inputs the drafter is fed; the
            number itself stands for the final norm.
        make: (teacher, draft vocabulary [V_d]) -> entries of config.json, and tensors.
    """

    layer_ids: Callable[[int], tuple[int, ...]]
    make: Callable[[Teacher, Tensor], Made]


def captured_layers(layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head is fed: the authors', or the last of few."""
    found = authors_layers(layers)
    return found if 2 < found[1] < found[2] else tuple(range(layers + 1))[-3:]


def _mimo(family: ModelFamily) -> ModelFamily:
    """A target's family with MTP layers: its own, or MiMo's where it has none."""
    return family if family.wiring.joints() else with_mimo_layers(family)


def _new_mtp(teacher: Teacher, vocabulary: Tensor) -> Made:
    """An MTP layer that begins as the target's last layer, fed the target's features."""
    family, config = _mimo(teacher.family), teacher.text_config
    decoder = teacher.model.get_decoder()
    if getattr(rotary_of(decoder), "layer_types", None) and family.rotary_type(config, 0) is None:
        raise UnsupportedModelError(
            f"{teacher.family.name} has a rotary embedding for each kind of layer, which no MTP "
            "layer of MiMo's form has; expected --form eagle3"
        )
    layer: Any = build_mtp_layer(family, teacher.model).float()
    layer.block.load_state_dict(decoder_layers(decoder)[-1].state_dict())
    if layer.wiring.final_norm:
        layer.final_norm.load_state_dict(target_norm(decoder).state_dict())
    half = config.hidden_size
    if layer.wiring.projection:
        columns = slice(0, half) if layer.wiring.hidden_first else slice(half, None)
        layer.projection.weight.zero_()
        layer.projection.weight[:, columns] = torch.eye(half)
    prefix = family.layer_prefix(config.num_hidden_layers, 0)
    entries = {
        **json.loads(config.to_json_string(use_diff=False)),
        **family.released_entries,
        "architectures": [family.architectures[0]],
        MTP_COUNT_NAMES[-1]: 1,
    }
    if family.wiring is MIMO.wiring:
        # transformers knows no model_type "mimo", and vLLM reads configs with it.
        entries |= {"architectures": list(MIMO.architectures)}
    return entries, {prefix + name: tensor for name, tensor in stored_tensors(layer, family)}


def _new_eagle3(teacher: Teacher, vocabulary: Tensor) -> Made:
    """A head whose layer begins as the target's last one, where the shapes agree."""
    config, decoder = teacher.text_config, teacher.model.get_decoder()
    layers = captured_layers(teacher.family.num_layers(config))
    entries = _eagle3_config(config, len(vocabulary), layers)
    hidden, inner, size = (entries[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (
        entries[n] * entries["head_dim"] for n in ("num_attention_heads", "num_key_value_heads")
    )
    ids = entries[LAYER_IDS]
    last = decoder_layers(decoder)[-1].state_dict()
    generator = torch.Generator().manual_seed(0)

    def weight(name: str, rows: int, columns: int) -> Tensor:
        """The target's weight in the last columns, and zeros before; or a random one."""
        found = last.get(f"{name}.weight")
        made = torch.zeros(rows, columns)
        if found is None or found.shape[0] != rows or columns not in (found.shape[1], 2 * hidden):
            return made.normal_(std=_SPREAD, generator=generator)
        made[:, columns - found.shape[1] :] = found.float()
        return made

    shapes = {
        **{"self_attn.q_proj": (q, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden)},
        **{"self_attn.v_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, q)},
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
        "mlp.down_proj": (hidden, inner),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    has_row = torch.zeros(size, dtype=torch.bool)
    has_row[vocabulary] = True
    entry = torch.zeros(hidden, len(ids) * hidden)
    entry[:, -hidden:] = torch.eye(hidden)
    return entries, {
        **{f"midlayer.{name}.weight": weight(name, *shape) for name, shape in shapes.items()},
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in norms},
        "fc.weight": entry,
        # What a norm makes of ones is its weight, whatever its class adds to it.
        "norm.weight": target_norm(decoder)(torch.ones(hidden, dtype=teacher.model.dtype)),
        "lm_head.weight": teacher.model.get_output_embeddings().weight[vocabulary],
        TOKEN_MAP: vocabulary - torch.arange(len(vocabulary)),
        INVERSE_MAP: has_row,
    }


def _eagle3_config(config: Any, rows: int, layers: tuple[int, ...]) -> dict[str, Any]:
    heads = config.num_attention_heads
    angles = getattr(config, "rope_parameters", None) or {}
    theta = angles.get("rope_theta", 10000.0)
    is_scaled = angles.get("rope_type", "default") != "default"
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": theta,
        "rope_scaling": {k: v for k, v in angles.items() if k != "rope_theta"}
        if is_scaled
        else None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": rows,
        "attention_bias": False,
        "tie_word_embeddings": False,
        LAYER_IDS: list(layers),
    }


FORMS = {
    "mtp": Form(lambda layers: (layers,), _new_mtp),
    "eagle3": Form(captured_layers, _new_eagle3),
}


@torch.no_grad()
def write_new_drafter(form: str, teacher: Teacher, vocabulary: Tensor, out: Path) -> None:
    """Write a drafter that is not trained yet. `vocabulary` has the ids that it drafts, ascending,
    [V_d].

    Raises:
        CheckpointError: it cannot be written.
        UnsupportedModelError: the target cannot have a drafter of this form.
    """
    entries, tensors = FORMS[form].make(teacher, vocabulary)
    dtype = teacher.model.dtype
    kept = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    dtype_name = str(dtype).removeprefix("torch.")
    with new_directory(out) as scratch:
        plain = {name: tensor.cpu().clone().contiguous() for name, tensor in kept.items()}
        save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
        write_json(scratch / CONFIG, {**entries, "dtype": dtype_name, "torch_dtype": dtype_name})
        if TOKEN_MAP not in kept:
            lines = "".join(f"{token}\n" for token in vocabulary.tolist())
            (scratch / DRAFT_VOCAB).write_text(lines)
