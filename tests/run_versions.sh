#!/usr/bin/env bash
# The families' tests under the oldest and the newest supported torch and transformers: the theorem,
# the drafts' oracles, each family's own tests, operators, loading and saving. Makes an environment
# for each, under MTPC_VERSIONS_DIR; arguments go to pytest (-m '' takes the slow ones, too).
set -euo pipefail
cd "$(dirname "$0")/.."

environments=${MTPC_VERSIONS_DIR:-.venv-versions}
for versions in "2.11.0 5.17.0" "2.14.1 5.24.0" "2.15.0 5.24.0"; do
    read -r torch transformers <<<"$versions"
    venv=$environments/torch-$torch-transformers-$transformers
    if [ ! -x "$venv/bin/pytest" ]; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install -q "torch==$torch" "transformers==$transformers" -e '.[dev]'
    fi
    echo "torch $torch, transformers $transformers"
    # -W default: what these versions deprecate is no error here.
    "$venv/bin/python" -m pytest -W default tests/test_theorem.py tests/models tests/weights tests/ops \
        tests/program/test_bad_input.py "$@"
done
