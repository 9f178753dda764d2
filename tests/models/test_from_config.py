"""A model of config.json alone is the model of the headers: names, shapes, dtypes, state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny
from helpers.families import ASSISTED, DRAFTED
from torch import Tensor

from mtpc.errors import CheckpointError
from mtpc.models.from_config import load_config, load_shapes
from mtpc.models.load import LoadedModel

WITH_LAYERS = [
    name for name in tiny.CONFIGS if "@" not in name and name not in (*DRAFTED, *ASSISTED)
]


@pytest.mark.parametrize("family", WITH_LAYERS)
def test_a_config_says_what_the_headers_say(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """But for an embedding and a head that the checkpoint stores with an MTP layer."""
    source = checkpoint(family, "random")
    headers = load_shapes(source, None, needs_mtp=True)
    shutil.copy(source / "config.json", tmp_path)
    config = load_shapes(tmp_path, None, needs_mtp=True)
    assert (headers.has_headers, config.has_headers) == (True, False)
    assert all(tensor.is_meta for tensor in parameters(config.loaded).values())
    assert forms(config.loaded) == forms(headers.loaded)
    assert config.loaded.state_specs == headers.loaded.state_specs


def parameters(loaded: LoadedModel) -> dict[str, Tensor]:
    """Parameters by their names in `LoadedModel.weights`."""
    roots = [("", loaded.target), *((f"mtp.{i}.", m) for i, m in enumerate(loaded.mtp_layers))]
    return {prefix + n: p for prefix, root in roots for n, p in root.named_parameters()}


def forms(loaded: LoadedModel) -> dict[str, object]:
    """Shapes and dtypes, without the ends of MTP layers."""
    return {
        name: (tensor.shape, tensor.dtype)
        for name, tensor in parameters(loaded).items()
        if name.split(".")[0] != "mtp" or name.split(".")[2] not in ("embedding", "head")
    }


def test_what_a_config_lacks(tmp_path: Path) -> None:
    for text, said in (
        (None, "has no config.json; expected a checkpoint's directory"),
        ("{", "config.json"),
        ('{"architectures": ["MiMoForCausalLM"], "hidden_size": 1e9}', "config.json"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=said):
            load_config(tmp_path, None, needs_mtp=True)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_config(tmp_path / "nowhere", None, needs_mtp=True)
