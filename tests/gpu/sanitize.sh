#!/usr/bin/env bash
# Run tests/gpu/test_sanitizer_*.py under compute-sanitizer, one tool after the other.
# Ends with 0 only when all are clean and memcheck finds a planted fault.
# Usage, from the repository root: tests/gpu/sanitize.sh [memcheck racecheck initcheck synccheck]
# Without arguments all four run. CASES="-k csr" and the like pick cases.
set -uo pipefail

tools=("$@")
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck initcheck synccheck)
python=${PYTHON:-python3}

# Instrument our kernels only; the option has had two names.
filter=()
help=$(compute-sanitizer --help) || exit 2
for option in --kernel-name --kernel-regex; do
  if grep -q -e "$option" <<<"$help"; then
    filter=("$option" kns=jitattn)
    break
  fi
done

# synccheck follows so many barriers in shared memory only; a grid of CTAs with rings has thousands.
barriers=()
grep -q -e --num-cuda-barriers <<<"$help" && barriers=(--num-cuda-barriers 16384)

# cuda-bindings asks a driver for functions that it may be too old to have: no fault of a kernel.
quiet=()
grep -q -e --report-api-errors <<<"$help" && quiet=(--report-api-errors no)

# Without torch's caching allocator every tensor is an allocation of its own, with known ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
sanitize() {
  local filter=("${filter[@]}")
  # What torch's kernels wrote counts as initialised only when they are watched too.
  [[ $1 == initcheck ]] && filter=()
  local barriers=("${barriers[@]}")
  [[ $1 == synccheck ]] || barriers=()
  compute-sanitizer --tool "$1" "${filter[@]}" "${quiet[@]}" "${barriers[@]}" --error-exitcode 86 "${@:2}"
}

status=0
echo "control: memcheck must report a planted fault"
if sanitize memcheck "$python" -m tests.gpu.sanitizer_control >/tmp/jitattn-sanitizer.$$ 2>&1; then
  echo "control: FAILED, nothing was reported"
  status=1
else
  grep -m1 "Invalid __global__ read" /tmp/jitattn-sanitizer.$$ || {
    echo "control: FAILED, another error:"
    tail -20 /tmp/jitattn-sanitizer.$$
    status=1
  }
fi
rm -f /tmp/jitattn-sanitizer.$$

for tool in "${tools[@]}"; do
  echo "$tool:"
  # shellcheck disable=SC2086  # CASES is several words
  sanitize "$tool" "$python" -m pytest -q -p no:cacheprovider ${CASES:-} \
    tests/gpu/test_sanitizer_{subset,queries,tokens,latents}.py ||
    status=1
done
exit $status
