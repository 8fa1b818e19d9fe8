#!/usr/bin/env bash
# What a GPU can show, in one command, in nine minutes and without a network: build, every operator
# once, decode_loss beside plain autograd, its other options, generate, rollout and masters beside the
# CPU, the benchmarks, doctor, tests, compute-sanitizer on small tensors. What matters most comes first.
# Each part has a time limit, one that fails does not keep the others from running, and what is found
# is written at once: cutting the run off loses no result.
#
#   tests/gpu.sh [FOLDER [PART...]]
#
# Writes FOLDER/<gpu>.json, FOLDER/<gpu>_decoder.json and FOLDER/<gpu>_loops.json, the benchmarks,
# FOLDER/<gpu>_operators.json, <gpu>_decode_loss.json, <gpu>_beyond.json and <gpu>_masters.json, the
# checks of gpu_checks.py, FOLDER/<gpu>_checks.json, what became of each part, and FOLDER/<gpu>.log, what the
# parts print; FOLDER is bench/results unless given. PARTs, as named at the end of this file, are run
# instead of all, after the build. PYTHON chooses the interpreter, whose torch (2.10 or newer, with
# CUDA) and nvcc (on PATH, in CUDA_HOME, /usr/local/cuda or its site-packages) are used; the package
# is compiled in a copy of the tree by MAX_JOBS compilers, one per core unless set, and nothing is
# installed. PREBUILT names a folder with the _C_cpu*.so, _C_cuda*.so and _build_info.json of a build
# of these sources, such as accumext/backend: they are used instead of compiling, if they load.
# Exit status: 0 if no part failed, 1 if one did, 2 without a GPU.
set -uo pipefail

