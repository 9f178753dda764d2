"""The decoders of other engines that a command line asks for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.decoders import Decoder
from benchmarks.harness.sampling import Tell
from benchmarks.peers.llama_decoder import LlamaDecoder, llama_decoders
from benchmarks.peers.vllm_decoder import VllmDecoder, vllm_decoders


def peer_decoders(
    args: argparse.Namespace,
    checkpoint: Path,
    numbers: Sequence[int],
    sizes: tuple[int, int],
    tell: Tell,
    kinds: Sequence[str] = ("BF16",),
    llama: type[LlamaDecoder] = LlamaDecoder,
    vllm: type[VllmDecoder] = VllmDecoder,
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
        llama: what decodes with llama.cpp.
        vllm: what decodes with vLLM.
        **more: options of `vllm.LLM`.
    """
    if args.llama_bench:
        tell("write GGUF files")
        yield from llama_decoders(args.llama_bench, args.gguf_python, checkpoint, kinds, llama)
    for k in numbers if args.vllm_python else ():
        tell(f"start vLLM K={k}")
        place = (args.vllm_python, checkpoint, (k,), *sizes, checkpoint.parent)
        yield from vllm_decoders(*place, decoder=vllm, **more)
