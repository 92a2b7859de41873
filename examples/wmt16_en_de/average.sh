#!/usr/bin/env bash
# Average the last checkpoints of a training run.
#
# Usage: average.sh [FOLDER]          FOLDER holds the checkpoints; the result is FOLDER/averaged.pt
#
# Variables: LAST (only the checkpoints of the last so many epochs; else of all that train.sh kept, KEEP there),
# CHECKPOINTS (in place of FOLDER), BPE, PYTHON.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
CHECKPOINTS=${1:-${CHECKPOINTS:-$HERE/checkpoints/$BPE}}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"

whole_numbers 1 LAST
need_file "$CHECKPOINTS" "name the folder that train.sh wrote to"
# checkpoint7.pt is epoch 7; by name it would come behind checkpoint10.pt.
epochs=$(find "$CHECKPOINTS" -maxdepth 1 -name 'checkpoint*.pt' |
    sed -n 's|.*/checkpoint\([0-9][0-9]*\)\.pt$|\1|p' | sort -n)
found=$(wc -w <<<"$epochs" | tr -d ' ')
LAST=${LAST:-$found}
[ "$found" -gt 0 ] || die "$CHECKPOINTS holds no checkpoint of an epoch (checkpoint1.pt, ...): train longer."
[ "$found" -ge "$LAST" ] || die "$CHECKPOINTS holds $found epochs where LAST=$LAST are to be averaged: train longer," \
    "or set LAST=$found."

inputs=()
for epoch in $(tail -n "$LAST" <<<"$epochs"); do inputs+=("$CHECKPOINTS/checkpoint$epoch.pt"); done
say "averaging $LAST checkpoints of $CHECKPOINTS"
"$PYTHON" "$HERE/average_checkpoints.py" "$CHECKPOINTS/averaged.pt.tmp" "${inputs[@]}"
mv "$CHECKPOINTS/averaged.pt.tmp" "$CHECKPOINTS/averaged.pt"
say "made $CHECKPOINTS/averaged.pt"
