#!/usr/bin/env bash
# The suites too slow for every commit: many more examples of the theorem, every K, every family of a
# property that the default tests have for the families of other code, and whole commands and servers
# whose parts they have. tests/run_triton.sh --all is the same for Triton's kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m pytest -m slow "$@"
