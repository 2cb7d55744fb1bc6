#!/usr/bin/env bash
# Measure one GPU in blocks, in the order of what is missed most; docs/measuring.md says how to run and resume it.
#
#   benchmarks/campaign.sh OUT [BLOCK ...]
#
# OUT/BLOCK.sqlite is the store of a block: a second call measures only what is missing in it. FROM=DIR begins from the
# stores that an earlier call left in DIR. CPU=1 measures the CPU, on small sizes; SECONDS_PER_BLOCK shortens blocks.
# Needs Python with PyTorch and this repository's dependencies (PYTHON=... chooses it), and no network.
set -euo pipefail

# Under 9 minutes with the import of torch and the last row, which is finished before a block ends.
seconds=${SECONDS_PER_BLOCK:-480}
python=${PYTHON:-python3}
# Files above this are more than a channel for results may take. [byte]
most_bytes=$((16 * 1000 * 1000))

declare -A suites=(
  [align]=alignment
  [model]=model
  [attention]=attention
  [layer]=layer
  [random]=random
  [waves]=tiles,paper
  [memory]=memory,decode
  [rest]=pointwise,mamf,smoke
)
order=(align model attention layer random waves memory rest)

[ $# -ge 1 ] || { echo "usage: $0 OUT [BLOCK ...]; blocks: ${order[*]}" >&2; exit 2; }
out=$1
shift
blocks=("${@:-${order[@]}}")
for block in "${blocks[@]}"; do
  [ -n "${suites[$block]:-}" ] || { echo "unknown block '$block'; choose from ${order[*]}" >&2; exit 2; }
done

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$top/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
device=()
[ -z "${CPU:-}" ] || device=(--cpu)

environment() {
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $1"
  uname -srm
  "$python" -c 'from importlib.metadata import version; print("torch", version("torch"))'
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --format=csv --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu
  fi
}

# 0: every row fine; 1: some failed, which the stores say; 2: a block could not be run.
worst=0
for block in "${blocks[@]}"; do
  store="$out/$block.sqlite"
  if [ -n "${FROM:-}" ] && [ ! -e "$store" ] && [ -e "$FROM/$block.sqlite" ]; then
    cp "$FROM/$block.sqlite"* "$out/" # with its write-ahead log, if the earlier call was killed
  fi
  environment "before $block" >>"$out/environment.txt"
  code=0
  "$python" -m shapewright bench "${suites[$block]}" "${device[@]}" --budget "${seconds}s" --store "$store" \
    >"$out/$block.txt" 2>&1 || code=$?
  tail -n 4 "$out/$block.txt" | sed "s/^/$block: /"
  [ "$code" -le "$worst" ] || worst=$code
  if [ -e "$store" ] && [ "$(stat -c %s "$store")" -gt "$most_bytes" ]; then
    echo "$block: $store is larger than $most_bytes bytes; carry it in parts" >&2
    worst=2
  fi
done
environment "after the last block" >>"$out/environment.txt"
exit "$worst"
