"""Metadata of a GGUF file, checked as they are read."""

from __future__ import annotations

from typing import Any

from mtpc.errors import CheckpointError
from mtpc.weights.gguf.header import Header


class Metadata:
    """Metadata of a model by their names in gguf's `Keys`, without the architecture.

    Args:
        header: of the file.
    """

    def __init__(self, header: Header):
        self.header = header
        self.arch = str(header.metadata.get("general.architecture"))
        self.tensors = header.tensors

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.arch}.{name}", default)

    def number(self, name: str) -> Any:
        """A number that must be there.

        Raises:
            CheckpointError: it is not.
        """
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, "a number")
        return value

    def size(self, name: str) -> int:
        """A positive whole number that must be there."""
        value = self.number(name)
        if not isinstance(value, int) or value <= 0:
            raise self.error(name, "a positive size")
        return value

    def row(self, name: str) -> list[int]:
        """Positive sizes, one for each block, or one for all."""
        value = self.get(name)
        found = value if isinstance(value, list) and value else [self.size(name)]
        if not all(isinstance(one, int) and one > 0 for one in found):
            raise self.error(name, "positive sizes")
        return found

    def flags(self, name: str) -> list[bool]:
        """Flags, one for each block.

        Raises:
            CheckpointError: the file has no such list.
        """
        value, count = self.get(name), self.layers + self.mtp_layers
        if not isinstance(value, list) or len(value) != count or {*value} - {0, 1}:
            raise self.error(name, f"{count} flags")
        return [bool(one) for one in value]

    def error(self, name: str, expected: str) -> CheckpointError:
        value = self.get(name)
        found = "missing" if value is None else f"{value!r:.200}"
        return CheckpointError(
            f"{self.header.path}: {self.arch}.{name} is {found}; expected {expected}: convert the "
            "model again with a newer llama.cpp"
        )

    @property
    def mtp_layers(self) -> int:
        return int(self.get("nextn_predict_layers", 0))

    @property
    def layers(self) -> int:
        """Layers of the target; the file counts MTP layers as blocks."""
        count = self.size("block_count") - self.mtp_layers
        if not 0 < count <= len(self.tensors) or self.mtp_layers < 0:
            raise CheckpointError(
                f"{self.header.path}: {self.arch}.block_count is {self.get('block_count')} and "
                f"nextn_predict_layers {self.mtp_layers}, and the file has {len(self.tensors)} "
                "tensors; expected a tensor or more for each block"
            )
        return count

    def has(self, layer: int, leaf: str) -> bool:
        return f"blk.{layer}.{leaf}" in self.tensors

    def rows(self, name: str) -> int:
        """Rows of a tensor that must be there."""
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"{self.header.path} has no {name}; expected the tensors of one whole model"
            )
        return stored.shape[0]
