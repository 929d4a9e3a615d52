#!/usr/bin/env bash
# All that a machine with a GPU is for, in parts of under ten minutes each: the tests marked gpu
# (the op's, the engine's, CUDA graphs, the conformance suite of backends), the conformance kit, the
# op against others, its tiles, recorded steps next to fresh ones, engines' tokens a second, and
# kernels that may replace Triton's; at last a table of the goals.
# Each part has a limit of its own, in seconds, and its files in the folder as it goes; one that
# fails or is cut off costs the others nothing.
#
#   bash benchmarks/gpu_all.sh [FOLDER] [DEVICE] [PART ...]
#
# FOLDER: benchmarks/results; DEVICE: cuda; PARTs: those below, in this order.
# Where a command may take ten minutes, run the sets one by one: set1 (tests attention codes
# replays), set2 (weights tiles serving sanitizer), set3 (kit engines goals), set4 (providers
# descriptors specialized goals). No device has run the two kernels of descriptors yet: each has a
# process of its own, which may fail or hang.
# LIMIT=580 for a part, one part a call.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-benchmarks/results}
DEVICE=${2:-cuda}
PARTS=("${@:3}")
[ ${#PARTS[@]} -gt 0 ] || PARTS=(set1 set2 set3 set4)
PYTHON=${PYTHON:-python3}
ARGS=${ARGS:-} # of gpu.py
KIT=${KIT:-}   # of the conformance kit
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

measure() { # PART SECONDS: a part of gpu.py
  step "gpu_$1" "$2" "$PYTHON" benchmarks/gpu.py --device "$DEVICE" --parts "$1" \
    --json "$OUT/gpu_$1.json" $ARGS
}

provide() { # PART SECONDS PROVIDER...: providers, in a process of their own
  step "gpu_$1" "$2" "$PYTHON" benchmarks/gpu.py --device "$DEVICE" --parts providers \
    --providers "${@:3}" --json "$OUT/gpu_$1.json" $ARGS
}

tests() {
  [ "$DEVICE" = cuda ] || { echo "== no tests for $DEVICE: make test has those of the fake device"; return; }
  # What has such tests alone: other folders import what a machine may lack.
  local spread
  spread=$("$PYTHON" -c 'import xdist' 2>/dev/null && echo '-n 8') # most of the time is compiling
  step gpu_tests 230 "$PYTHON" -m pytest -q -p no:cacheprovider $spread -m gpu --maxfail=30 \
    tests/compiled_attn/test_on_a_device.py tests/compiled_attn/ops tests/compiled_attn/engine \
    tests/graphs/backends
}

sanitizer() {
  [ "$DEVICE" = cuda ] || { echo "== no sanitizer for $DEVICE"; return; }
  step gpu_sanitizer 285 "$PYTHON" benchmarks/gpu_sanitizer.py --seconds 90 \
    --json "$OUT/gpu_sanitizer.json"
}

kit() {
  step gpu_kit 60 "$PYTHON" -m compiled_attn.testing --device "$DEVICE" \
    benchmarks/accelerator/dispatched.py:paged_attention_ --json "$OUT/gpu_kit.json" $KIT
}

goals() { step gpu_goals 20 "$PYTHON" benchmarks/gpu_goals.py "$OUT" --json "$OUT/gpu_goals.json"; }

[ "$DEVICE" != cuda ] ||
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
run() {
  case $1 in
    set1) for each in tests attention codes replays; do run "$each"; done ;;
    set2) for each in weights tiles serving sanitizer; do run "$each"; done ;;
    set3) for each in kit engines goals; do run "$each"; done ;;
    set4) for each in providers descriptors specialized goals; do run "$each"; done ;;
    tests | sanitizer | kit | goals) "$1" ;;
    attention) measure attention 180 ;;
    codes) measure codes 70 ;;
    replays) measure replays 70 ;;
    weights) measure weights 70 ;;
    tiles) measure tiles 115 ;;
    serving) measure serving 80 ;;
    engines) measure engines 470 ;;
    providers) provide providers 240 varlen dense+paged fa3 flashinfer ;;
    descriptors) provide descriptors 140 descriptors ;;
    specialized) provide specialized 140 specialized ;;
    *) echo "== expected parts of tests, attention, codes, replays, weights, tiles, serving," \
      "sanitizer, kit, engines, providers, descriptors, specialized, goals, got $1" && failed=1 ;;
  esac
}
for part in "${PARTS[@]}"; do run "$part"; done
exit $failed
