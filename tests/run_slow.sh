#!/usr/bin/env bash
# The suites too slow for every commit: many more examples of the theorem, every K compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m pytest -m slow "$@"
