#!/usr/bin/env bash
# Measures SGLang's paths on the GPU: bash benchmarks/gpu_sglang.sh [DIRECTORY for the results]
# Needs SGLang and this project installed in the Python that runs (PYTHON, or python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/docs/benchmarks}
"${PYTHON:-python3}" "$root/benchmarks/gpu_needs.py" torch triton sglang xgrammar transformers --plugin sglang.srt.plugins
mkdir -p "$out"
"${PYTHON:-python3}" "$root/benchmarks/sglang_paths.py" --json "$out/gpu_sglang_paths.json"
