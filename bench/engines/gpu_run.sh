#!/usr/bin/env bash
# Run bench.engines.vllm_engine on a GPU machine that reaches no package index.
#
#   bench/engines/gpu_run.sh [options of bench.engines.vllm_engine]
#
# Reads   $ENGINE (default .eng; see bench/README.md)
#           py.txz, deps.txz   packages, unpacked to $SITE (default /tmp/site)
#           C.xz, FA3.xz       vLLM's libraries
#           bundle/            jitattn's kernels, if it is there
# Writes  $OUT (default /tmp/bench-out): vllm-engine.jsonl, log.txt, summary.txt
set -uo pipefail
cd "$(dirname "$0")/../.."
ENGINE=${ENGINE:-.eng} OUT=${OUT:-/tmp/bench-out} SITE=${SITE:-/tmp/site} WORK=${WORK:-/tmp/engine}
mkdir -p "$OUT" "$SITE/vllm/vllm_flash_attn" "$WORK"
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
[[ -d $ENGINE/bundle ]] && export JITATTN_PRECOMPILED=$PWD/$ENGINE/bundle
exec > >(tee -a "$OUT/summary.txt") 2>&1
SECONDS=0

if [[ ! -e $SITE/.unpacked ]]; then
  xz -dc "$ENGINE/C.xz" >"$SITE/vllm/_C_stable_libtorch.abi3.so" & jobs=($!)
  xz -dc "$ENGINE/FA3.xz" >"$SITE/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" & jobs+=($!)
  tar -C "$SITE" -xJf "$ENGINE/py.txz" & jobs+=($!)
  tar -C "$SITE" -xJf "$ENGINE/deps.txz" & jobs+=($!)
  wait "${jobs[@]}"  # alone, it would wait for tee, too
  timeout 40 python3 -m compileall -q -j 0 "$SITE" >/dev/null 2>&1
  touch "$SITE/.unpacked"
fi
echo "[$SECONDS s] unpacked"
python3 - "$SITE/vllm" <<'PY' || exit 1
import shutil, sys, torch, transformers, triton

print("torch", torch.__version__, "transformers", transformers.__version__, "triton", triton.__version__)
print("compiler", shutil.which("gcc"), "card", torch.cuda.get_device_name())
for name in ("_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C"):
    torch.ops.load_library(f"{sys.argv[1]}/{name}.abi3.so")
x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(x)
torch.ops._C.rms_norm(out, x, torch.ones_like(x[0]), 1e-5)
error = (out.float() - torch.nn.functional.rms_norm(x.float(), (4096,), eps=1e-5)).abs().max()
print("rms_norm differs by at most", error.item())
PY
echo "[$SECONDS s] libraries loaded"

status=0
python3 -m bench.engines.vllm_engine --out "$WORK" "$@" || status=$?
cp "$WORK/vllm-engine.jsonl" "$WORK/log.txt" "$OUT/"
echo "[$SECONDS s] status $status"
exit "$status"
