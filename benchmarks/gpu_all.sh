#!/usr/bin/env bash
# All that a machine with a GPU is for, in one go of under ten minutes: the op's tests there, the
# engine's, and the figures. Results go to the folder in $1 (default: benchmarks/results).
#
#   bash benchmarks/gpu_all.sh [FOLDER] [DEVICE]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-benchmarks/results}
DEVICE=${2:-cuda}
PYTHON=${PYTHON:-python3}
ARGS=${ARGS:-} # of gpu.py
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
failed=0

step() { # NAME SECONDS COMMAND...: its output goes to the screen and a file; others run if it fails
  local name=$1 limit=$2
  shift 2
  echo "== $name: $*"
  timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.txt"
  local code=${PIPESTATUS[0]}
  [ "$code" -eq 0 ] || { echo "== $name failed ($code)"; failed=1; }
}

if [ "$DEVICE" = cuda ]; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
  # The folders with such tests alone: others import what a machine may lack.
  SPREAD=$("$PYTHON" -c 'import xdist' 2>/dev/null && echo '-n 8') # most of the time is compiling
  step gpu_tests 270 "$PYTHON" -m pytest -q -p no:cacheprovider $SPREAD -m gpu \
    tests/compiled_attn/ops tests/compiled_attn/engine tests/graphs/backends
fi
step gpu 310 "$PYTHON" benchmarks/gpu.py --device "$DEVICE" --json "$OUT/gpu.json" $ARGS
exit $failed
