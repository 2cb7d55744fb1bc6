#!/usr/bin/env bash
# Measure one GPU in blocks, in the order of what is missed most; docs/measuring.md says how to run and resume it.
#
#   benchmarks/campaign.sh OUT [BLOCK ...]
#
# OUT/BLOCK.sqlite is the store of a block: a second call measures only what is missing in it, and passes over blocks
# that OUT/done.txt says are whole. FROM=DIR begins from what an earlier call left in DIR. No block is begun once
# SECONDS_TOTAL are over, and none takes more than SECONDS_PER_BLOCK. CPU=1 measures the CPU, on small sizes. RETRY=1
# measures rows again that failed or were wrong, in whole blocks too.
# Needs Python with PyTorch and this repository's dependencies (PYTHON=... chooses it), and no network.
set -euo pipefail

seconds=${SECONDS_PER_BLOCK:-480}
# For calls of 10 minutes: what is left is for importing torch and for the last row, which is finished.
total=${SECONDS_TOTAL:-540}
python=${PYTHON:-python3}
# A block that has less than this is left for the next call. [s]
least=30
# Files above this are more than a channel for results may take. [byte]
most_bytes=$((16 * 1000 * 1000))
# Formats beside bf16, those of Hopper; a device that lacks one says so.
formats=${FORMATS:-fp16,tf32,fp32,fp8,int8}
# The same products again at another time, and which kernels the library took for them.
names=" --kernel-names"
[ -z "${CPU:-}" ] || { formats=${FORMATS:-fp16,int8}; names=; }

# Suites and options. First the sizes that nobody has published for current GPUs, in the format that training uses.
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
  [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "'$number' is no whole number of seconds" >&2; exit 2; }
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

# What is said of the machine must not end a campaign where it cannot be asked.
environment() {
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $1"
  uname -srm
  "$python" -c 'from importlib.metadata import version; print("torch", version("torch"))' 2>&1 | tail -n 1 || true
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --format=csv --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu || true
  fi
}

# 0: every row fine; 1: some failed, which the stores say; 2 and above: a block could not be run to its end.
worst=0
for block in "${blocks[@]}"; do
  if [ -z "${RETRY:-}" ] && grep -qx "$block" "$out/done.txt"; then
    echo "$block: done before"
    continue
  fi
  left=$((total - SECONDS))
  if [ "$left" -lt "$least" ] && [ "$left" -lt "$total" ]; then
    echo "$block: left for another call, ${SECONDS} of $total s are over"
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
  "$python" -m shapewright bench "${words[@]}" "${device[@]}" --store "$store" \
    --budget "$((left < seconds ? left : seconds))s" >"$out/last.txt" 2>&1 || code=$?
  { echo "== $block, exit code $code"; cat "$out/last.txt"; } >>"$out/campaign.txt"
  tail -n 4 "$out/last.txt" | sed "s/^/$block: /"
  if [ "$code" -le 1 ] && grep -q 'rows measured in' "$out/last.txt" && ! grep -q 'left for a larger' "$out/last.txt"; then
    echo "$block" >>"$out/done.txt"
  fi
  [ "$code" -le "$worst" ] || worst=$code
  if [ -e "$store" ] && [ "$(stat -c %s "$store")" -gt "$most_bytes" ]; then
    echo "$block: $store is larger than $most_bytes bytes; carry it in parts" >&2
    worst=2
  fi
done
rm -f "$out/last.txt"
environment "after the last block" >>"$out/environment.txt"
exit "$worst"
