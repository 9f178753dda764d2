"""LLAMA_CPP CHECKPOINT OUT: convert a tiny checkpoint by llama.cpp's own code, to BF16.

The vocabulary is the first bytes, because tiny checkpoints have no tokenizer. config.json is read
as it is: transformers would rename entries that the converter looks up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(llama: str, checkpoint: str, out: str) -> None:
    sys.path[:0] = [llama, f"{llama}/gguf-py"]
    import gguf
    import torch
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, get_model_architecture
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    def read_config(directory: Any, *_: Any, **__: Any) -> Any:
        return json.loads((Path(directory) / "config.json").read_text())

    def set_vocabulary(self: Any) -> None:
        writer, count = self.gguf_writer, self.hparams["vocab_size"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([bytes_to_unicode()[i] for i in range(count)])
        writer.add_token_types([gguf.TokenType.NORMAL] * count)
        writer.add_token_merges([])
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(0)

    ModelBase.load_hparams = staticmethod(read_config)
    kind = get_model_architecture(read_config(checkpoint), ModelType.TEXT)
    family = get_model_class(kind)
    family.set_vocab = set_vocabulary
    with torch.inference_mode():
        form = gguf.LlamaFileType.MOSTLY_BF16
        family(Path(checkpoint), form, Path(out), eager=True).write()


if __name__ == "__main__":
    main(*sys.argv[1:])
