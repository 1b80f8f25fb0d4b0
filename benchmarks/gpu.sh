#!/usr/bin/env bash
# Checks the kernels and measures on the GPU: bash benchmarks/gpu.sh --help. With an engine and this project installed:
# bash benchmarks/gpu.sh vllm [DIRECTORY for the results]   paths, speculation, ranked lists with and without item_set_shared_prefix
# bash benchmarks/gpu.sh sglang [DIRECTORY]                 paths
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ ${1:-} == vllm || ${1:-} == sglang ]]; then
    out=${2:-$root/docs/benchmarks}
    mkdir -p "$out"
    run() { "$python" "$root/benchmarks/$1" --json "$out/gpu_$2.json" "${@:3}"; }
    if [[ $1 == sglang ]]; then
        "$python" "$root/benchmarks/gpu_needs.py" torch triton sglang xgrammar transformers --plugin sglang.srt.plugins
        run sglang_paths.py sglang_paths
    else
        "$python" "$root/benchmarks/gpu_needs.py" torch triton vllm xgrammar transformers matplotlib --plugin vllm.general_plugins
        run vllm_paths.py vllm_paths --plot "$out/gpu_vllm_paths.png"
        run speculation.py speculation
        run ranking.py ranking --plot "$out/gpu_ranking.png"
        run lists.py lists_shared --parts shared
    fi
    exit
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
exec "$python" "$root/benchmarks/gpu.py" "$@"
