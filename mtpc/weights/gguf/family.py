"""What a family of GGUF files declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpc.weights.gguf import configs, names
from mtpc.weights.gguf.configs import Metadata
from mtpc.weights.gguf.file import Change, Heads


@dataclass(frozen=True)
class Family:
    """A family of GGUF files.

    Attributes:
        architecture: transformers' name of the architecture.
        modules: leaf of a name in the file -> transformers' module, within a layer.
        config: entries of the config that only this family has.
        changes: leaf -> what the converter did to the tensor.
        shapes: leaf -> its sizes in transformers, given those in the file.
        mtp_prefix: (number of layers, index of the MTP layer) -> prefix of its tensors.
        mtp_block: prefix of its decoder block's tensors below that.
        mtp_modules: leaf -> module of an MTP layer, for modules that only it has or names
            otherwise.
        stacked: prefix of experts that transformers also stores as stacks; "" if one by one.
        stack_ends: ends of their names in the file -> those in transformers.
        experts: of experts one by one: {} stands for the number, and for the projection.
        projections: stack of experts -> the projection of one.
        ends: modules outside of the blocks.
        of_experts: the family of such files with experts, where that is another one.
    """

    architecture: str
    modules: names.Names
    config: Callable[[Metadata], dict[str, Any]]
    changes: Callable[[Metadata], Mapping[str, Change]] = lambda metadata: {}
    shapes: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = field(default_factory=dict)
    mtp_prefix: Callable[[int, int], str] = lambda layers, index: f"model.layers.{layers + index}."
    mtp_block: str = ""
    mtp_modules: names.Names = field(default_factory=lambda: names.NEXTN)
    stacked: str = ""
    stack_ends: Mapping[str, str] = field(
        default_factory=lambda: {"weight": ".weight", "bias": ".bias"}
    )
    experts: str = "mlp.experts.{}.{}"
    projections: names.Names = field(default_factory=lambda: names.STACKS)
    ends: names.Names = field(default_factory=lambda: names.ENDS)
    of_experts: Family | None = None


def llama_changes(of: Metadata) -> dict[str, Change]:
    """Llama's rows of a head that rotate together are neighbours in files."""
    heads = of.size("attention.head_count")
    counts = {"attn_q": heads, "attn_k": of.size("attention.head_count_kv", heads)}
    half = configs.head_width(of) // 2
    return {leaf: Change(rows=Heads(2, half, times=count)) for leaf, count in counts.items()}
