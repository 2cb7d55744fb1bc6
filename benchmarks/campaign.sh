#!/usr/bin/env bash
# Measure one GPU in blocks, the most needed measurements first; see docs/measuring.md.
#
#   benchmarks/campaign.sh OUT [BLOCK ...]
#
# OUT/BLOCK.sqlite is the store of a block. A second call measures only the rows that a store lacks, and skips blocks
# listed in OUT/done.txt. FROM=DIR starts from the results of an earlier call in DIR. No block begins after
# SECONDS_TOTAL, and none takes longer than SECONDS_PER_BLOCK. CPU=1 measures the CPU, with small sizes. RETRY=1
# measures failed and wrong rows again, in completed blocks too.
# Needs Python with PyTorch and this repository's dependencies (PYTHON=... chooses it), and no network.
set -euo pipefail

seconds=${SECONDS_PER_BLOCK:-480}
# For a limit of 10 minutes: the rest is for importing torch and finishing the last row.
total=${SECONDS_TOTAL:-540}
python=${PYTHON:-python3}
# With less time than this left, a block is not begun. [s]
min_seconds=30
# Larger stores are reported, since they may be too large to transfer. [byte]
max_bytes=$((16 * 1000 * 1000))
# Formats other than bf16 that Hopper supports; the bench reports those that a device lacks.
formats=${FORMATS:-fp16,tf32,fp32,fp8,int8}
# Repeats GEMMs at another time, with the names of their kernels.
names=" --kernel-names"
[ -z "${CPU:-}" ] || { formats=${FORMATS:-fp16,int8}; names=; }

# Suites and options. First the sizes without published measurements on current GPUs, in bf16.
declare -A suites=(
  [odd]="alignment,batched,tiles --dtype bf16"
  [kernels]="attention,pointwise,experts --dtype bf16"
  [random]="random --dtype bf16"
  [model]="model"
  [formats]="alignment --dtype $formats"
  [layer]="layer"
  [memory]="decode,memory"
  [names]="alignment,tiles,batched,random --dtype bf16$names"
  [rest]="mamf,smoke,paper --dtype bf16"
  [compiled]="compiled"
)
order=(odd kernels random model formats layer names memory rest compiled)

[ $# -ge 1 ] || { echo "usage: $0 OUT [BLOCK ...]; blocks: ${order[*]}" >&2; exit 2; }
out=$1
shift
blocks=("${@:-${order[@]}}")
for block in "${blocks[@]}"; do
  [ -n "${suites[$block]:-}" ] || { echo "unknown block '$block'; choose from ${order[*]}" >&2; exit 2; }
done
for number in "$seconds" "$total"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "'$number' is not a positive integer number of seconds" >&2; exit 2; }
done

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$top/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
device=()
[ -z "${CPU:-}" ] || device=(--cpu)
[ -z "${RETRY:-}" ] || device+=(--retry-failed)
if [ -n "${FROM:-}" ] && [ ! -e "$out/done.txt" ] && [ -e "$FROM/done.txt" ]; then
  cp "$FROM/done.txt" "$out/" && chmod u+w "$out/done.txt"
fi
touch "$out/done.txt"

# Failing to describe the machine must not end a campaign.
environment() {
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $1"
  uname -srm
  "$python" -c 'from importlib.metadata import version; print("torch", version("torch"))' 2>&1 | tail -n 1 || true
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --format=csv --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu || true
  fi
}

# Prints the counts of a run, without its rows; exits with 0 if no row is left to measure.
summarize='
import json, sys
try:
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
except ValueError:
    sys.exit(2)  # the bench ended with an error
print(json.dumps({name: value for name, value in run.items() if name != "rows"}))
print("{num_measured} rows measured, {num_bad} failed or wrong, {num_known} known before, {num_left} left".format(**run))
sys.exit(1 if run["num_left"] else 0)
'

# 0: all rows are correct; 1: some failed, see the stores; 2 and above: a block could not be completed.
worst=0
for block in "${blocks[@]}"; do
  if [ -z "${RETRY:-}" ] && grep -qx "$block" "$out/done.txt"; then
    echo "$block: done before"
    continue
  fi
  left=$((total - SECONDS))
  if [ "$left" -lt "$min_seconds" ] && [ "$left" -lt "$total" ]; then
    echo "$block: left for another call, ${SECONDS} of $total s are used"
    continue
  fi
  store="$out/$block.sqlite"
  if [ -n "${FROM:-}" ] && [ ! -e "$store" ] && [ -e "$FROM/$block.sqlite" ]; then
    cp "$FROM/$block.sqlite"* "$out/" # with its write-ahead log, if the earlier call was killed
    chmod u+w "$store"*
  fi
  environment "before $block" >>"$out/environment.txt"
  code=0
  read -ra words <<<"${suites[$block]}"
  "$python" -m shapewright bench "${words[@]}" "${device[@]}" --store "$store" --json \
    --budget "$((left < seconds ? left : seconds))s" >"$out/last.json" 2>"$out/last.txt" || code=$?
  is_complete=
  "$python" -c "$summarize" "$out/last.json" >>"$out/last.txt" && is_complete=1
  { echo "== $block, exit code $code"; cat "$out/last.txt"; } >>"$out/campaign.txt"
  tail -n 1 "$out/last.txt" | sed "s/^/$block: /"
  if [ "$code" -le 1 ] && [ -n "$is_complete" ]; then
    echo "$block" >>"$out/done.txt"
  fi
  [ "$code" -le "$worst" ] || worst=$code
  if [ -e "$store" ] && [ "$(stat -c %s "$store")" -gt "$max_bytes" ]; then
    echo "$block: $store is larger than $max_bytes bytes; transfer it in parts" >&2
    worst=2
  fi
done
rm -f "$out/last.txt" "$out/last.json"
environment "after the last block" >>"$out/environment.txt"
exit "$worst"
