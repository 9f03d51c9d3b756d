#!/usr/bin/env bash
# Run a bench on a GPU machine that reaches no package index, from a copy of the checkout.
#
#   bench/gpu_run.sh [options of bench_decode]
#   BENCH=prefill bench/gpu_run.sh [options of bench_prefill]
#   BENCH=mla bench/gpu_run.sh [options of bench_mla]
#
# Reads   .peer/*.txz          rivals, extracted to $SITE (default /tmp/site); see bench/README.md
#         .peer/modules-*.tar  FlashInfer modules of an earlier run, used as they are
#         .whl/*.whl           Python packages that the machine lacks, if any
# Writes  $OUT (default /tmp/bench-out): $BENCH.jsonl, log.txt, and modules-*.tar when
#         FlashInfer compiled something that was not carried; put those into .peer/ next time.
# Other variables (JITATTN_PRECOMPILED, JITATTN_JIT, JITATTN_BENCH_COMMIT) pass through.
# JOBS: modules compiled at once. LIMIT: seconds after which those that aren't done are killed.
# BUILD=0: compile nothing ahead.
set -euo pipefail
cd "$(dirname "$0")/.."
BENCH=${BENCH:-decode} OUT=${OUT:-/tmp/bench-out} SITE=${SITE:-/tmp/site}
mkdir -p "$OUT" "$SITE"
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec > >(tee -a "$OUT/log.txt") 2>&1

if compgen -G '.whl/*.whl' >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" .whl/*.whl
fi
if [[ -d .peer && ! -e $SITE/.unpacked ]]; then
  python3 bench/carry.py unpack .peer "$SITE"
  touch "$SITE/.unpacked"
fi

# The options that decide what is compiled go to build_rivals, too.
select=()
[[ $BENCH == decode ]] || select=("--$BENCH" figures)
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --cases | --contenders) next=$((i + 1)); option="${!i}=${!next}" ;;
    --cases=* | --contenders=*) option=${!i} ;;
    *) continue ;;
  esac
  [[ $BENCH == decode ]] || option=${option/#--cases=/--$BENCH=}
  select+=("$option")
done
if [[ ${BUILD:-1} == 1 ]]; then
  SECONDS=0
  python3 -m bench.build_rivals "${select[@]}" --jobs "${JOBS:-8}" ${LIMIT:+--limit "$LIMIT"} || true
  echo "rivals compiled in $SECONDS s"
fi

status=0
SECONDS=0
python3 -m "bench.bench_$BENCH" --table --json "$OUT/$BENCH.jsonl" "$@" || status=$?
echo "bench_$BENCH took $SECONDS s"

cache=${FLASHINFER_WORKSPACE_BASE:-$HOME}/.cache/flashinfer
if compgen -G "$cache/*/*/cached_ops/*/*.so" >/dev/null; then
  python3 bench/carry.py pack "$cache" "$OUT"
fi
exit "$status"
