#!/usr/bin/env bash
# On a machine with a GPU: set up what is missing, run the GPU tests, then time the kernels.
#   bash bench/gpu.sh [tests|tune|bench|all]      (default: all)
# Wheels that the machine lacks are taken from .carry/whl; SmolLM2's GGUF, cut by
# bench/gpu_carry.py, is put together from .carry/smollm2/ (or LOCKSTEP_SMOLLM2 names the file).
# Full logs go to $OUT, short tables to the terminal, last.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
export OUT=${OUT:-bench/out} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

site=/tmp/lockstep-site
if compgen -G ".carry/whl/*.whl" >/dev/null && [ ! -d "$site" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" .carry/whl/*.whl || exit 1
fi
export PYTHONPATH="$site:$PWD"
python3 bench/gpu_carry.py --join || true
[ -f /tmp/lockstep-smollm2.gguf ] && export LOCKSTEP_SMOLLM2=${LOCKSTEP_SMOLLM2:-/tmp/lockstep-smollm2.gguf}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'

status=0
if [ "$what" = tests ] || [ "$what" = all ]; then
  workers=${WORKERS:-$(($(nproc) > 10 ? 10 : $(nproc)))}
  timeout "${TEST_SECONDS:-400}" python3 -m pytest tests/gpu -q --maxfail=60 -n "$workers" \
    --timeout 300 -p no:cacheprovider --durations=12 ${PYTEST_ARGS:-} >"$OUT/tests.log" 2>&1 || status=$?
  grep -E "^(FAILED|ERROR|SKIPPED)|passed|failed|^E  |s call" "$OUT/tests.log" | cut -c1-220 | tail -70
fi
if [ "$what" = tune ]; then
  timeout "${TUNE_SECONDS:-300}" python3 bench/gpu_tune.py --write >"$OUT/tune.log" 2>&1 || status=$?
  cp lockstep/kernels/cuda/tables.py "$OUT/tables.py"
  tail -60 "$OUT/tune.log" | cut -c1-200
fi
if [ "$what" = bench ] || [ "$what" = all ]; then
  timeout "${BENCH_SECONDS:-200}" python3 bench/gpu_kernels.py >"$OUT/bench.log" 2>&1 || status=$?
  tail -60 "$OUT/bench.log" | cut -c1-200
fi
exit $status
