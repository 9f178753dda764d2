"""Checkpoints for benchmarks: random weights, or weights that accept all drafts, in public formats.

Nothing is downloaded. The cost of a step depends on the shape, so random weights suffice.
Acceptance depends on whether target and MTP layer agree. With random weights they hardly ever do.
With *accepting* weights they always do, at the same cost: attention and feed-forward write nothing
(o_proj and down_proj are zero), so that the embedding of the last token reaches the final norm
unchanged. The head is that embedding with its rows permuted, and the MTP layer's projection passes
on the token embedding and drops the target's features. So target and draft both map a token to its
successor in the permutation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from mtpc.cli.demo import demo_checkpoint
from mtpc.models import FAMILIES, ModelFamily
from mtpc.models.families.nextn import GLM4_MOE
from mtpc.models.family import find_norm_class
from mtpc.models.hf import MTPLayer, model_class
from mtpc.models.mtp_layers import stored_tensors
from mtpc.models.read_config import config_class
from mtpc.models.save import save_checkpoint
from mtpc.weights.quantise import spec_by_scheme
from mtpc.weights.write_quantised import quantise_checkpoint

INITIALIZER_RANGE = 0.02
MAX_POSITIONS = 1 << 16
"""More than any benchmark's context."""


@dataclass(frozen=True)
class Experts:
    """Of all layers but the first, the MTP layer's too: `chosen` of `count` for each token, and
    one that all tokens share."""

    count: int
    chosen: int
    intermediate_size: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with one MTP layer; dense where it has no experts.

    `more` has other entries of the family's config.
    """

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    experts: Experts | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


SHAPES = {
    "tiny": Shape(64, 2, 128, 512, 4, 2),
    "0.5b": Shape(1024, 28, 4096, 32768, 16, 4),
}
MOE_SHAPES = {
    "tiny": Shape(64, 2, 128, 512, 4, 2, Experts(4, 2, 32)),
    "0.5b": Shape(1024, 10, 4096, 32768, 16, 4, Experts(32, 4, 512)),
}
"""Of the names in `SHAPES`, with experts."""
HYBRID_SHAPES = {
    "tiny": Shape(64, 4, 128, 512, 4, 2),
    "0.5b": Shape(1024, 24, 3584, 32768, 8, 2),
}
"""The same of Qwen3.5, which has full attention in each fourth layer; "0.5b" is its 0.8B with a
smaller vocabulary."""
LATENT: dict[str, int | None] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""DeepSeek-V3's latent attention, but for the rank of its queries (1536 at 7168 hidden units). It
is the one that vLLM has kernels for."""


