#!/usr/bin/env bash
# See the whole disaggregated system work: router, prefiller and decoder as separate processes, on the embedded model.
#   scripts/demo.sh            ask one question, stream the answer, show who did what, exit
#   scripts/demo.sh --serve    stay up as an OpenAI-compatible server on http://127.0.0.1:8000/v1
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
if [ "${1:-}" = "--serve" ]; then
    shift
    exec .venv/bin/llmserve serve demo --prefill 1 --decode 1 --port 8000 "$@"
fi
exec .venv/bin/python scripts/demo.py "$@"
