#!/usr/bin/env bash
# Run NVIDIA's aiperf, unmodified, against the demo: 200 streaming chat requests at concurrency 16, no error allowed.
# It is installed into a .venv-aiperf of its own (about 800 MB), apart from llmserve's.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
if [ ! -x .venv-aiperf/bin/aiperf ]; then
    "${PYTHON:-python3}" -m venv .venv-aiperf
    .venv-aiperf/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0
fi
port=${PORT:-8123}
out=${OUT_DIR:-.out/aiperf}
mkdir -p "$out"
.venv/bin/llmserve serve demo --prefill 1 --decode 1 --port "$port" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
for _ in $(seq 300); do
    curl --silent --fail "http://127.0.0.1:$port/ready" >/dev/null && break
    sleep 0.2
done
.venv-aiperf/bin/aiperf profile --model demo --url "http://127.0.0.1:$port" --endpoint-type chat --streaming \
    --tokenizer "$PWD/llmserve/demo" --concurrency 16 --request-count 200 \
    --synthetic-input-tokens-mean 100 --output-tokens-mean 40 --ui simple --artifact-dir "$out"
.venv/bin/python - "$out" <<'EOF'
import json, pathlib, sys

lines = [json.loads(line) for file in pathlib.Path(sys.argv[1]).rglob("profile_export*.jsonl") for line in file.open()]
records = [line for line in lines if "metadata" in line]
errors = [record["error"] for record in records if record.get("error")]
print(f"aiperf: {len(records)} requests, {len(errors)} errors")
sys.exit(bool(errors) or len(records) < 200)
EOF
