#!/usr/bin/env bash
# Makes a virtual environment in which SGLang runs without a GPU, under Triton's interpreter:
#
#     tests/peers/sglang_setup.sh VENV
#
# SGLang's own requirements name CUDA libraries of many gigabytes and one build of torch; so it is
# installed without them, and beside it what its serving path imports. mtpc is installed from this
# checkout, with its plugin's entry points.
set -euo pipefail

venv=${1:?usage: tests/peers/sglang_setup.sh VENV}
root=$(cd "$(dirname "$0")/../.." && pwd)
host=sglang==0.5.23

[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

# From the index of CPU builds where there is one; the plain index serves too, with CUDA libraries.
pip torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
pip transformers==5.19.0 triton==3.9.0
pip --no-deps "$host" gguf compressed-tensors==0.18.0
pip aiohttp anthropic apache-tvm-ffi blobfile cloudpickle distro einops fastapi interegular \
    ipython llguidance loguru mistral_common msgspec ninja numba openai openai-harmony orjson \
    partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic python-dateutil \
    python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken uvicorn uvloop \
    watchfiles xgrammar xxhash zstandard
pip --no-deps --editable "$root"
"$venv/bin/python" -c 'import sglang, torch; print("sglang", sglang.__version__, "torch", torch.__version__)'
