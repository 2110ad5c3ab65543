#!/usr/bin/env bash
# bash test.sh [pytest arguments]   lint, types, tests; no GPU and no download of models or data
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/environment.sh
environment requirements.txt tests/requirements.txt requirements-cluster.txt
"$PYTHON" -m ruff check --quiet .
"$PYTHON" -m ruff format --check --quiet . || { echo "error: not formatted; run: $PYTHON -m ruff format ." >&2; exit 1; }
"$PYTHON" -m mypy --no-error-summary
exec env PYTHON="$PYTHON" "$PYTHON" -m pytest "$@"
