"""Writes a checkpoint of benchmarks.harness.models ("mimo") as a bfloat16 GGUF file for llama.cpp.

    python benchmarks/peers/gguf_writer.py CHECKPOINT FILE

It runs in an environment with numpy and gguf, without torch and mtpc. It writes the target only;
for llama.cpp, MiMo's target is a Qwen2 model. Prompts are token ids, so the vocabulary is
artificial.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of modules outside and inside of a layer: transformers' name to llama.cpp's name."""
BYTES = 256
"""The number of byte tokens at the start of a GPT-2 vocabulary."""


def main(checkpoint: str, file: str) -> None:
    """Write the file."""
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    if config["model_type"] not in ("mimo", "qwen2"):
        raise SystemExit(f"{checkpoint} is a {config['model_type']}; expected MiMo or Qwen2")
    writer = gguf.GGUFWriter(file, "qwen2")
    _add_sizes(writer, config)
    add_vocabulary(writer, config["vocab_size"])
    for name, data in _tensors(Path(checkpoint) / "model.safetensors"):
        renamed = _rename(name)
        if renamed is None:
            continue
        if data.ndim == 1:  # llama.cpp needs vectors in float32.
            writer.add_tensor(renamed, (data.astype(np.uint32) << 16).view(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(renamed, np.ascontiguousarray(data).view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config.get("max_position_embeddings") or 4096)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta") or 10000.0)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write the 256 byte characters, and fillers up to the size."""
    # GPT-2 represents unprintable bytes by the characters from 256 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(code) for code in (*plain, *range(BYTES, 2 * BYTES - len(plain)))]
    tokens += [f"<filler {index}>" for index in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_add_bos_token(False)


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The bfloat16 tensors of a safetensors file, as uint16 arrays."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    bits = np.memmap(path, np.uint8, mode="r", offset=8 + length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {entry['dtype']}; expected BF16")
        begin, end = entry["data_offsets"]
        yield name, bits[begin:end].view(np.uint16).reshape(entry["shape"])


def _rename(name: str) -> str | None:
    """llama.cpp's name of a tensor; None for a tensor of an MTP layer."""
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    first, layers, *rest = module.split(".", 3)
    if (first, layers) != ("model", "layers"):
        return None
    return f"blk.{rest[0]}.{INSIDE[rest[1]]}.{kind}"


if __name__ == "__main__":
    main(*sys.argv[1:])