@dataclass(frozen=True)
class Checkpoint:
    """A written checkpoint, and the bytes of what a decode step has to read of it.

    Attributes:
        directory: where it is.
        family: its row in mtpc's table.
        target_bytes: the target's layers and norms, without embedding and head.
        head_bytes: the head, which target and draft share.
        draft_bytes: the MTP layer.
        embedding_bytes: the embedding, of which a step reads rows.
        expert_bytes: of `target_bytes` and `draft_bytes`, those of experts that tokens choose.
        experts: how many there are, and how many a token chooses; None where all are read.
    """

    directory: Path
    family: ModelFamily
    target_bytes: int
    head_bytes: int
    draft_bytes: int
    embedding_bytes: int
    expert_bytes: tuple[int, int] = (0, 0)
    experts: Experts | None = None

    def step_bytes(self, spec_tokens: int, int8_drafts: bool = False, batch: int = 1) -> int:
        """Weights read by one step: the target once, the draft K times, the head by each.

        int8 drafts take half the bytes. Of the experts those count that tokens are expected to
        choose, were their choices independent: a verified row is a token, and so is a request
        that drafts.
        """
        target_experts, draft_experts = self.expert_bytes
        target = self.target_bytes - self._idle(target_experts, batch * (spec_tokens + 1))
        draft = self.draft_bytes - self._idle(draft_experts, batch)
        drafts = spec_tokens * (draft + self.head_bytes)
        return target + self.head_bytes + (drafts // 2 if int8_drafts else drafts)

    def _idle(self, expert_bytes: int, tokens: int) -> int:
        """Of the experts' bytes, those that no token is expected to choose."""
        if self.experts is None:
            return 0
        return round(expert_bytes * (1 - self.experts.chosen / self.experts.count) ** tokens)

    def quantised(self, scheme: str) -> Checkpoint:
        """The same with the bytes that its weights have by a scheme, `quantize=` of mtpc."""
        return weigh(self.directory, self.family, scheme)

    def write_quantised(self, scheme: str, workdir: Path, head: bool = True) -> Path:
        """The directory of a copy as `mtpc quantize` writes it, with its head or without; written
        once."""
        out = workdir / f"{self.directory.name}-{scheme}{'' if head else '-plain-head'}"
        if not out.is_dir():
            quantise_checkpoint(self.directory, out, scheme, head=head)
        return out

    def load_target(self) -> Any:
        """The target as transformers loads it."""
        return load_target(self.directory, self.family)


def load_target(directory: Path, family: ModelFamily) -> Any:
    """The target as transformers loads it, without the MTP layer's tensors.

    transformers takes the class attribute set here both for names to skip and, in
    `generate(use_mtp=True)`, for names to load; its own value holds the layer numbers of the
    released models only.
    """
    target_class = model_class(family)
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    prefix = re.escape(family.layer_prefix(num_layers, 0))
    target_class._keys_to_ignore_on_load_unexpected = [prefix]
    target = target_class.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    target.generation_config.eos_token_id = None  # Samples are of as many tokens as asked for.
    return target.eval()


def write_checkpoint(
    directory: Path, family_name: str, shape: Shape, accepting: bool, seed: int = 0
) -> Checkpoint:
    """Write a bfloat16 checkpoint with one MTP layer.

    The MTP layer's decoder block is the last layer of a model built with one layer too many.

    Args:
        directory: where to; created if it is not there.
        family_name: a name in mtpc's family table: "mimo", "glm4_moe", "deepseek_v3" or "qwen3_5".
        shape: sizes; with experts for "deepseek_v3".
        accepting: weights of which every greedy draft is accepted, instead of random ones.
        seed: of the random weights.
    """
    family = next(f for f in FAMILIES if f.name == family_name)
    torch.manual_seed(seed)
    model, layer = make_model(family, shape, "cpu", accepting)
    save_checkpoint(model, (layer,), directory, family)
    return weigh(directory, family)


def make_model(
    family: ModelFamily,
    shape: Shape,
    device: str,
    accepting: bool,
    change: Callable[[Any], None] = lambda model: None,
) -> tuple[Any, MTPLayer]:
    """A bfloat16 model on a device, and its MTP layer; `change` comes before the layer is cut."""
    config = make_config(family, shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        if accepting:
            make_successor_model(model)
        change(model)
        return model, split_off_mtp_layer(model, family, accepting)


def demo() -> Checkpoint:
    """The demo model, whose acceptance depends on the text."""
    return weigh(demo_checkpoint(), GLM4_MOE)


def text_prompts(directory: Path, count: int, length: int) -> list[list[int]]:
    """Beginnings of pages that every Python carries, as a checkpoint's tokenizer has them.

    Args:
        directory: of the checkpoint.
        count: how many, all different.
        length: tokens of each.

    Raises:
        ValueError: there are not so many of that length.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    pages = (tokenizer(topics[name]).input_ids for name in sorted(topics))
    prompts = list(islice((page[:length] for page in pages if len(page) >= length), count))
    if len(prompts) < count:
        raise ValueError(
            f"{len(prompts)} pages have {length} tokens or more, {count} are wanted: ask for "
            "smaller batches or shorter prompts"
        )
    return prompts


def make_config(family: ModelFamily, shape: Shape) -> Any:
    """A config with one layer too many.

    transformers builds the MTP layer of GLM-4 MoE with experts whatever the config says, and at
    least two of them. In a dense shape they are all chosen for every token, and with the shared
    ones they hold as much as a dense layer's feed-forward.
    """
    sizes: dict[str, Any] = {**vars(shape), "num_hidden_layers": shape.num_hidden_layers + 1}
    experts, more = sizes.pop("experts"), sizes.pop("more")
    if experts:
        sizes |= dict(first_k_dense_replace=1, n_shared_experts=1)
    elif family.name == "glm4_moe":
        sizes |= dict(first_k_dense_replace=shape.num_hidden_layers, n_shared_experts=2)
        experts = Experts(2, 2, shape.intermediate_size // 4)
    if experts:
        sizes |= dict(
            moe_intermediate_size=experts.intermediate_size,
            n_routed_experts=experts.count,
            num_experts_per_tok=experts.chosen,
        )
    if family.name == "glm4_moe":
        sizes["head_dim"] = shape.hidden_size // shape.num_attention_heads
    if family.name == "deepseek_v3":
        heads = dict(num_key_value_heads=shape.num_attention_heads)
        sizes |= dict(**LATENT, **heads, n_group=1, topk_group=1, topk_method="noaux_tc")
    if family.name == "qwen3_5":
        sizes |= _hybrid_sizes(shape)
    sizes |= more
    if "first_k_dense_replace" in sizes:
        sizes["first_k_dense_replace"] = min(
            sizes["first_k_dense_replace"], shape.num_hidden_layers
        )
    return config_class(family)(
        **sizes,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _hybrid_sizes(shape: Shape) -> dict[str, Any]:
    """Qwen3.5's linear attention beside full attention; the layer too many has the latter."""
    every, kinds = 4, ("linear_attention", "full_attention")
    layers = [kinds[(i + 1) % every == 0] for i in range(shape.num_hidden_layers)]
    heads, width = 2 * shape.num_attention_heads, shape.hidden_size // 8
    return dict(
        layer_types=[*layers, "full_attention"],
        head_dim=2 * shape.hidden_size // shape.num_attention_heads,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
    )


@torch.no_grad()
def make_successor_model(model: Any) -> None:
    """Make a model that maps every token to its successor in a random permutation."""
    for name, parameter in model.named_parameters():
        if any(end in name for end in ("o_proj", "out_proj", "down_proj")):
            parameter.zero_()
    embedding = model.get_input_embeddings().weight
    model.get_output_embeddings().weight.copy_(embedding[torch.randperm(embedding.shape[0])])


@torch.no_grad()
def split_off_mtp_layer(model: Any, family: ModelFamily, accepting: bool) -> MTPLayer:
    """Make an MTP layer of a model's last decoder layer, and take that away from the model.

    On the model's device.
    """
    config, block = model.config, model.model.layers[-1]
    del model.model.layers[-1]
    config.num_hidden_layers -= 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    device = model.get_input_embeddings().weight.device
    layer = MTPLayer(family.wiring, config, block, find_norm_class(block)).to(device).bfloat16()
    if accepting:
        halves = [torch.eye(config.hidden_size), torch.zeros_like(torch.eye(config.hidden_size))]
        projection = torch.cat(halves[::-1] if family.wiring.hidden_first else halves, 1)
    else:
        projection = INITIALIZER_RANGE * torch.randn_like(layer.projection.weight)
    layer.projection.weight.copy_(projection)
    return layer


def weigh(directory: Path, family: ModelFamily, scheme: str | None = None) -> Checkpoint:
    """Sort the tensors by who reads them; the embedding is gathered, not read.

    With a scheme, those that it quantises have its bytes.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}
    prefix = family.layer_prefix(config["num_hidden_layers"], 0)
    draft = {name: tensors.pop(name) for name in [*tensors] if name.startswith(prefix)}
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    apart = {name: tensors.pop(name) for name in (embedding, head)}

    def size(name: str, tensor: torch.Tensor) -> int:
        spec = spec_by_scheme(scheme, name, tensor)
        return tensor.nbytes if spec is None else spec.nbytes(tensor.numel())

    sizes = sort_bytes(tensors, draft, config, size)
    sizes |= dict(head_bytes=size(head, apart[head]))
    sizes |= dict(embedding_bytes=size(embedding, apart[embedding]))
    return Checkpoint(directory, family, **sizes)


def sort_bytes(
    target: Mapping[str, torch.Tensor],
    draft: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    size: Callable[[str, torch.Tensor], int],
) -> dict[str, Any]:
    """Fields of `Checkpoint` that layers' tensors by name, and the bytes of each, say."""
    sizes = [{name: size(name, t) for name, t in each.items()} for each in (target, draft)]
    chosen = [sum(n for name, n in s.items() if ".mlp.experts." in name) for s in sizes]
    experts, count = None, config.get("n_routed_experts")
    if count:
        experts = Experts(count, config["num_experts_per_tok"], config["moe_intermediate_size"])
    return dict(
        target_bytes=sum(sizes[0].values()),
        draft_bytes=sum(sizes[1].values()),
        expert_bytes=tuple(chosen),
        experts=experts,
    )


def without_weights(
    family_name: str, shape: Shape
) -> tuple[ModelFamily, dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A bfloat16 model with one MTP layer, of meta tensors.

    Args:
        family_name: a name in mtpc's family table: "mimo", "glm4_moe" or "deepseek_v3".
        shape: sizes.

    Returns:
        The family, the entries of config.json, the target's tensors, and the MTP layer's by the
        names that a checkpoint has for them.
    """
    family = next(family for family in FAMILIES if family.name == family_name)
    model, layer = make_model(family, shape, "meta", accepting=False)
    prefix = family.layer_prefix(shape.num_hidden_layers, 0)
    own = {prefix + name: tensor for name, tensor in stored_tensors(layer, family)}
    says = {"architectures": [family.architectures[0]], "num_nextn_predict_layers": 1}
    config = {**model.config.to_dict(), **says, "dtype": "bfloat16"}
    return family, config, model.state_dict(), own
