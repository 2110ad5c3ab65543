# Sourced by eval.sh and test.sh. Sets $PYTHON to the interpreter of .venv, with the packages of the requirement files.
#
# .venv is made on first use, and brought up to date when a requirement file has changed. With PYTHON=/path/to/python in
# the environment, that interpreter is used as it is.

environment() {
    if [ -n "${PYTHON:-}" ]; then return; fi
    PYTHON=.venv/bin/python
    local files=() changed="" file
    for file in "$@"; do
        files+=(-r "$file")
        cmp -s "$file" ".venv/installed-${file//\//-}" || changed="$file"
    done
    if [ -x "$PYTHON" ] && [ -z "$changed" ]; then return; fi
    local base=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            base="$candidate"
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "error: Python 3.11 or later is needed, and none is on the PATH" >&2
        exit 2
    fi
    if [ ! -x "$PYTHON" ]; then
        echo "setting up .venv with $($base --version) (once; torch is a large download)" >&2
        if ! "$base" -m venv .venv; then
            rm -rf .venv
            echo "error: could not make .venv; on Debian and Ubuntu: apt install python3-venv" >&2
            exit 2
        fi
    else
        echo "bringing .venv up to date" >&2
    fi
    # uv makes environments without pip
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1 && ! "$PYTHON" -m ensurepip >/dev/null 2>&1 &&
        ! uv pip install --quiet --python "$PYTHON" pip 2>/dev/null; then
        echo "error: .venv has no pip, ensurepip or uv; install pip there, or use .venv as it is: export PYTHON=$PYTHON" >&2
        exit 2
    fi
    if ! "$PYTHON" -m pip install --quiet --disable-pip-version-check "${files[@]}"; then
        echo "error: installing $* failed (see above); with a network, run the same command again" >&2
        exit 2
    fi
    for file in "$@"; do cp "$file" ".venv/installed-${file//\//-}"; done
}
