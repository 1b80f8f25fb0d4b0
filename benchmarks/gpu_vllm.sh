#!/usr/bin/env bash
# Measures vLLM's paths, its speculation and its ranked lists on the GPU, with and without item_set_shared_prefix: bash benchmarks/gpu_vllm.sh [DIRECTORY for the results]
# Needs vLLM and this project installed in the Python that runs (PYTHON, or python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/docs/benchmarks}
"${PYTHON:-python3}" "$root/benchmarks/gpu_needs.py" torch triton vllm xgrammar transformers matplotlib --plugin vllm.general_plugins
mkdir -p "$out"
"${PYTHON:-python3}" "$root/benchmarks/vllm_paths.py" --json "$out/gpu_vllm_paths.json" --plot "$out/gpu_vllm_paths.png"
"${PYTHON:-python3}" "$root/benchmarks/speculation.py" --json "$out/gpu_speculation.json"
"${PYTHON:-python3}" "$root/benchmarks/ranking.py" --json "$out/gpu_ranking.json" --plot "$out/gpu_ranking.png"
"${PYTHON:-python3}" "$root/benchmarks/lists.py" --parts shared --json "$out/gpu_lists_shared.json"
