#!/usr/bin/env bash
# The families' tests under the oldest and the newest supported torch and transformers: the theorem,
# the drafts' oracles, each family's own tests, loading and saving. Makes an environment for each,
# under MTPC_VERSIONS_DIR; arguments go to pytest (-m '' takes the slow ones, too).
set -euo pipefail
cd "$(dirname "$0")/.."

environments=${MTPC_VERSIONS_DIR:-.venv-versions}
for versions in "2.11.0 5.17.0" "2.13.0 5.23.0"; do
    read -r torch transformers <<<"$versions"
    venv=$environments/torch-$torch-transformers-$transformers
    if [ ! -x "$venv/bin/pytest" ]; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install -q "torch==$torch" "transformers==$transformers" -e '.[dev]'
    fi
    echo "torch $torch, transformers $transformers"
    "$venv/bin/python" -m pytest tests/test_theorem.py tests/models/test_drafts.py tests/models/test_recurrent.py \
        tests/models/test_chained_families.py tests/models/test_deepseek_v4.py tests/ops/test_gated_delta.py \
        tests/models/test_deepseek_v32.py tests/models/test_step3p5.py tests/models/test_memory.py tests/models/test_save.py \
        tests/ops/test_choose_slots.py tests/weights/test_block_scales.py tests/program/test_bad_input.py "$@"
done
