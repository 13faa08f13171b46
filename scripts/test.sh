#!/usr/bin/env bash
# Set up and run everything that CI runs: style, types, unit tests, then the long tests.
#   scripts/test.sh            all of it
#   scripts/test.sh -k stop    arguments go to pytest (then only that runs)
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
if [ "$#" -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
.venv/bin/python -m pytest -q -m "not gpu"
