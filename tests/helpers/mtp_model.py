"""Tiny checkpoints of derived families with MTP layers; transformers' `MtpModel` as their oracle.

mtpc writes the checkpoints, and transformers reads them by its own conversions of names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator

from helpers import derived
from helpers.oracles import MIN_MARGIN, DraftOracle
from mtpc.models.family import ModelFamily
from mtpc.models.hf import MTPLayer
from mtpc.models.load import find_family
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.save import save_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mellum": ("mellum", {"layer_types": [FULL, SLIDING], "num_mtp_layers": 1}),
    "mellum, full": (
        "mellum",
        {"layer_types": [SLIDING, FULL], "num_mtp_layers": 1, "mtp_layer_types": [FULL]},
    ),
    "rules": (
        "solar_open",
        {
            "num_mtp_layers": 2,
            "mtp_hidden_states_first": True,
            "chain_hidden_post_norm": True,
            "tie_last_hidden_states": False,
            "logits_mup_width_multiplier": 3.0,
            "unpadded_vocab_size": 60,
        },
    ),
    "no norm": ("youtu", {"num_mtp_layers": 2, "chain_hidden_post_norm": False}),
    "sarvam_moe": ("sarvam_moe", {"num_mtp_layers": 2}),
    "sarvam_mla": ("sarvam_mla", {"num_mtp_layers": 1}),
    "hy_v3": ("hy_v3", {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]}),
    "axk1": ("axk1", {"num_mtp_layers": 2, "mtp_mlp_layer_types": ["sparse", "dense"]}),
    "solar_open": ("solar_open", {"num_mtp_layers": 3, "logits_mup_width_multiplier": 2.0}),
}
"""Name of a case -> a model type, and what its tiny config has otherwise.

Windows are of 8 tokens. With "rules" the config has every rule that `MtpModel` reads.
"""


def save_case(case: str, directory: Path, adapted: bool = False, count: int | None = None) -> Any:
    """Write the checkpoint of a case; returns its target, in float64.

    Args:
        case: a name of `CASES`.
        directory: where to.
        adapted: whether tokens follow from the token before for the most part, in the target and in
            its MTP layers, so that drafts are accepted often.
        count: MTP layers that are written; None: all.
    """
    model_type, changes = CASES[case]
    torch.manual_seed(0)
    config = derived.tiny_config(model_type, **changes)
    model = derived.randomised(AutoModelForCausalLM.from_config(config).eval())
    family = find_family([type(model).__name__], config.to_dict())
    written = changes["num_mtp_layers"] if count is None else count
    layers = [derived.randomised(build_mtp_layer(family, model, i)) for i in range(written)]
    _share_norm(family, layers)
    if adapted:
        _adapt(model, layers)
    save_checkpoint(model, layers, directory, family)
    return model


def _share_norm(family: ModelFamily, layers: list[MTPLayer]) -> None:
    for layer in layers if family.common_tensors else ():
        layer.final_norm = layers[0].final_norm


@torch.no_grad()
def _adapt(model: Any, layers: list[MTPLayer]) -> None:
    model.get_input_embeddings().weight.mul_(40)
    for layer in layers:
        half = layer.projection.out_features
        layer.embedding_norm.weight.fill_(1)
        layer.projection.weight.mul_(0.1)
        layer.projection.weight[:, :half] += 4 * torch.eye(half)
        layer.final_norm.load_state_dict(model.get_decoder().norm.state_dict())


class MtpOracle(DraftOracle):
    """Drafts of transformers' `MtpModel`, uncached, which equal its candidate generator's.

    Args:
        directory: the checkpoint.
    """

    def __init__(self, directory: Path):
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        first = self.model.config.num_hidden_layers
        # transformers' own patterns have the numbers of released layers.
        names = [rf"model\.layers\.{first + i}\..*" for i in range(4)]
        self.model._keys_to_ignore_on_load_unexpected = [*names, r"^(model\.)?mtp\."]
        self.generator: Any = MTPCandidateGenerator(self.model, GenerationConfig(), {})
        self.mtp: Any = self.generator.mtp_model.eval()

    @torch.no_grad()
    def features(self, ids: list[int]) -> Any:
        """What the model gives for a text, with the hidden states that drafts are fed."""
        given = self.generator.model_kwargs_overrides
        return self.model(input_ids=torch.tensor([ids]), use_cache=False, **given)

    @torch.no_grad()
    def rows(self, ids: list[int]) -> list[Tensor]:
        """Logits of each layer over a whole text [L - 1 - i, V], fed what the layer before gave."""
        fed, found = self.features(ids).hidden_states[-1], list[Tensor]()
        for index in range(len(self.mtp.layers)):
            start, count = index + 1, len(ids) - 1 - index
            positions = torch.arange(start, start + count)[None]
            given = {"input_ids": torch.tensor([ids[start:]])}
            fed = self.mtp.forward_layer(index, fed[:, :count], positions, None, **given)
            found.append(self.mtp._project_to_logits(fed)[0])
        return found

    @torch.no_grad()
    def candidates(self, committed: list[int]) -> list[int]:
        """What transformers' candidate generator proposes after a text: a draft of each layer."""
        generator = self.generator
        generator.mtp_cache = MtpCache(config=self.model.config.get_mtp_config())
        generator.mtp_cache.activate_past_recording()
        generator.is_main_model_prefill = True
        positions = {"position_ids": torch.arange(len(committed))[None]}
        out = self.features(committed[:-1])
        ids = torch.tensor([committed])
        found, _ = generator.get_candidates(ids, positions, out, False, 0)
        proposed: list[int] = found[0, len(committed) :].tolist()
        return proposed

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[int]:
        """One draft of each layer, and further ones of the last layer, on its own output."""
        ids, fed = committed[1:], self.features(committed[:-1]).hidden_states[-1]
        found: list[int] = []
        last = len(self.mtp.layers) - 1
        for step in range(count):
            positions = torch.arange(1, len(ids) + 1)[None]
            given = {"input_ids": torch.tensor([ids])}
            out = self.mtp.forward_layer(min(step, last), fed, positions, None, **given)
            found.append(self._chosen(self.mtp._project_to_logits(out[:, -1:])[0, 0]))
            if step < last:
                ids, fed = [*ids[1:], found[-1]], out
            else:
                ids, fed = [*ids, found[-1]], torch.cat([fed, out[:, -1:]], 1)
        proposed = self.candidates(committed)
        assert found[: last + 1] == proposed[:count]
        return found

    @staticmethod
    def _chosen(logits: Tensor) -> int:
        top = logits.topk(2)
        assert top.values[0] - top.values[1] > MIN_MARGIN, "the margin is too small"
        return int(top.indices[0])
