#!/usr/bin/env bash
# Checks that only a GPU can make, without a network, on kernels compiled before: two calls,
# first and second, of less than nine minutes each, and in each what matters most comes first.
#
#   tests/gpu.sh [FOLDER [first|second|PART...]]
#
# FOLDER, bench/results unless given, gets <gpu>_<first|second|PARTs>.tar.gz, written anew after
# every part and when the run is ended: a log, and as JSON what checks and benchmarks have found so
# far. PARTs are named at the end of this file. Each has a time limit, and one that fails keeps no
# other from running. PREBUILT names a folder with the _C_cpu*.so, _C_cuda*.so and _build_info.json
# that `python setup.py build_ext --inplace` leaves in accumext/backends, if not those of this
# checkout. Kernels that do not load are compiled on first use. PYTHON chooses the interpreter.
# Exit status: 0 if no part failed, 1 if one did, 2 without a GPU.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
facts=$("$python" - <<'PY'
import glob, platform, re, sys, sysconfig
try:
    import torch
except ImportError as error:
    sys.exit(f"tests/gpu.sh: nothing was run, because {sys.executable} has no torch: {error}.")
if not torch.cuda.is_available():
    sys.exit(f"tests/gpu.sh: nothing was run, because torch {torch.__version__} sees no GPU.")
gpu = torch.cuda.get_device_name()
print(re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-"))
print(f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")
print(*glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/bin"), sep=":")
PY
) || exit 2
{ read -r gpu; read -r machine; read -r programs; } <<<"$facts"
mkdir -p "${1:-$root/bench/results}" && folder=$(cd "${1:-$root/bench/results}" && pwd) || exit 1
wanted=("${@:2}")
run=${gpu}_$(IFS=- && echo "${wanted[*]:-all}")
failed=0

work=$(mktemp -d "${TMPDIR:-/tmp}/accumext-gpu.XXXXXX")
results=$work/results tree=$work/tree log=$work/results/$run.log
mkdir "$results" "$tree"
archive() {  # what is there; the file is replaced as a whole
  (cd "$results" && tar -czf "$folder/.$run" --exclude='*.part' -- *)
  mv "$folder/.$run" "$folder/$run.tar.gz"
}
trap 'archive; kill $(jobs -pr) 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 143' HUP INT TERM

cp -R "$root"/{accumext,csrc,tests,bench} "$tree"
rm -f "$tree"/accumext/backends/{_C_*.so,_build_info.json}
cp "${PREBUILT:-$root/accumext/backends}"/{_C_*.so,_build_info.json} "$tree/accumext/backends"
cd "$tree" || exit 1
tested() {  # tested True|False: whether CUDA kernels must pass the self-test before they are used
  sed -i "s/\"cuda\", tested=[TF][a-z]*/\"cuda\", tested=$1/" accumext/backends/_libraries.py
}
tested False  # what does not pass it is what the parts are to show

export PYTHONPATH=$tree:$tree/tests PYTHONUNBUFFERED=1 ACCUMEXT_BACKEND=native
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}        # of the CPU's part in tests
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:$programs  # that of compute-sanitizer

part() {  # part CALL NAME SECONDS COMMAND...
  [[ " ${wanted[*]:-first second} " =~ " $1 "|" $2 " ]] || return 0
  local name=$2 limit=$3 start=$SECONDS status end=passed
  printf '\n=== %s, at most %d s\n' "$name" "$limit" >>"$log"
  timeout -k 5 "$limit" "${@:4}" >>"$log" 2>&1 &
  wait $!
  status=$?
  case $status in
    0) ;;
    124 | 137) failed=1 end="failed: cut off" ;;
    *) failed=1 end="failed: $(tail -n 1 "$log")" ;;
  esac
  printf '=== %-12s%4d s  %s\n' "$name" $((SECONDS - start)) "$end" | tee -a "$log"
  archive
  return $status
}

echo "$machine" | tee "$log"
loads=("$python" -c 'import accumext; assert accumext.backend() == "cuda", accumext.backend_reason()')
checks=("$python" tests/cuda/gpu_checks.py)
# Without torch's cache each tensor has memory of its own, so that its end is an end.
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9)
sanitizer+=(--report-api-errors no --kernel-name kernel_substring=accumext)

part "${wanted[0]:-first}" libraries 40 "${loads[@]}" || {
  export ACCUMEXT_BACKEND=jit
  part "${wanted[0]:-first}" compile 200 "${loads[@]}"
}
part first operators 50 "${checks[@]}" operators --json "$results/${gpu}_operators.json"
part first decode_loss 130 "${checks[@]}" decoder --json "$results/${gpu}_decode_loss.json"
part first decoder 120 "$python" bench/decoder.py --device cuda --json "$results/${gpu}_decoder.json"
part first benchmark 180 "$python" bench/accumulate.py --device cuda --json "$results/$gpu.json" \
  --jobs norm unscale boundary clip accumulate scale round

part second memcheck 60 "${sanitizer[@]}" --tool memcheck "${checks[@]}" operators --here .
part second racecheck 60 "${sanitizer[@]}" --tool racecheck "${checks[@]}" operators \
  --here 'head|steps|rnn'
part second tests 100 "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -ra --tb=short \
  tests/cuda/test_{cuda,cuda_decoder}.py
part second beyond 40 "${checks[@]}" beyond --json "$results/${gpu}_beyond.json"
part second masters 40 "${checks[@]}" masters --json "$results/${gpu}_masters.json"
part second loops 50 "$python" bench/loops.py --device cuda --json "$results/${gpu}_loops.json"
part second windows 110 "$python" bench/accumulate.py --device cuda --jobs window --shape 1e4/10 \
  --shape 3e7/60 --json "$results/${gpu}_windows.json"
tested True
part second doctor 30 "$python" -m accumext doctor
exit $failed
