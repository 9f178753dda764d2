#!/usr/bin/env bash
# Makes a virtual environment in which SGLang runs without a GPU, under Triton's interpreter:
#
#     tests/peers/sglang_setup.sh VENV
#
# SGLang's own requirements name CUDA libraries of many gigabytes; so it is installed without them,
# and beside it what its serving path imports, in the versions that it asks for. 7 GB, and fewer
# with torch's CPU build. mtpc is installed from this checkout, editable, with its entry points; so
# is the tests' plugin for CPUs.
set -euo pipefail

venv=${1:?usage: tests/peers/sglang_setup.sh VENV}
root=$(cd "$(dirname "$0")/../.." && pwd)

[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" --quiet; }

# From an index of CPU builds where one is named; another index may give CUDA libraries, unused.
pip install torch==2.14.1 torchvision==0.29.1 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
pip install triton==3.8.0 transformers==5.19.0 tokenizers==0.23.2 \
    aiohttp anthropic apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro einops \
    fastapi gguf interegular ipython llguidance mistral_common msgspec networkx ninja \
    numba==0.65.1 openai==2.8.0 openai-harmony==0.0.4 orjson partial_json_parser \
    prometheus-client psutil pybase64 pytest python-multipart pyzmq requests rich scipy \
    sentencepiece==0.2.1 setproctitle setuptools soundfile==0.13.1 tiktoken uvicorn uvloop \
    watchfiles xgrammar==0.2.7 xxhash
pip install --no-deps sglang==0.5.23
pip install --no-deps --editable "$root" --editable "$root/tests/peers/sglang_plugin_for_cpu"
TRITON_INTERPRET=1 "$venv/bin/python" - <<'END'
import sglang
import torch
from sglang.srt.entrypoints.engine import Engine

print("SGLang", sglang.__version__, "with torch", torch.__version__, "starts:", Engine.__name__)
END
