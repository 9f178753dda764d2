"""Tiny checkpoints that take images, and transformers' results for the same prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import tiny, trained
from helpers.oracles import MIN_MARGIN_FLOAT32
from helpers.released.base import ReleasedMTP
from helpers.released.nextn import Glm4v
from helpers.released.qwen import Qwen
from helpers.released.step import Step
from helpers.word_model import word_checkpoint

IMAGE, START, END, VIDEO = 90, 91, 92, 93
"""Token ids of a part of an image, of the marks around one, and of a video."""
MARKS = {"<patch_start>": 85, "<patch_end>": 86, "<patch_newline>": 87, "<im_patch>": IMAGE}
MARKS |= {"<im_start>": START, "<im_end>": END}
"""Step-3.7's tokens around images."""
ROPE = {
    "rope_type": "default",
    "rope_theta": 100.0,
    "partial_rotary_factor": 1.0,
    "mrope_section": [4, 2, 2],
}
"""Each grid has some of the eight frequencies; the small base makes positions very different."""
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
TOWERS: Mapping[str, dict[str, Any]] = {
    "qwen3_5": {**TOWER, "num_position_embeddings": 16},
    "qwen3_5_moe": {**TOWER, "num_position_embeddings": 16},
    "glm4v_moe": {**TOWER, "image_size": 16},
    "step3p7": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    },
}
WHOLE, CROP = 32, 32
"""Pixels of a side of Step-3.7's squares, which have four tokens each."""
PATCHES: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
PROCESSORS: Mapping[str, dict[str, Any]] = {
    "qwen3_5": {**QWEN, **PATCHES},
    "qwen3_5_moe": {**QWEN, **PATCHES},
    "glm4v_moe": {**PATCHES, "image_processor_type": "Glm4vImageProcessor"},
    "step3p7": {
        "image_processor_type": "Step3p7ImageProcessor",
        "processor_class": "Step3p7Processor",
        "size": {"height": WHOLE, "width": WHOLE},
        "patch_size": CROP,
        "vision_patch_size": 4,
    },
}
_OF_TOWERS = ("model.visual.", "vision_model.", "vit_large_projector.", "model.vision_model.")
_OF_TOWERS += ("model.multi_modal_projector.",)


TEMPLATE = (
    "{% for message in messages %}w{{ loop.index + 10 }} {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}w94{% endif %}"
)
"""Words are token ids."""


def make_vision_checkpoint(family: str, directory: Path) -> Path:
    """A trained text model inside a multimodal checkpoint with a random tower, as released."""
    tower = TOWERS[family]
    if "qwen" in family:
        text_only = trained.make_trained_checkpoint(
            family, directory / "text", rope_parameters=ROPE
        )
        target = word_checkpoint(text_only, directory / "vision")
        named = _around_text(text_only, target, tower)
    else:
        changes: dict[str, Any] = {"vision_config": tower, "image_token_id": IMAGE}
        if family == "glm4v_moe":
            text = {**tiny.CONFIGS[family]["text_config"], "rope_parameters": ROPE}
            changes |= {"text_config": text, "video_token_id": VIDEO}
        plain = trained.make_trained_checkpoint(family, directory / "plain", **changes)
        target = word_checkpoint(plain, directory / "vision")
        named = load_file(plain / "model.safetensors")
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    image = "w91 w90 w92"
    if family == "step3p7":
        image = "<im_patch>"
        _add_marks(target / "tokenizer.json")
    (target / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", image))
    generator = torch.Generator().manual_seed(5)
    for name, tensor in sorted(named.items()):
        if name.startswith(_OF_TOWERS):
            # The weights are so large that the image decides the text.
            is_norm = name.endswith("weight") and ("norm" in name or ".ln_" in name)
            named[name] = torch.randn(tensor.shape, generator=generator) * 0.3 + float(is_norm)
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _around_text(text_only: Path, target: Path, tower: dict[str, Any]) -> dict[str, Tensor]:
    """Qwen3.5's multimodal config around a text model's; the tensors by their names in it."""
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
        "vision_config": tower,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "video_token_id": VIDEO,
    }
    (target / "config.json").write_text(json.dumps(outer))
    model_class = getattr(transformers, name)
    fields = {k: v for k, v in outer.items() if k not in ("architectures", "model_type")}
    with torch.device("meta"):
        empty = model_class(model_class.config_class(**fields)).model.visual
    shapes = {key: torch.empty(tensor.shape) for key, tensor in empty.state_dict().items()}
    return named | {f"model.visual.{key}": tensor for key, tensor in shapes.items()}


