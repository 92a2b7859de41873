#!/usr/bin/env bash
# Train on samples of sounds, on a CPU or on GPUs. Run it again to continue from the last checkpoint. Arguments are
# passed to fairseq-train after the recipe's own and override them.
#
# Variables: DATA, SIZE, SOURCE (as in prepare.sh), ARCH (mega_classifier_small; full: mega_sc_raw, or mega_sc_raw_big),
# CHECKPOINTS (checkpoints/$SIZE/$ARCH beside this script), and with small; full: UPDATES (150; 250000), WARMUP (30;
# 10000), LR (1e-2; 8e-3 for mega_sc_raw_big), BATCH (8; 20: clips in one update over all GPUs), MAX_EXAMPLES (BATCH:
# clips in one batch on one GPU), SAVE (50; each epoch: updates between checkpoints), PRECISION (fp32; or fp16, bf16).
#
# Writes to CHECKPOINTS: checkpoints, and train.log.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PRESET=mega_sc_raw
# shellcheck source=examples/lra/common.sh
source "$HERE/../lra/common.sh"

case $SIZE in
small)
    recipe UPDATES=150 WARMUP=30 LR=1e-2 BATCH=8 SAVE=50
    set -- "${VALUES[@]}" --max-positions 16000 "$@"
    ;;
full)
    case $ARCH in mega_sc_raw_big*) LR=${LR:-8e-3} ;; esac
    recipe UPDATES=250000 WARMUP=10000 LR=1e-2 BATCH=20
    ;;
esac
need_file "$BIN/scaling" "run prepare.sh first, with the same DATA and SIZE"
read -r mean deviation <"$BIN/scaling"
train --input-kind values --values-mean="$mean" --values-deviation="$deviation" --weight-decay 0.01 "$@"
