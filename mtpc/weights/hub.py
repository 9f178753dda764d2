"""Ids of the Hugging Face hub: the directory of a model in the local hub cache.

`HF_HUB_CACHE` says where the cache is. What it lacks is downloaded
(`mtpc.weights.download`), unless `HF_HUB_OFFLINE` is set; what it has needs no connection.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Literal

from mtpc.errors import CheckpointError
from mtpc.weights.checkpoint_files import is_directory, weight_files
from mtpc.weights.json_file import CONFIG

ADAPTER = "adapter_config.json"
_PICKLED = "pytorch_model*.bin"
_PART = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"(?P<name>{_PART}/{_PART})(:(?P<end>[\w.-]+))?|{_PART}", re.ASCII)
Needs = Literal["all", "config", "cached"]
"""What of a model is needed: all; what describes it; or what of it the hub cache has."""


def demo() -> Path:
    """The directory of the demo model, a small one with MTP layers: `mtpc.compile(mtpc.demo())`.

    Raises:
        CheckpointError: this installation has no demo model.
    """
    directory = Path(str(resources.files("mtpc") / "demo"))
    if not (directory / CONFIG).is_file():
        raise CheckpointError(
            f"this installation has no demo model in {directory}; name a checkpoint directory, or "
            "make the demo model with examples/train_demo_model.py"
        )
    return directory


def find_directory(source: str | Path, revision: str | None = None, needs: Needs = "all") -> Path:
    """The directory of a checkpoint: `source` itself, or the snapshot of that id in the hub cache.

    A model that the cache lacks, or of which it has a part, is downloaded.

    Args:
        source: a path; an id such as "XiaomiMiMo/MiMo-7B-Base"; or an id and the end of the name of
            a GGUF file there, "ORG/NAME:Q4_K_M". A directory comes first.
        revision: branch, tag or commit of an id; None is "main".
        needs: what must be there.

    Returns:
        The snapshot of an id, or the GGUF file; `source` if it has not the form of an id, whether
        it exists or not.

    Raises:
        CheckpointError: the hub cache lacks the model, and it cannot be downloaded; or the system
            refuses the path.
    """
    path, text = Path(source), str(source)
    match = _ID.fullmatch(text)
    if is_directory(path) or match is None or path.exists():
        return path
    from huggingface_hub.errors import HFValidationError

    try:
        if match["end"]:
            from mtpc.weights.download import find_gguf_model  # Not above: few starts download.

            return find_gguf_model(match["name"], match["end"], revision)
        return _find_snapshot(text, revision, needs) or path
    except HFValidationError:  # It looks like an id, but is not one.
        return path


def _find_snapshot(name: str, revision: str | None, needs: Needs) -> Path | None:
    """The snapshot of a model; None if there is none and none is to be downloaded.

    Raises:
        CheckpointError, HFValidationError: as `mtpc.weights.download.download`.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    here = Path(found).parent if isinstance(found, str) else None
    lacks = here is None or (needs == "all" and not _is_whole(here))
    if not lacks or needs == "cached" or "/" not in name:
        return here
    if here is not None and constants.HF_HUB_OFFLINE:
        return here  # Who reads it says what it lacks.
    from mtpc.weights.download import download

    return download(name, revision, needs == "all")


def _is_whole(directory: Path) -> bool:
    files = weight_files(directory)
    return bool(files) and all(map(os.path.isfile, files))


def no_checkpoint(path: Path) -> CheckpointError:
    """The error for a path that leads to no checkpoint."""
    hint = f": give its directory, {path.parent}" if path.is_file() else ""
    return CheckpointError(
        f"{str(path)!r} is not a directory; expected a local checkpoint with config.json and "
        f"*.safetensors, a GGUF file, or an id of the hub (ORG/NAME){hint}"
    )


def hub_id(path: Path) -> str | None:
    """The id of the model of which a path is the snapshot in the hub cache, or within it; or None.

    Snapshots are `models--ORG--NAME/snapshots/COMMIT`.
    """
    for place in (path, *path.parents):
        folder = place.parent.parent.name
        if place.parent.name == "snapshots" and folder.startswith("models--"):
            return folder.removeprefix("models--").replace("--", "/")
    return None


def what_to_do(directory: Path) -> str:
    """What to do with a directory that lacks config.json or weights in safetensors files."""
    here = json.dumps(str(directory), ensure_ascii=False)  # Python reads it, too.
    merged = json.dumps(f"{directory}-merged", ensure_ascii=False)
    if (directory / ADAPTER).is_file():
        code = (
            "from peft import AutoPeftModelForCausalLM as Model; "
            f"Model.from_pretrained({here}).merge_and_unload().save_pretrained({merged})"
        )
        return (
            f"it is a LoRA adapter ({ADAPTER}): merge it with its base: pip install peft, and run: "
            f"python -c {shlex.quote(code)}; then put the tokenizer's files beside the result, and "
            f"MTP layers back into it: mtpc graft BASE {directory}-merged OUT"
        )
    if next(directory.glob(_PICKLED), None):
        code = (
            "import pathlib, torch; from safetensors.torch import save_file; [save_file("
            '{n: t.clone().contiguous() for n, t in torch.load(f, "cpu", weights_only=True).items()'
            '}, f.with_suffix(".safetensors"), {"format": "pt"}) for f in '
            f'pathlib.Path({here}).glob("{_PICKLED}")]'
        )
        return f"its weights are in {_PICKLED}: convert them, by: python -c {shlex.quote(code)}"
    for path in (*directory.glob(f"*/{CONFIG}"), *directory.glob(f"snapshots/*/{CONFIG}")):
        return f"{path.parent} has one: give that"
    return download_again(directory)


def download_again(directory: Path) -> str:
    """What to do if files of a checkpoint are missing or damaged."""
    name = hub_id(directory)
    return f"run: hf download {name}" if name else "copy or download the checkpoint again"
