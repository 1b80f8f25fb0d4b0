#!/usr/bin/env bash
# Checks the kernels and measures a step on the GPU, beside other methods: bash benchmarks/gpu.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" "$root/benchmarks/gpu.py" "$@"
