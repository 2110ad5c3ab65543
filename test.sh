#!/usr/bin/env bash
# bash test.sh                      lint, types, tests; no GPU and no download of models or data
# bash test.sh --slow               the tests that take long: processes that are killed, whole experiments
# bash test.sh --kernels            the attention kernel in Triton's interpreter, on a CPU (downloads 0.2 GB)
# bash test.sh --versions           the library's tests on the oldest and the newest torch and transformers (downloads 6 GB)
# bash test.sh [pytest arguments]   lint, types, and the tests that these choose
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/environment.sh
environment requirements.txt tests/requirements.txt requirements-cluster.txt
# A worker a core, at most four; one thread each, as toy sizes gain nothing from more and would wait for each other.
export PYTHON OMP_NUM_THREADS=1
tests=("$PYTHON" -m pytest -n auto --maxprocesses 4 --dist worksteal) # a file stays with a worker, and so do its fixtures
if [ "$*" = --slow ]; then exec "${tests[@]}" -m slow; fi
if [ "$*" = --kernels ]; then
    [ -d .kernels ] || "$PYTHON" -m pip install --quiet --no-deps --target .kernels -r tests/requirements-kernels.txt
    TRITON_INTERPRET=1 PYTHONPATH=.kernels exec "${tests[@]}" tests/model/engine/test_tree_kernel.py
fi
if [ "$*" = --versions ]; then
    oldest=$(grep -oE '(torch|transformers)>=[0-9.]+' pyproject.toml | sed 's/>=\(.*\)/==\1.*/')
    others=$(grep -vE '^(torch|transformers|huggingface_hub)==' requirements.txt)
    failed=0
    for which in oldest newest; do
        [ $which = oldest ] && pair=$oldest || pair=$'torch\ntransformers'
        "$PYTHON" -m venv ".versions/$which"
        ".versions/$which/bin/python" -m pip install --quiet --upgrade -r tests/requirements.txt \
            -r <(printf '%s\n' "$pair" "$others")
        ".versions/$which/bin/python" -c 'import torch, transformers as t; print("torch", torch.__version__, "transformers", t.__version__)'
        tests[0]=".versions/$which/bin/python"
        "${tests[@]}" -m "not slow" tests/model || failed=1
    done
    exit $failed
fi
"$PYTHON" -m ruff check --quiet .
"$PYTHON" -m ruff format --check --quiet . || { echo "error: not formatted; run: $PYTHON -m ruff format ." >&2; exit 1; }
"$PYTHON" -m mypy --no-error-summary
if [ $# -gt 0 ]; then exec "${tests[@]}" "$@"; fi
"${tests[@]}" -m "not slow"
# Next to the environment and not in it: transformers imports torchao wherever it is installed.
[ -d .extras ] || "$PYTHON" -m pip install --quiet --no-deps --target .extras -r tests/requirements-quantize.txt ||
    echo "warning: torchao could not be installed (see above): model.quantize is not tested" >&2
PYTHONPATH=.extras exec "$PYTHON" -m pytest tests/model/weights/test_quantization.py
