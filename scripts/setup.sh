#!/usr/bin/env bash
# Make .venv and install llmserve into it. Without an NVIDIA GPU: CPU PyTorch, no CUDA packages.
# Usage: scripts/setup.sh [extra ...]      extras of pyproject.toml, e.g. "test" ("cuda" is added where there is a GPU)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" - <<'EOF' || { echo "llmserve needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
EOF

extras=("$@")
gpu=no
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    gpu=yes
    extras+=(cuda)
fi
extra_list=$(IFS=,; echo "${extras[*]:-}")

# Installed already, from the same pyproject.toml and constraints? Then there is nothing to do.
stamp=$(cat pyproject.toml .constraints.txt scripts/setup.sh | cksum | cut -d' ' -f1)-$extra_list-$gpu
if [ -x .venv/bin/python ] && [ "$(cat .venv/.llmserve-stamp 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

echo "setting up .venv (extras: ${extra_list:-none}; GPU: $gpu) ..." >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
if [ "$gpu" = yes ]; then
    "${pip[@]}" -e ".[$extra_list]"
else
    # First PyTorch alone, from the pinned version: a plain "torch" would bring gigabytes of CUDA.
    if ! "${pip[@]}" -c .constraints.txt torch 2>/tmp/llmserve-setup.$$; then
        cat /tmp/llmserve-setup.$$ >&2
        exit 1
    fi
    rm -f /tmp/llmserve-setup.$$
    "${pip[@]}" -c .constraints.txt -e ".${extra_list:+[$extra_list]}"
fi
echo "$stamp" > .venv/.llmserve-stamp
