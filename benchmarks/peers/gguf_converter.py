"""Converts a checkpoint without a tokenizer to a bfloat16 GGUF file, with llama.cpp's converter.

    python -m benchmarks.peers.gguf_converter SOURCES CHECKPOINT FILE

The file includes MTP layers. SOURCES is the directory of llama.cpp's sources, because no package
has the converter. The vocabulary is that of `gguf_writer`; the ids of its BOS and EOS tokens are
those of config.json, where it has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(sources: str, checkpoint: str, file: str) -> None:
    """Convert the checkpoint."""
    if not (Path(sources) / "conversion").is_dir():
        raise SystemExit(f"{sources} has no directory conversion; expected llama.cpp's sources")
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import torch
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, get_model_architecture
    from gguf import LlamaFileType

    from benchmarks.peers.gguf_writer import add_vocabulary

    def read_config(directory: Any, *_: Any, **__: Any) -> Any:
        # Not by transformers, which would rename entries that the converter looks up.
        return json.loads((Path(directory) / "config.json").read_text())

    def set_vocabulary(self: Any) -> None:
        writer = self.gguf_writer
        add_vocabulary(writer, self.hparams["vocab_size"])
        for name in ("bos_token_id", "eos_token_id"):
            if isinstance(self.hparams.get(name), int):
                getattr(writer, f"add_{name}")(self.hparams[name])

    ModelBase.load_hparams = staticmethod(read_config)
    family = get_model_class(get_model_architecture(read_config(checkpoint), ModelType.TEXT))
    family.set_vocab = set_vocabulary
    with torch.inference_mode():
        family(Path(checkpoint), LlamaFileType.MOSTLY_BF16, Path(file), eager=True).write()


if __name__ == "__main__":
    main(*sys.argv[1:])
