#!/usr/bin/env bash
# Average the last checkpoints of a training run.
#
# Usage: average.sh [FOLDER]    the checkpoints are in FOLDER; the result is FOLDER/averaged.pt
#
# Variables: CHECKPOINTS (in place of FOLDER), BPE (as in prepare.sh), LAST (number of epochs to average; default: all
# that train.sh kept, its KEEP).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
BPE=${BPE:-subword-nmt}
CHECKPOINTS=${1:-${CHECKPOINTS:-$HERE/checkpoints/$BPE}}
# shellcheck source=examples/wmt16_en_de/common.sh
source "$HERE/common.sh"
no_arguments "${@:2}"

whole_numbers 1 LAST
need_file "$CHECKPOINTS" "name the folder that train.sh wrote to"
# Sorted by number: checkpoint7.pt comes before checkpoint10.pt.
epochs=$(find "$CHECKPOINTS" -maxdepth 1 -name 'checkpoint*.pt' |
    sed -n 's|.*/checkpoint\([0-9][0-9]*\)\.pt$|\1|p' | sort -n)
found=$(wc -w <<<"$epochs" | tr -d ' ')
LAST=${LAST:-$found}
[ "$found" -gt 0 ] || die "$CHECKPOINTS has no checkpoint of an epoch (checkpoint1.pt, ...): train longer," \
    "and without --no-epoch-checkpoints."
[ "$found" -ge "$LAST" ] || die "$CHECKPOINTS has $found epochs, fewer than LAST=$LAST: train longer, or set LAST=$found."

inputs=()
for epoch in $(tail -n "$LAST" <<<"$epochs"); do inputs+=("$CHECKPOINTS/checkpoint$epoch.pt"); done
say "averaging $LAST checkpoints of $CHECKPOINTS"
"$PYTHON" "$HERE/average_checkpoints.py" "$CHECKPOINTS/averaged.pt" "${inputs[@]}"
say "made $CHECKPOINTS/averaged.pt"
