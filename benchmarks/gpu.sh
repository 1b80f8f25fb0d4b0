#!/usr/bin/env bash
# Measures on a GPU what is not measured yet: bash benchmarks/gpu.sh --help. With an engine and this project installed:
# bash benchmarks/gpu.sh vllm [DIRECTORY for the results]   paths, speculation, lists, draws, narrow_head
# bash benchmarks/gpu.sh sglang [DIRECTORY]                 paths, lists, draws
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ ${1:-} == vllm || ${1:-} == sglang ]]; then
    out=${2:-$root/docs/benchmarks}
    mkdir -p "$out"
    run() { "$python" "$root/benchmarks/$1.py" --json "$out/gpu_$1.json" "${@:2}"; }
    if [[ $1 == sglang ]]; then
        "$python" "$root/benchmarks/gpu_needs.py" torch triton sglang xgrammar transformers --plugin sglang.srt.plugins
    else
        "$python" "$root/benchmarks/gpu_needs.py" torch triton vllm xgrammar transformers --plugin vllm.general_plugins
        run paths --kinds device --drafts none ngram forced "draft model" --items 1e6
        run narrow_head
    fi
    run paths
    run lists
    run draws
    exit
fi
exec "$python" "$root/benchmarks/gpu.py" "$@"
