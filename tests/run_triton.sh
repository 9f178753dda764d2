#!/usr/bin/env bash
# The tests that need Triton, which torch's builds for the CPU do not bring along: kernels in
# Triton's interpreter, then compiled for GPUs that need not be here. Arguments go to pytest:
# without any, the fast part runs, every kernel in it; -m '' runs all.
#
# PYTHON is the project's (`pip install -e '.[dev]'`). Where it has no Triton, that is installed
# beside it, into a folder of its own: Inductor behaves otherwise where it finds one.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
export PYTHONPATH=$PWD
if ! "$python" -c 'import triton' 2>/dev/null; then
    packages=${MTPC_TRITON_PACKAGES:-$PWD/.triton}
    [ -d "$packages" ] || "$python" -m pip install -q --no-deps --target "$packages" 'triton>=3.6,<3.10'
    export PYTHONPATH=$PYTHONPATH:$packages
fi

files=()
for name in kernels quantised latent delta rotary norms choose_slots accept sampling step trial tuning; do
    files+=("tests/test_triton_$name.py")
done
# These run by default, too; where Triton is there, they bind to it.
[ $# -eq 0 ] || files+=(tests/test_cuda_backend.py tests/test_aiter.py)
TRITON_INTERPRET=1 "$python" -m pytest "${files[@]}" "$@"
exec "$python" -m pytest tests/test_triton_crosscompile.py tests/test_triton_loading.py "$@"