TOTAL=540    # s, for everything
NOT_RUN=77   # exit status of a part that cannot run here; its last line says why

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export python=${PYTHON:-python3}
facts=$("$python" - <<'PY'
import platform, re, sys
try:
    import torch
except ImportError as error:
    sys.exit(f"tests/gpu.sh: nothing was run, because {sys.executable} has no torch: {error}.")
if not torch.cuda.is_available():
    sys.exit(f"tests/gpu.sh: nothing was run, because torch {torch.__version__} sees no GPU.")
name = torch.cuda.get_device_name()
versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
print(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
print(f"{name}, {versions}")
PY
) || exit 2
mkdir -p "${1:-$root/bench/results}" || exit 1
results=$(cd "${1:-$root/bench/results}" && pwd)
wanted=("${@:2}")
gpu=${facts%%$'\n'*}
machine=${facts##*$'\n'}
export benchmark_json=$results/$gpu.json decoder_json=$results/${gpu}_decoder.json
export operators_json=$results/${gpu}_operators.json decode_loss_json=$results/${gpu}_decode_loss.json
export beyond_json=$results/${gpu}_beyond.json loops_json=$results/${gpu}_loops.json
export masters_json=$results/${gpu}_masters.json
checks_json=$results/${gpu}_checks.json log=$results/$gpu.log
: >"$log"
[ -z "${PREBUILT:-}" ] || PREBUILT=$(cd "$PREBUILT" && pwd) || exit 1
export PREBUILT=${PREBUILT:-}

work=$(mktemp -d "${TMPDIR:-/tmp}/accumext-gpu.XXXXXX")
trap 'rm -rf "$work"' EXIT
export tree=$work/tree TORCH_EXTENSIONS_DIR=$work/extensions PYTHONPATH=$work/tree:$work/tree/tests
export PYTHONUNBUFFERED=1  # what a part has printed is there when it is cut off
mkdir "$tree"
for name in accumext csrc tests bench setup.py pyproject.toml README.md LICENSE; do
  cp -R "$root/$name" "$tree"
done
rm -f "$tree"/accumext/backend/*.so "$tree/accumext/backend/_build_info.json"
cd "$tree" || exit 1

tested() {  # tested True|False: whether the CUDA kernels must pass the self-test before they run
  local file=accumext/backend/_libraries.py
  sed -i "s/_Library(\"cuda\", tested=[A-Za-z]*)/_Library(\"cuda\", tested=$1)/" "$file"
  grep -q "_Library(\"cuda\", tested=$1)" "$file"
}
tested False || exit 1  # one that does not is what the parts are to show
unset ACCUMEXT_BUILD ACCUMEXT_CUDA
export ACCUMEXT_BACKEND=native
export MAX_JOBS=${MAX_JOBS:-$(env -u OMP_NUM_THREADS nproc)}  # nproc would say that number

report() {  # report [--print]: of the parts so far
  "$python" tests/cuda/gpu_report.py "$work/parts" "$checks_json" "$machine" "$ACCUMEXT_BACKEND" "$SECONDS" "$@"
}

part() {  # part NAME SECONDS FUNCTION [ARGUMENT]: runs it in a shell of its own, and notes the end
  local name=$1 limit=$2 start=$SECONDS result reason=
  shift 2
  if [ ${#wanted[@]} -gt 0 ] && [[ " build compile ${wanted[*]} " != *" $name "* ]]; then
    return 0
  fi
  ((limit = limit < TOTAL - SECONDS ? limit : TOTAL - SECONDS))
  printf '\n=== %s, at most %d s\n' "$name" "$limit" | tee -a "$log"
  if [ "$limit" -lt 5 ]; then
    result="not run" reason="no time was left"
  else
    timeout -k 5 "$limit" bash -c '"$@"' part "$@" 2>&1 | tee "$work/log" | tee -a "$log"
    case ${PIPESTATUS[0]} in
      0) result=passed ;;
      "$NOT_RUN") result="not run" reason=$(tail -n 1 "$work/log") ;;
      124 | 137) result=failed reason="cut off after $limit s" ;;
      *) result=failed reason=$(tail -n 1 "$work/log") ;;
    esac
  fi
  printf '%s\t%s\t%d\t%s\n' "$name" "$result" $((SECONDS - start)) "${reason//$'\t'/ }" >>"$work/parts"
  report
  [ "$result" = passed ]
}

loads() {  # whether the libraries do
  "$python" -c 'import accumext; assert accumext.backend() == "cuda", accumext.backend_reason()'
}

build() {
  if [ -n "$PREBUILT" ]; then
    cp "$PREBUILT"/_C_{cpu,cuda}*.so "$PREBUILT/_build_info.json" accumext/backend && loads && return
    echo "the libraries in $PREBUILT cannot be used; compiling"
    rm -f accumext/backend/*.so accumext/backend/_build_info.json
  fi
  ACCUMEXT_BUILD=require ACCUMEXT_CUDA=1 "$python" setup.py --quiet build_ext --inplace &&
    ls accumext/backend/_C_cuda.*.so
}

operators() {
  "$python" tests/cuda/gpu_checks.py operators --json "$operators_json"
}

decode_loss() {
  "$python" tests/cuda/gpu_checks.py decoder --json "$decode_loss_json"
}

beyond() {
  "$python" tests/cuda/gpu_checks.py beyond --json "$beyond_json"
}

masters() {
  "$python" tests/cuda/gpu_checks.py masters --json "$masters_json"
}

doctor() {
  tested True
  "$python" -m accumext doctor && loads
  local status=$?
  tested False
  return $status
}

tests() {  # of the operations; no other settings than these, since plugins may be missing
  if ! "$python" -c 'import pytest'; then
    echo "pytest is not installed"
    return "$NOT_RUN"
  fi
  local files=() file
  for file in tests/{cuda/test_{cuda,cuda_decoder},decoder/test_{callable_path,decode_loss,embedding,precision,recurrent_state,saved_for_backward,token_buffers},ops/test_{accumulate,clip_grad_norm,norm,registration,scale,unscale_check_clip_accumulate}}.py; do
    if grep -q '^from hypothesis' "$file" && ! "$python" -c 'import hypothesis' 2>/dev/null; then
      echo "left out, because hypothesis is not installed: $file"
    else
      files+=("$file")
    fi
  done
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$MAX_JOBS}  # conftest.py would have one thread alone
  "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -ra --tb=short "${files[@]}"
}

sanitized() {  # sanitized TOOL: each tensor in memory of its own, so that its end is an end
  local tool=$1 folder program=
  for folder in $(tr ':' ' ' <<<"$PATH") "${CUDA_HOME:-}/bin" /usr/local/cuda/bin \
    "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nvidia/*/bin; do
    [ -x "$folder/compute-sanitizer" ] && program=$folder/compute-sanitizer && break
  done
  if [ -z "$program" ]; then
    echo "compute-sanitizer was not found"
    return "$NOT_RUN"
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$program" --tool "$tool" --error-exitcode 9 \
    --report-api-errors no --kernel-name kernel_substring=accumext \
    "$python" tests/cuda/host_cuda/small_calls.py >"$tool.log" 2>&1
  local status=$?
  cat "$tool.log"
  if grep -q "Device not supported" "$tool.log"; then
    echo "compute-sanitizer does not support this device"
    return "$NOT_RUN"
  fi
  return $status
}

benchmark() {
  "$python" bench/accumulate.py --device cuda --json "$benchmark_json"
}

loops() {
  "$python" bench/loops.py --device cuda --json "$loops_json"
}

decoder() {
  "$python" bench/decoder.py --device cuda --json "$decoder_json"
}

export NOT_RUN
export -f tested loads build operators decode_loss beyond masters doctor tests sanitized benchmark loops decoder
echo "$machine"
# Where the kernels do not build, they are compiled on first use, in another way.
part build 200 build || {
  export ACCUMEXT_BACKEND=jit
  part compile 200 loads
}
part operators 60 operators
part decode_loss 120 decode_loss
part beyond 40 beyond
part masters 40 masters
part decoder 90 decoder
part benchmark 120 benchmark
part loops 40 loops
part doctor 40 doctor
part tests 150 tests
part memcheck 60 sanitized memcheck
part racecheck 40 sanitized racecheck

echo
report --print | tee -a "$log"
! grep -q $'\tfailed\t' "$work/parts"
