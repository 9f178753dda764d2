"""Ids of the Hugging Face hub: the directory of a model in the local hub cache.

mtpc opens no connection. `hf download ID` fills the cache, and `HF_HUB_CACHE` says where it is.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib import resources
from pathlib import Path

from mtpc.errors import CheckpointError
from mtpc.weights.json_file import CONFIG

ADAPTER = "adapter_config.json"
_PICKLED = "pytorch_model*.bin"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


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


def find_directory(source: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint: `source` itself, or the snapshot of that id in the hub cache.

    Args:
        source: a path, or an id such as "XiaomiMiMo/MiMo-7B-Base". A directory comes first.
        revision: branch, tag or commit of an id; None is "main".

    Returns:
        The snapshot of an id; `source` if it has not the form of an id, whether it exists or not.

    Raises:
        CheckpointError: the hub cache lacks the id; or the system refuses the path.
    """
    path, name = Path(source), str(source)
    if is_directory(path) or not _ID.fullmatch(name) or path.exists():
        return path
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG, revision=revision)
    except HFValidationError:  # It looks like an id, but is not one.
        return path
    if isinstance(found, str):
        return Path(found).parent
    if "/" not in name:
        return path
    at = f" at revision {revision}" if revision else ""
    raise CheckpointError(
        f"{name!r} is not a directory, and the hub cache {constants.HF_HUB_CACHE} has no model of "
        f"that id{at}; expected a local checkpoint with config.json and *.safetensors (mtpc "
        f"downloads nothing): correct the path, or run: hf download {name}"
    )


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory.

    Raises:
        CheckpointError: the system refuses the path: it is too long, or may not be searched.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise CheckpointError(
            f"cannot open the checkpoint {str(path)[:200]!r}: {error.strerror}; expected the path "
            "of a directory that this user may read"
        ) from None


def no_checkpoint(path: Path) -> CheckpointError:
    """The error for a path that leads to no checkpoint."""
    hint = f": give its directory, {path.parent}" if path.is_file() else ""
    return CheckpointError(
        f"{str(path)!r} is not a directory; expected a local checkpoint with config.json and "
        f"*.safetensors, or a GGUF file (mtpc downloads nothing){hint}"
    )


def hub_id(directory: Path) -> str | None:
    """The id of a snapshot in the hub cache, `models--ORG--NAME/snapshots/COMMIT`, or None."""
    folder = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/")


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
