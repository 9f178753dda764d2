#!/usr/bin/env bash
# The tests that need Triton, which torch's builds for the CPU do not bring along: kernels in
# Triton's interpreter, then compiled for GPUs that need not be here. Makes an environment unless
# PYTHON names one that has torch, triton and the project's other dependencies. Arguments go to
# pytest: without any, the fast part runs, minutes on two cores, every kernel in it; -m '' runs all.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    venv=${MTPC_TRITON_VENV:-.venv-triton}
    if [ ! -x "$venv/bin/python" ]; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install -q 'torch>=2.11,<2.14' 'transformers>=5.17,<6' 'triton>=3.6,<3.10' \
            safetensors networkx sympy numpy rich pytest pytest-xdist hypothesis
    fi
    PYTHON=$venv/bin/python
fi
export PYTHONPATH=$PWD
TRITON_INTERPRET=1 "$PYTHON" -m pytest tests/test_triton_kernels.py tests/test_triton_latent.py tests/test_triton_delta.py \
    tests/test_triton_rotary.py tests/test_triton_norms.py tests/test_triton_choose_slots.py \
    tests/test_triton_sampling.py tests/test_triton_step.py tests/test_triton_tuning.py \
    tests/test_cuda_backend.py tests/test_aiter.py "$@"
exec "$PYTHON" -m pytest tests/test_triton_crosscompile.py tests/test_triton_loading.py "$@"
