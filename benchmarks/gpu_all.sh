#!/usr/bin/env bash
# All that a machine with a GPU is for, in one go of under ten minutes: the tests marked gpu (the
# op's, the engine's, CUDA graphs), the op against others, its tiles, and an engine's tokens a
# second with and without graphs. Each part has a limit of its own, in seconds, and its files in
# the folder as it goes; one that fails or is cut off costs the others nothing.
#
#   bash benchmarks/gpu_all.sh [FOLDER] [DEVICE] [PART ...]
#
# FOLDER: benchmarks/results; DEVICE: cuda; PARTs: tests serving attention tiles, in this order.
# With more time than ten minutes: LIMIT=580 for a part, one part a call.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-benchmarks/results}
DEVICE=${2:-cuda}
PARTS=("${@:3}")
[ ${#PARTS[@]} -gt 0 ] || PARTS=(tests serving attention tiles)
PYTHON=${PYTHON:-python3}
ARGS=${ARGS:-} # of gpu.py
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0

step() { # NAME SECONDS COMMAND...: its output goes to the screen and a file as it comes
  local name=$1 limit=${LIMIT:-$2}
  shift 2
  echo "== $name, at most $limit s: $*"
  # An interrupt lets it tell what it has; what does not heed it is killed.
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT/$name.txt"
  local code=${PIPESTATUS[0]}
  [ "$code" -eq 0 ] || { echo "== $name failed ($code)"; failed=1; }
}

tests() {
  [ "$DEVICE" = cuda ] || { echo "== no tests for $DEVICE: make test has those of the fake device"; return; }
  # What has such tests alone: other folders import what a machine may lack.
  local spread
  spread=$("$PYTHON" -c 'import xdist' 2>/dev/null && echo '-n 8') # most of the time is compiling
  step gpu_tests 205 "$PYTHON" -m pytest -q -p no:cacheprovider $spread -m gpu --maxfail=30 \
    tests/compiled_attn/test_on_a_device.py tests/compiled_attn/ops tests/compiled_attn/engine \
    tests/graphs/backends
}

serving() { step gpu_serving 95 "$PYTHON" benchmarks/gpu.py --device "$DEVICE" --parts serving \
  --json "$OUT/gpu_serving.json" $ARGS; }

attention() { step gpu_attention 125 "$PYTHON" benchmarks/gpu.py --device "$DEVICE" \
  --parts attention --json "$OUT/gpu_attention.json" $ARGS; }

tiles() { step gpu_tiles 115 "$PYTHON" benchmarks/gpu.py --device "$DEVICE" --parts tiles \
  --json "$OUT/gpu_tiles.json" $ARGS; }

[ "$DEVICE" != cuda ] ||
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
for part in "${PARTS[@]}"; do
  case $part in
    tests | serving | attention | tiles) "$part" ;;
    *) echo "== expected parts of tests, serving, attention, tiles, got $part" && failed=1 ;;
  esac
done
exit $failed
