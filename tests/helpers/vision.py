"""Tiny checkpoints that take images, and what transformers makes of the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import tiny
from helpers.oracles import MIN_MARGIN_FLOAT32
from helpers.released.qwen import Qwen
from helpers.word_model import word_checkpoint

IMAGE, START, END, VIDEO = 90, 91, 92, 93
"""Token ids of a part of an image, of the marks around one, and of a video."""
ROPE = {
    "rope_type": "default",
    "rope_theta": 100.0,
    "partial_rotary_factor": 1.0,
    "mrope_section": [4, 2, 2],
}
"""Each grid has some of the eight frequencies, and a small base keeps places far apart."""
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


TEMPLATE = (
    "{% for message in messages %}w{{ loop.index + 10 }} {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}w91 w90 w92 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}w94{% endif %}"
)
"""Words are token ids: w90 stands for an image."""


def make_vision_checkpoint(family: str, directory: Path) -> Path:
    """A trained text model inside a multimodal checkpoint with a random tower, as released."""
    text_only = tiny.make_trained_checkpoint(family, directory / "text", rope_parameters=ROPE)
    target = word_checkpoint(text_only, directory / "vision")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    stored = load_file(text_only / "model.safetensors")
    named = {
        f"model.language_model.{n[6:]}" if n.startswith("model.") else n: tensor
        for n, tensor in stored.items()
    }
    text = json.loads((text_only / "config.json").read_text())
    name = text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    outer = {
        "architectures": [name],
        "model_type": text["model_type"].removesuffix("_text"),
        "eos_token_id": text.pop("eos_token_id"),
        "text_config": text,
        "vision_config": TOWER,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "video_token_id": VIDEO,
    }
    (target / "config.json").write_text(json.dumps(outer))
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for key, tensor in _tower(name, outer).items():
        named[f"model.visual.{key}"] = tensor
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _tower(name: str, outer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights, so large that what an image shows decides the text."""
    model_class = getattr(transformers, name)
    fields = {k: v for k, v in outer.items() if k not in ("architectures", "model_type")}
    with torch.device("meta"):
        empty = model_class(model_class.config_class(**fields)).model.visual
    generator = torch.Generator().manual_seed(5)
    return {
        key: torch.randn(tensor.shape, generator=generator) * 0.3 + float("norm" in key)
        for key, tensor in empty.state_dict().items()
    }


class VisionOracle:
    """transformers' own multimodal model: plain greedy decoding by its `generate`."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64):
        name = json.loads((directory / "config.json").read_text())["architectures"][0]
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model_class: Any = getattr(transformers, name)
        self.model = model_class.from_pretrained(directory, dtype=dtype, **eager)
        self.directory = directory
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(
            directory, backend="pil"
        )
        self._known: dict[Any, list[int]] = {}

    def inputs(self, ids: list[int], images: list[Any]) -> dict[str, Tensor]:
        """Arguments of the model for a prompt with one image token for each image."""
        if not images:
            return {"input_ids": torch.tensor([ids])}
        made = dict(self.processor(images=images, return_tensors="pt"))
        counts = iter((made["image_grid_thw"].prod(1) // 4).tolist())
        spread = [i for each in ids for i in [each] * (next(counts) if each == IMAGE else 1)]
        tokens = torch.tensor([spread])
        return {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int(), **made}

    @torch.no_grad()
    def generate(self, ids: list[int], images: list[Any], new: int) -> list[int]:
        """Greedy continuation; the margin of each token is asserted.

        After a prompt that ends in an image `generate` goes on from the last row's position in
        each grid, where `get_rope_index` begins after the whole image, as training does. No chat
        template ends a prompt so. There the oracle decodes without a cache.
        """
        key = (tuple(ids), tuple(image.tobytes() for image in images), new)
        if key in self._known:
            return self._known[key]
        inputs = self.inputs(ids, images)
        if ids[-1] == IMAGE:
            self._known[key] = self._uncached(inputs, new)
            return self._known[key]
        out = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        for logits in out.logits:
            top = logits[0].topk(2).values
            assert float(top[0] - top[1]) > MIN_MARGIN_FLOAT32, "too small to prove anything"
        self._known[key] = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return self._known[key]

    def _uncached(self, inputs: dict[str, Tensor], new: int) -> list[int]:
        text: list[int] = []
        for _ in range(new):
            hidden, _, _ = self.hidden(inputs, text)
            top = self.model.lm_head(hidden[-1]).topk(2)
            assert float(top.values[0] - top.values[1]) > MIN_MARGIN_FLOAT32
            text.append(int(top.indices[0]))
        return text

    @torch.no_grad()
    def hidden(self, inputs: dict[str, Tensor], text: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of a prompt and text after it, uncached: what the decoder makes of all rows [L, H], the
        embeddings that it is given [L, H], and positions [3, 1, L + 8] of these and of more text.
        """
        model, prompt = self.model.model, inputs["input_ids"]
        tokens = torch.cat([prompt, torch.tensor([text + [2] * 8])], 1)
        rows = model.get_input_embeddings()(tokens)[0, :-8]
        kinds, grids = torch.zeros_like(tokens), inputs.get("image_grid_thw")
        if grids is not None:
            seen = model.get_image_features(inputs["pixel_values"], grids, return_dict=True)
            kinds[:, : prompt.shape[1]] = inputs["mm_token_type_ids"]
            rows[kinds[0, :-8].bool()] = torch.cat(seen.pooler_output)
        positions, _ = model.get_rope_index(tokens, kinds, image_grid_thw=grids)
        out = model.language_model(
            inputs_embeds=rows[None], position_ids=positions[:, :, :-8], use_cache=False
        )
        return out.last_hidden_state[0], rows, positions

    @torch.no_grad()
    def choices(self, ids: list[int], images: list[Any], text: list[int]) -> list[int]:
        """The model's choice in the place of each token of a text, after those before it."""
        inputs = self.inputs(ids, images)
        hidden, _, _ = self.hidden(inputs, text)
        first = inputs["input_ids"].shape[1] - 1
        return self.model.lm_head(hidden[first:-1]).argmax(1).tolist()


class VisionPage(Qwen):
    """The MTP layer by its released names after a prompt with images; none of it is mtpc's."""

    embedding_name = "model.language_model.embed_tokens.weight"

    def __init__(self, oracle: VisionOracle, ids: list[int], images: list[Any]):
        self.oracle, self.inputs = oracle, oracle.inputs(ids, images)
        super().__init__(oracle.model, oracle.directory, 1)

    def after_norm(self, ids: list[int]) -> Tensor:
        """Of all tokens but the last one that was committed; notes where they are."""
        text = ids[self.inputs["input_ids"].shape[1] :]
        hidden, self.rows, self.positions = self.oracle.hidden(self.inputs, text)
        return hidden

    def embed(self, ids: list[int]) -> Tensor:
        """Rows t + 1: those of the prompt are what the target had, images' rows too."""
        prompt = self.rows[1 : self.inputs["input_ids"].shape[1]]
        return torch.cat([prompt, super().embed(ids[len(prompt) :])])

    def rotate(self, x: Tensor, positions: Tensor, kind: str | None = None) -> Any:
        return self.decoder.rotary_emb(x, self.positions[:, :, : x.shape[1]])
