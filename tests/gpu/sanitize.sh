#!/usr/bin/env bash
# compute-sanitizer over the product's kernels on odd shapes: out-of-bounds accesses, then races in shared memory.
#   tests/gpu/sanitize.sh [EVERY [TOOL...]]    one case in EVERY (default 20) is run, by memcheck and racecheck
# WONLY_SWEEP: the program, if it is built already (benchmarks/tune.py --build --define WONLY_EVERY_LANE_ARRIVES).
set -eu
cd "$(dirname "$0")/../.."
every=${1:-20}
shift $(($# > 0))
program=${WONLY_SWEEP:-$(python3 benchmarks/tune.py --build --define WONLY_EVERY_LANE_ARRIVES | tail -n 1)}
[ $# -gt 0 ] || set -- memcheck racecheck
for tool in "$@"; do
  echo "== $tool"
  # The sums in float64 that results are compared with take one thread each, and longest.
  compute-sanitizer --tool "$tool" --kernel-name-exclude kns=reference --error-exitcode 1 "$program" check "$every"
done
