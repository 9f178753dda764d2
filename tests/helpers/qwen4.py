"""Qwen4-Exp's tiny model, and its checkpoint as the authors write it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

EOS = 33
"""A token within five of the theorem's prompts: n-grams do not reach over it."""
CONFIG: dict[str, Any] = dict(
    layer_types=["linear_attention", "indexed_attention"],
    eos_token_id=EOS,
    mtp_num_hidden_layers=1,
    output_gate_type="sigmoid",
    hc_count=3,
    hc_lowrank=16,
    ple_layer_ids=[1],
    ple_embed_dim=24,
    ple_conv_kernel_size=3,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    make_ngram_vocab_size_divisible_by=16,
    split_ngram_parts=4,
    indexer_n_heads=16,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=4,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
)
"""A row attends to two blocks of four tokens, and to its open block: from 9 tokens on it leaves
some out. The convolution reaches six tokens back, over the edge of a page of four."""
RELEASED: dict[str, Any] = {
    "rope_parameters": {"rope_theta": 2.5e4, "rope_type": "default"},
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mtp": {
        "hybrid": True,
        "layer_types": ["full_attention"],
        "mtp_use_hidden_state_from_layer": None,
        "num_hidden_layers": 1,
        "rope_theta": 2.5e4,
    },
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "dtype": "float32",
}
"""Entries of the authors' config.json, within its `text_config`."""


def as_released(source: Path, directory: Path) -> Path:
    """A copy whose text model stands inside a multimodal one, in names and config.json.

    Its MTP tensors keep their names.
    """
    shutil.copytree(source, directory)
    path = directory / "model.safetensors"
    start, inside = "model.", "model.language_model."
    tensors = {
        name.replace(start, inside, 1) if name.startswith(start) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    text = {**text, **RELEASED, "rope_parameters": CONFIG["rope_parameters"]}
    del text["architectures"]
    whole = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": {**text, "model_type": "qwen4_exp_text"},
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(whole))
    return directory
