#!/bin/bash
# One run on one GPU, under 8 minutes: is the gpu backend right, and how fast is it? `--rehearsal` needs no GPU.
# Everything printed so far is also in the json file, which is written anew after every row.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
budget=${BUDGET:-420}
if ! problem=$("$python" -c 'import torch, triton, numba, jaxtyping, threadpoolctl' 2>&1); then
    echo "gpu_check: expected torch, triton, numba, jaxtyping and threadpoolctl, got: ${problem##*$'\n'}" >&2
    exit 2
fi
export PYTHONUNBUFFERED=1 PYTHONPATH=.
# The script looks at its budget between rows; a row that hangs or compiles for too long is ended from outside.
exec timeout --signal=INT --kill-after=10 $((budget + 45)) "$python" -m benchmarks.gpu_check --budget "$budget" "$@"