def _add_marks(path: Path) -> None:
    """Give words of a tokenizer the names of Step-3.7's marks."""
    made = json.loads(path.read_text())
    for text, token_id in MARKS.items():
        del made["model"]["vocab"][f"w{token_id}"]
        made["model"]["vocab"][text] = token_id
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        made["added_tokens"].append({"id": token_id, "content": text, "special": True, **flags})
    made["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(made))


@dataclass(frozen=True, eq=False)
class Crops:
    """What Step-3.7's image processor makes of one picture, with random values."""

    whole: Tensor
    crops: Tensor
    ends_row: tuple[bool, ...]

    def tobytes(self) -> bytes:
        return bytes(self.whole.numpy().data) + bytes(self.crops.numpy().data)


def crops(rows: int, columns: int, seed: int = 0) -> Crops:
    """A picture that is cut into rows and columns, or not cut."""
    generator = torch.Generator().manual_seed(seed)
    count = rows * columns
    ends = [c == columns - 1 and r < rows - 1 for r in range(rows) for c in range(columns)]
    whole = torch.randn(3, WHOLE, WHOLE, generator=generator)
    return Crops(whole, torch.randn(count, 3, CROP, CROP, generator=generator), tuple(ends))


def processed(images: list[Crops]) -> dict[str, Any]:
    """Results of the processor for several pictures, as transformers' has them."""
    most = max(len(image.crops) for image in images)
    made: dict[str, Any] = {
        "pixel_values": torch.stack([image.whole for image in images]),
        "num_local_patches": torch.tensor([len(image.crops) for image in images]),
    }
    if most:
        made["pixel_values_local"] = torch.cat([image.crops for image in images])
        rows = [[*image.ends_row] for image in images]
        made["patch_newline_masks"] = [row + [False] * (most - len(row)) for row in rows]
    return made


def cropped_ids(image: Crops) -> list[int]:
    """The tokens of a picture, as transformers' `Step3p7Processor` writes them."""
    ids: list[int] = []
    for ends in image.ends_row:
        ids += [85, *[IMAGE] * 4, 86] + [87] * ends
    return [*ids, START, *[IMAGE] * 4, END]


class VisionOracle:
    """transformers' own multimodal model: plain greedy decoding by its `generate`."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64):
        name = json.loads((directory / "config.json").read_text())["architectures"][0]
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model_class: Any = getattr(transformers, name)
        self.model = model_class.from_pretrained(directory, dtype=dtype, **eager)
        self.directory = directory
        self._known: dict[Any, list[int]] = {}

    def inputs(self, ids: list[int], images: list[Any]) -> dict[str, Any]:
        """Arguments of the model for a prompt with one image token for each image."""
        if not images:
            return {"input_ids": torch.tensor([ids])}
        if isinstance(images[0], Crops):
            made, parts = processed(images), iter([cropped_ids(image) for image in images])
            made.pop("patch_newline_masks", None)
            spread = [i for each in ids for i in (next(parts) if each == IMAGE else [each])]
            return {"input_ids": torch.tensor([spread]), **made}
        processor: Any = transformers.AutoImageProcessor.from_pretrained(
            self.directory, backend="pil"
        )
        made = dict(processor(images=images, return_tensors="pt"))
        counts = iter((made["image_grid_thw"].prod(1) // 4).tolist())
        spread = [i for each in ids for i in [each] * (next(counts) if each == IMAGE else 1)]
        tokens = torch.tensor([spread])
        return {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int(), **made}

    @torch.no_grad()
    def generate(self, ids: list[int], images: list[Any], new: int) -> list[int]:
        """Greedy continuation; asserts the margin of each token.

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

    def _uncached(self, inputs: dict[str, Any], new: int) -> list[int]:
        text: list[int] = []
        for _ in range(new):
            hidden, _, _ = self.hidden(inputs, text)
            top = self.model.lm_head(hidden[-1]).topk(2)
            assert float(top.values[0] - top.values[1]) > MIN_MARGIN_FLOAT32
            text.append(int(top.indices[0]))
        return text

    @torch.no_grad()
    def hidden(self, inputs: dict[str, Any], text: list[int]) -> tuple[Tensor, Tensor, Any]:
        """Of a prompt and text after it, uncached: what the decoder makes of all rows [L, H], the
        embeddings that it is given [L, H], and positions [3, 1, L + 8] of these and of more text;
        None where positions have one coordinate.
        """
        model, prompt = self.model.model, inputs["input_ids"]
        tokens = torch.cat([prompt, torch.tensor([text + [2] * 8])], 1)
        rows = model.get_input_embeddings()(tokens)[0, :-8]
        if "pixel_values" in inputs:
            given = {k: v for k, v in inputs.items() if k not in ("input_ids", "mm_token_type_ids")}
            seen = model.get_image_features(**given, return_dict=True)
            rows[: prompt.shape[1]][prompt[0] == IMAGE] = torch.cat(list(seen.pooler_output))
        positions, given = None, {}
        if hasattr(model, "get_rope_index"):
            kinds, grids = torch.zeros_like(tokens), inputs.get("image_grid_thw")
            kinds[:, : prompt.shape[1]] = prompt == IMAGE if grids is not None else 0
            positions, _ = model.get_rope_index(tokens, kinds, image_grid_thw=grids)
            given = {"position_ids": positions[:, :, :-8]}
        out = model.language_model(inputs_embeds=rows[None], use_cache=False, **given)
        return out.last_hidden_state[0], rows, positions

    @torch.no_grad()
    def choices(self, ids: list[int], images: list[Any], text: list[int]) -> list[int]:
        """The model's choice at each position of a text, given the tokens before it."""
        inputs = self.inputs(ids, images)
        hidden, _, _ = self.hidden(inputs, text)
        first = inputs["input_ids"].shape[1] - 1
        return self.model.lm_head(hidden[first:-1]).argmax(1).tolist()


class _Pictured(ReleasedMTP):
    """MTP layers by their released names after a prompt with images, without mtpc's code."""

    def __init__(self, oracle: VisionOracle, ids: list[int], images: list[Any], count: int = 1):
        self.oracle, self.inputs, self.shift = oracle, oracle.inputs(ids, images), 1
        super().__init__(oracle.model, oracle.directory, count)

    def after_norm(self, ids: list[int]) -> Tensor:
        """Of all tokens but the last one that was committed; notes where they are."""
        text = ids[self.inputs["input_ids"].shape[1] :]
        hidden, self.rows, self.positions = self.oracle.hidden(self.inputs, text)
        return hidden

    def before_norm(self, ids: list[int]) -> Tensor:
        seen: list[Tensor] = []
        hook = self.decoder.norm.register_forward_pre_hook(lambda module, x: seen.append(x[0]))
        self.after_norm(ids)
        hook.remove()
        return seen[-1][0]

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        self.shift = index + 1
        return super().run(index, ids, fed)

    def embed(self, ids: list[int]) -> Tensor:
        """Layer i's row t takes token t + i + 1: of the prompt what the target had, images' rows
        too."""
        prompt = self.rows[self.shift : self.inputs["input_ids"].shape[1]]
        return torch.cat([prompt, super().embed(ids[len(prompt) :])])

    def rotate(self, x: Tensor, positions: Tensor, kind: str | None = None) -> Any:
        if self.positions is None:
            return super().rotate(x, positions, kind)
        return self.decoder.rotary_emb(x, self.positions[:, :, : x.shape[1]])


class _QwenVision(_Pictured, Qwen):
    embedding_name = "model.language_model.embed_tokens.weight"


class _Glm4vVision(_Pictured, Glm4v):
    pass


class _StepVision(_Pictured, Step):
    pass


def vision_page(
    family: str, oracle: VisionOracle, ids: list[int], images: list[Any]
) -> ReleasedMTP:
    """The page of a family's MTP layers after a prompt with images."""
    if family == "step3p7":
        return _StepVision(oracle, ids, images, 2)
    kind = _Glm4vVision if family == "glm4v_moe" else _QwenVision
    return kind(oracle, ids, images)
