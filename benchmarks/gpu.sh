#!/usr/bin/env bash
# Checks the kernels and measures a step on the GPU, beside other methods: bash benchmarks/gpu.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
exec "$python" "$root/benchmarks/gpu.py" "$@"
