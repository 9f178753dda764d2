"""The decoders of other engines that a command line asks for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.decoders import Decoder
from benchmarks.harness.rounds import Tell
from benchmarks.peers.llama_decoder import LlamaDecoder, LlamaFiles
from benchmarks.peers.vllm_decoder import VllmDecoder


def peer_decoders(
    args: argparse.Namespace,
    checkpoint: Path,
    numbers: Sequence[int],
    sizes: tuple[int, int],
    tell: Tell,
    kinds: Sequence[str] = ("BF16",),
    **more: Any,
) -> Iterator[Decoder]:
    """llama.cpp with each type of file, and vLLM with each K, if their options are given.

    Each starts when the iteration reaches it.

    Args:
        args: has the options `command.PEERS`.
        checkpoint: directory of the checkpoint; files, caches and logs go beside it.
        numbers: K of vLLM; llama.cpp decodes plainly.
        sizes: the most tokens of a request, and the most concurrent requests.
        tell: hears what is started.
        kinds: of llama.cpp's files.
        **more: options of `vllm.LLM`.
    """
    if args.llama_bench:
        tell("write GGUF files")
        files = LlamaFiles(args.llama_bench, args.gguf_python, checkpoint, checkpoint / "gguf")
        for kind in kinds:
            threads = torch.get_num_threads()
            yield LlamaDecoder(args.llama_bench, files.write(kind), kind, threads)
    for k in numbers if args.vllm_python else ():
        tell(f"start vLLM K={k}")
        kept = checkpoint.parent / "vLLM"
        yield VllmDecoder(args.vllm_python, checkpoint, k, *sizes, kept, **more)
