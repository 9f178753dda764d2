#!/usr/bin/env bash
# The tests that need Triton, which torch's builds for the CPU do not bring along: kernels in
# Triton's interpreter (marker triton), then compiled for GPUs that need not be here (gpu_compile).
# Without --all the fast part runs: every kernel, in two cases of each test at most. With --all every
# case runs, the slow ones, too: before a change of a kernel is merged, and before a release. Other
# arguments go to pytest.
#
# PYTHON is the project's (`pip install -e '.[dev]'`). Where it has no Triton, that is installed
# beside it, into a folder of its own: Inductor behaves otherwise where it finds one.
set -euo pipefail
cd "$(dirname "$0")/.."

interpreted='triton and not slow' compiled='gpu_compile and not slow' cases=(--cases 2)
if [ "${1:-}" = --all ]; then
    # Tests that the default run has already, too: where Triton is there, they bind to it.
    interpreted='triton or with_triton' compiled='gpu_compile' cases=()
    shift
fi

# The interpreter multiplies by numpy, whose BLAS adds in an order that depends on the number of rows
# with its kernels for AVX2, which it also has for AMD. Those for AVX-512 do not, so they are used
# whatever the environment says.
if grep -qs avx512f /proc/cpuinfo; then
    export OPENBLAS_CORETYPE=SkylakeX
fi

python=${PYTHON:-python}
export PYTHONPATH=$PWD
if ! "$python" -c 'import triton' 2>/dev/null; then
    packages=${MTPC_TRITON_PACKAGES:-$PWD/.triton}
    [ -d "$packages" ] || "$python" -m pip install -q --no-deps --target "$packages" 'triton>=3.6,<3.10'
    export PYTHONPATH=$PYTHONPATH:$packages
fi

if [ $# = 0 ]; then
    # Files without a marker need not be collected.
    marked=$(grep -rlE 'pytest\.mark\.(triton|with_triton|gpu_compile)' tests --include='test_*.py')
    TRITON_INTERPRET=1 "$python" -m pytest -m "$interpreted" "${cases[@]}" $marked
    "$python" -m pytest -m "$compiled" $marked
    exit
fi

# A file or an expression among the arguments may leave nothing to one of the two runs.
nothing=5
TRITON_INTERPRET=1 "$python" -m pytest -m "$interpreted" "$@" || [ $? = $nothing ]
"$python" -m pytest -m "$compiled" "$@" || [ $? = $nothing ]
