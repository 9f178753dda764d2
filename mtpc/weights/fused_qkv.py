"""Query, key and value projections that a checkpoint stores as one tensor, read as three.

MiMo-V2.5 and later store `qkv_proj.weight` in chunks, one for each of the ranks that it was made
for: the rows of a chunk are its queries', then its keys', then its values'. config.json says so by
`attention_projection_layout`, and has as many chunks as `num_key_value_heads`. Source: vLLM's and
SGLang's loaders (mimo_v2.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpc.errors import CheckpointError
from mtpc.weights.json_file import QKV_LAYOUT
from mtpc.weights.tensor_file import StoredTensor

_FUSED = re.compile(r"(?P<stem>.*\blayers\.(?P<layer>\d+)\.self_attn\.)qkv_proj\.weight")


@dataclass(frozen=True)
class QkvRows:
    """One projection within a fused tensor: its rows, as [start, stop), one run for each chunk."""

    fused: str
    runs: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.runs)


def qkv_chunks(config: Mapping[str, Any]) -> int:
    """Number of chunks of fused projections by a language model's config; 0: none are fused.

    Raises:
        CheckpointError: the config names another layout.
    """
    layout = config.get(QKV_LAYOUT) or "split"
    if layout not in ("split", "fused_qkv"):
        raise CheckpointError(
            f"config.json has {QKV_LAYOUT} {layout!r}; expected 'split' or 'fused_qkv'"
        )
    return int(config["num_key_value_heads"]) if layout == "fused_qkv" else 0


def find_fused_qkv(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, QkvRows]:
    """Name of each projection -> its rows in a fused tensor.

    Raises:
        CheckpointError: a fused tensor has another number of rows than the config announces.
    """
    chunks, found = qkv_chunks(config), {}
    for name, stored in tensors.items() if chunks else ():
        match = _FUSED.fullmatch(name)
        if match is None or not name.startswith("model."):
            continue
        # Rows of queries, keys and values in each chunk.
        layer = int(match["layer"])
        pattern = config.get("hybrid_layer_pattern") or ()
        slides = ".mtp." in name or (layer < len(pattern) and pattern[layer] == 1)
        prefix = "swa_" if slides else ""
        heads, kv_heads, width, v_width = (
            int(config.get(prefix + key) or config[key])
            for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        )
        counts = heads // chunks * width, kv_heads // chunks * width, kv_heads // chunks * v_width
        if stored.shape[0] != chunks * sum(counts):
            raise CheckpointError(
                f"{name} is {stored}; expected {chunks} chunks of {counts[0]} + {counts[1]} + "
                f"{counts[2]} rows, as config.json announces"
            )
        begin = 0
        for part, count in zip(("q_proj", "k_proj", "v_proj"), counts, strict=True):
            starts = [chunk * sum(counts) + begin for chunk in range(chunks)]
            runs = tuple((start, start + count) for start in starts)
            found[f"{match['stem']}{part}.weight"] = QkvRows(name, runs)
            begin += count
    return found
